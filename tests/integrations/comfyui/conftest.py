import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.comfy_shapes.checkout import why_not
from tests.integrations.comfyui.host import Host, Node, latent
from tests.integrations.comfyui.server import Server, make_base, serving

from sigmascope.integrations.comfyui.session import Session
from sigmascope.records.run import Run

Watch = Callable[..., "Watched"]


class Watched:
    """A session on a host, and the records that it made."""

    def __init__(self, host: Host, session: Session) -> None:
        self.host, self.session = host, session

    def run(self, graph: Any, prompt_id: str = "prompt-1") -> Run:
        """The record of a prompt."""
        self.host.prompt(graph, prompt_id)
        return self.records()[-1]

    def records(self) -> list[Run]:
        """All records so far, once what is under way is done."""
        thread = self.session._thread
        if thread is not None:
            self.session._work.put(None)
            thread.join()
        return list(self.session.last)

    def off(self) -> dict[str, str | None]:
        """Instruments that are off, with their reasons."""
        return {
            one["name"]: one["reason"]
            for one in self.session.status()["instruments"]
            if one["state"] == "off"
        }


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A stand-in of ComfyUI in `sys.modules`, with a few nodes."""
    host = Host()
    for name, module in host.modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def sample(latent_image: Any, steps: int, **_: Any) -> Any:
        host.step_through(steps)
        return (latent(),)

    def expand(x: Any) -> Any:
        inner = {
            "a": {"class_type": "Pass", "inputs": {"x": x}},
            "b": {"class_type": "Pass", "inputs": {"x": x}},
        }
        return {"expand": inner, "last": "b"}

    async def wait(x: Any) -> Any:
        return (x,)

    def load(ckpt_name: str) -> Any:
        host.module("comfy.utils").load_torch_file(ckpt_name)
        return (object(),)

    def fail(x: Any) -> Any:
        raise ValueError("a cat was planted")

    host.nodes = {
        "Load": Node(("MODEL",), load),
        "Empty": Node(("LATENT",), lambda: (latent(0.0),)),
        "Sampler": Node(("LATENT",), sample),
        "Pass": Node(("LATENT",), lambda x: (x,)),
        "Expand": Node(("LATENT",), expand),
        "Wait": Node(("LATENT",), wait),
        "Fail": Node(("LATENT",), fail),
    }
    return host


@pytest.fixture
def watch(host: Host, tmp_path: Path) -> Iterator[Watch]:
    """Begin a session on the host."""
    begun: list[Session] = []

    def begin(privacy: Any = "full") -> Watched:
        session = Session(tmp_path, privacy)
        session.start()
        begun.append(session)
        return Watched(host, session)

    yield begin
    for session in begun:
        session.stop()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's base folder with tiny models, nodes that plant faults, and our loader."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("comfyui")
    make_base(base)
    return base


@pytest.fixture(scope="session")
def server(base: Path) -> Iterator[Server]:
    """A watched server, for all tests."""
    with serving(base) as server:
        yield server
