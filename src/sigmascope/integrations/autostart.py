"""A process that watches itself from Python's startup to its end, while its code stays as it is.

`sigmascope watch script.py` starts Python anew with the folder `bootstrap` on its path (`launch.launch`);
`SIGMASCOPE=1` does so through a startup file (`launch.install`). Both end up in `start`, which waits for the first
import of what can be watched. Python's own startup runs this code: until that import it loads nothing but small
parts of the standard library.
"""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Final, NamedTuple

from sigmascope.integrations.import_hook import FINDER

if TYPE_CHECKING:
    from sigmascope.integrations.process_recording import Recording

_WATCH: Final = "sigmascope.integrations.diffusers.watch"
STARTS_WITH: Final = frozenset({"diffusers", "sigmascope.monitor", _WATCH})
"""Pipelines come from the first; code that names its own stages imports the second, and code with a watch the third."""
_SPAWNED: Final = "--multiprocessing-fork"
"""The last word of the command line with which multiprocessing starts a child that it does not fork."""
FOR_ALL: Final = "SIGMASCOPE_"
"""Begins the variables that users set, beside `SIGMASCOPE=1`; child processes have them too."""
FOR_ONE: Final = "SIGMASCOPE_WATCH_"
"""Begins the variables of one launch, which the launched process takes out of its environment."""


class Settings(NamedTuple):
    """How to watch, and where the result goes. None: the default.

    Attributes:
        output: The file or folder for the record.
        trace: The file for a trace of it.
        prompts: What is kept of prompts: full, hash or none.
        name: What the run is called.
        sample_hz: How often memory is looked at, as text.
        step_memory: "0": do not look at it at the end of each step.
        quiet: "1": print no summary; "0" is no.
        launched: "1": somebody asked for this one process, and is told when there was nothing to see.
        keep_generations: How many generations, the last ones, the record holds in full, as text.
    """

    output: str | None = None
    trace: str | None = None
    prompts: str | None = None
    name: str | None = None
    sample_hz: str | None = None
    step_memory: str | None = None
    quiet: str | None = None
    launched: str | None = None
    keep_generations: str | None = None

    def says(self, name: str) -> bool:
        """Whether one of those that are yes or no is yes."""
        return getattr(self, name) not in (None, "0")

    def as_environment(self, prefix: str) -> dict[str, str]:
        """The variables that say this."""
        told = self._asdict()
        return {f"{prefix}{name.upper()}": value for name, value in told.items() if value is not None}


def start(settings: Settings) -> None:
    """Watch this process. A second time only changes the settings."""
    global _process
    if _process is not None:
        _process.settings = settings
        return
    _process = WatchedProcess(settings)
    _process.start()


def start_from_environment() -> None:
    """Watch this process as the variables `SIGMASCOPE_…` say."""
    start(settings_from(os.environ, FOR_ALL))


def settings_from(environment: Mapping[str, str], prefix: str) -> Settings:
    """What the variables that begin so say. An empty one says nothing."""
    return Settings(**{name: environment.get(f"{prefix}{name.upper()}") or None for name in Settings._fields})


def take_settings(environment: MutableMapping[str, str], prefix: str) -> Settings:
    """The same, and the variables are gone from the environment."""
    settings = settings_from(environment, prefix)
    for name in Settings._fields:
        environment.pop(f"{prefix}{name.upper()}", None)
    return settings


class WatchedProcess:
    """Begins a watch when there is something to watch, and ends it when Python ends.

    Nothing of it is raised into the program, whose exit code, output and signals stay its own. A child that is forked
    in the middle is watched no further: the record is its parent's. One that is forked before has its own.

    Args:
        settings: How to watch, and where the result goes.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._folder = os.getcwd()  # noqa: PTH109 - before the program changes it; pathlib is not loaded yet
        self._process_id = os.getpid()
        self._has_begun = False
        self._recording: "Recording | None" = None
        self._end_waiting: list[Callable[[], None]] = []

    def start(self) -> None:
        """Wait for the import. Python calls the functions of `atexit` in reverse: ours is the last."""
        atexit.register(self._end)
        self._end_waiting = [FINDER.wait(name, self._begin) for name in STARTS_WITH]
        if any(name in sys.modules for name in STARTS_WITH):
            self._begin()

    def _wait_no_more(self) -> None:
        while self._end_waiting:
            self._end_waiting.pop()()

    def _begin(self) -> None:
        if not self._end_waiting:
            return
        if (own := sys.modules.get(_WATCH)) is not None and not hasattr(own, "watch"):
            return  # the program's import of it, which has just imported this, begins the watch when it is done
        self._wait_no_more()
        self._has_begun = True
        is_forked = os.getpid() != self._process_id
        is_child = is_forked or _SPAWNED in sys.orig_argv[-1:]
        try:
            from sigmascope.integrations.process_recording import Recording

            self._recording = Recording(self.settings, self._folder, say, is_child=is_child)
            if is_forked:
                self._process_id = os.getpid()
                self._end_with_multiprocessing()
        except Exception as failure:  # noqa: BLE001 - the program goes on unwatched
            is_ours = type(failure).__module__ == "sigmascope.errors"  # these say all in words
            say(f"nothing is watched: {'' if is_ours else type(failure).__name__ + ': '}{failure}")

    def _end_with_multiprocessing(self) -> None:
        """Its forked children leave without `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self._end, exitpriority=0)

    def _end(self) -> None:
        if os.getpid() != self._process_id:
            return
        self._wait_no_more()
        if self._recording is None:
            if self.settings.launched and not self._has_begun:
                say("nothing was there to watch: neither diffusers nor a stage of sigmascope's was used.")
            return
        try:
            recording, self._recording = self._recording, None
            recording.end()
        except Exception as failure:  # noqa: BLE001 - the program's exit code stays its own
            say(f"the record is lost: {type(failure).__name__}: {failure}")


def say(line: str) -> None:
    """Tell the user something, on the stream for that, if there is one."""
    if sys.__stderr__ is None:
        return
    try:
        # A path may hold what a terminal would obey. As `units.printable`; but an import at the end of the process
        # would make Python forget that Ctrl-C ended it.
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
        sys.__stderr__.write(f"Sigmascope: {shown}\n")
        sys.__stderr__.flush()
    except (OSError, ValueError):  # closed, or nobody reads it any more
        pass


_process: WatchedProcess | None = None
