"""What the folder in `custom_nodes` asks for when ComfyUI starts: the watch, the part in the browser, and the nodes.

Each is begun by itself. One that cannot begin is left out with a line in the log, and takes none of the others with it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from weakref import WeakSet

from sigmascope.integrations.comfyui import session
from sigmascope.probes.reading import describe

_log = logging.getLogger("sigmascope")
_WEB: Final = Path(__file__).parent / "web"
_SHOWN: Final[WeakSet[session.Session]] = WeakSet()
"""Sessions whose prompts are on ComfyUI's page: a second copy of the folder finds the same one."""
T = TypeVar("T")


class Pack(NamedTuple):
    """What ComfyUI takes from a folder in `custom_nodes`.

    Attributes:
        nodes: Classes of nodes, by the name that workflows have for them.
        titles: Their titles, by the same name.
        web: The folder of the scripts that its page loads; None: it loads none.
    """

    nodes: dict[str, type]
    titles: dict[str, str]
    web: str | None


def load() -> Pack:
    """Begin, and say what there is for ComfyUI. With `SIGMASCOPE=0` there are only nodes, so that workflows load."""
    watching = session.start()
    if watching in _SHOWN:
        _log.warning("sigmascope: custom_nodes has its loader twice: the second copy does nothing")
        return Pack({}, {}, None)
    if watching is not None:
        _SHOWN.add(watching)
    web = None if watching is None else _or_none("the page shows no prompts", lambda: _serve(watching))
    nodes, titles = _or_none("nodes are missing", lambda: _nodes(watching)) or ({}, {})
    return Pack(nodes, titles, web)


def _serve(watching: session.Session) -> str:
    from sigmascope.integrations.comfyui.routes import serve, server_here

    serve(watching, server_here())
    return str(_WEB)


def _nodes(watching: session.Session | None) -> tuple[dict[str, type], dict[str, str]]:
    from sigmascope.integrations.comfyui.nodes import NODES, write_wanted_reports

    if watching is not None:
        watching.listeners.append(write_wanted_reports)
    return dict(NODES), {name: node.TITLE for name, node in NODES.items()}


def _or_none(missing: str, begin: Callable[[], T]) -> T | None:
    try:
        return begin()
    except Exception as failure:  # noqa: BLE001 - ComfyUI goes on without it
        _log.warning("sigmascope: %s (%s)", missing, describe(failure))
        return None
