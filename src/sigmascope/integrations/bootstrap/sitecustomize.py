"""Python's own startup loads this in a process that `sigmascope watch` launches: its folder is on PYTHONPATH.

It takes itself out of the way, so that the process is as it would be without it, then begins to watch.
"""

import os
import sys
from importlib import import_module

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be one more module loaded
_ORIGINAL = "SIGMASCOPE_WATCH_PYTHONPATH"


def _restore_path() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]  # noqa: PTH100
    original = os.environ.pop(_ORIGINAL, None)
    if original is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original


def _watch() -> None:
    try:
        from sigmascope.integrations.autostart import start
        from sigmascope.integrations.watch_settings import LAUNCH_PREFIX, take_settings

        start(take_settings(os.environ, LAUNCH_PREFIX))
    except Exception as failure:  # noqa: BLE001 - the program runs, watched or not
        sys.stderr.write(f"Sigmascope: nothing is watched: {type(failure).__name__}: {failure}\n")


_restore_path()
_watch()


# The environment may have a sitecustomize of its own. That there is none is what Python's startup expects.
del sys.modules["sitecustomize"]
import_module("sitecustomize")
