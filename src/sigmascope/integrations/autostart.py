"""A process that watches itself from Python's startup to its end, while its code stays as it is.

`sigmascope watch script.py` starts Python anew with the folder `bootstrap` on its path (`launch.launch`);
`SIGMASCOPE=1` does so through a startup file (`launch.install`). Both end up in `start`, which waits for the first
import of what can be watched. Python's own startup runs this code: until that import it loads nothing but small parts of
the standard library.
"""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from sigmascope.integrations.imports import FINDER
from sigmascope.integrations.watch_settings import USER_PREFIX, Settings, settings_from

_WATCH: Final = "sigmascope.integrations.diffusers.watch"
STARTS_WITH: Final = frozenset({"diffusers", "sigmascope.monitor", _WATCH})
"""Pipelines come from the first; code that names its own stages imports the second, and code with a watch the third."""
_LOOPS_START_WITH: Final = "torch"
"""All that a loop of one's own needs: a program that was launched to be watched is watched from there."""
_COMFYUI: Final = "execution"
"""ComfyUI's module whose import brings all that the watch of its prompts needs."""
_LEAST_CHILDREN_SECONDS: Final = 1.0
"""Importing PyTorch takes as long."""
_SPAWNED: Final = "--multiprocessing-fork"
"""The last word of the command line with which multiprocessing starts a child that it does not fork."""


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
    start(settings_from(os.environ, USER_PREFIX))


class WatchedProcess:
    """Begins a watch when there is something to watch, and ends it when Python ends.

    Nothing of it is raised into the program, whose exit code, output and signals stay its own. A child that is forked
    in the middle is watched no further: the record is its parent's. One that is forked before has its own.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._folder = os.getcwd()  # noqa: PTH109 - before the program changes it; pathlib is not loaded yet
        self._process_id = os.getpid()
        self._has_begun = False
        self._starts_with = STARTS_WITH | ({_LOOPS_START_WITH} if settings.launched else set())
        self._end_recording: Callable[[], None] | None = None
        self._end_waiting: list[Callable[[], None]] = []

    def start(self) -> None:
        """Wait for the import. Python calls the functions of `atexit` in reverse: ours is the last."""
        atexit.register(self._end)
        try:
            if is_comfyui(sys.orig_argv):
                self._end_waiting.append(FINDER.wait(_COMFYUI, self._begin_comfyui))
                return
            FINDER.time_imports()
            for name in self._starts_with:
                begin = self._begin_with_loops if name == _LOOPS_START_WITH else self._begin
                self._end_waiting.append(FINDER.wait(name, begin))
        except Exception as failure:  # noqa: BLE001 - the program goes on unwatched
            self._wait_no_more()
            _say_unwatched(failure)
        if any(name in sys.modules for name in self._starts_with):
            self._begin()

    def _wait_no_more(self) -> None:
        while self._end_waiting:
            self._end_waiting.pop()()

    def _begin_with_loops(self) -> None:
        """Begin, unless PyTorch came with a module of ours, which has to be whole first: those that matter are waited for."""
        if not _is_importing_us():
            self._begin()

    def _begin(self) -> None:
        if not self._end_waiting:
            return
        if (watching := sys.modules.get(_WATCH)) is not None and not hasattr(watching, "watch"):
            return  # the program's import of it, which has just imported this, begins the watch when it is done
        self._wait_no_more()
        self._has_begun = True
        is_forked = os.getpid() != self._process_id
        is_child = is_forked or _SPAWNED in sys.orig_argv[-1:]
        try:
            from sigmascope.integrations.process_recording import Recording

            times = None if is_forked else FINDER.times  # a forked child was not there at the beginning
            self._end_recording = Recording(
                self.settings,
                self._folder,
                say,
                is_child=is_child,
                times=times,
                about_children=about_children,
            ).end
            if is_forked:
                self._process_id = os.getpid()
                self._end_with_multiprocessing()
        except Exception as failure:  # noqa: BLE001 - the program goes on unwatched
            _say_unwatched(failure)

    def _begin_comfyui(self) -> None:
        """Watch ComfyUI's prompts: each becomes a record of its own, and the process has none."""
        self._wait_no_more()
        self._has_begun = True
        try:
            from sigmascope.integrations.comfyui.session import begin_in_process

            self._end_recording = begin_in_process(self.settings, self._folder, say)
        except Exception as failure:  # noqa: BLE001 - the program goes on unwatched
            _say_unwatched(failure)

    def _end_with_multiprocessing(self) -> None:
        """Its forked children leave without `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self._end, exitpriority=0)

    def _end(self) -> None:
        if os.getpid() != self._process_id:
            return
        self._wait_no_more()
        FINDER.time_no_more()
        if self._end_recording is None:
            if self.settings.launched and not self._has_begun:
                say(
                    "there was nothing to watch: neither PyTorch, diffusers nor a stage of sigmascope was used."
                    + about_children()
                )
            return
        try:
            end_recording, self._end_recording = self._end_recording, None
            end_recording()
        except Exception as failure:  # noqa: BLE001 - the program's exit code stays its own
            say(f"the record was lost: {type(failure).__name__}: {failure}")


def about_children() -> str:
    """What to do where child processes did the work, as those that a launcher starts; empty where none did."""
    times = os.times()
    seconds = times.children_user + times.children_system
    if seconds < _LEAST_CHILDREN_SECONDS:
        return ""
    return (
        f" Its child processes, which took {seconds:.0f} s of processor time, are not watched. Start the watch in them (accelerate "
        "launch -m sigmascope watch script.py), or with SIGMASCOPE=1 after `sigmascope watch --install`."
    )


def is_comfyui(command: Sequence[str]) -> bool:
    """Whether these words start ComfyUI's server: `main.py` with the folder `comfy_execution` beside it."""
    names = (os.path.abspath(word) for word in command[1:] if os.path.basename(word) == "main.py")  # noqa: PTH100, PTH119
    return any(os.path.isdir(os.path.join(os.path.dirname(name), "comfy_execution")) for name in names)  # noqa: PTH112, PTH118, PTH120


def _is_importing_us() -> bool:
    """Whether the program's import of one of our modules is going on."""
    specs = [
        getattr(module, "__spec__", None)
        for name, module in [*sys.modules.items()]
        if name.startswith("sigmascope.")
    ]
    return any(getattr(spec, "_initializing", False) for spec in specs)


_process: WatchedProcess | None = None


def _say_unwatched(failure: Exception) -> None:
    is_ours = type(failure).__module__ == "sigmascope.errors"  # these say all in words
    say(f"nothing is watched: {'' if is_ours else type(failure).__name__ + ': '}{failure}")


def say(line: str) -> None:
    """Tell the user something, on the stream for that, if there is one."""
    if sys.__stderr__ is None:
        return
    try:
        # A path may hold what a terminal would obey. As `units.printable`; but an import at the end of the process
        # would make Python forget that Ctrl-C ended it.
        printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
        sys.__stderr__.write(f"Sigmascope: {printable}\n")
        sys.__stderr__.flush()
    except Exception:  # noqa: BLE001 - it is closed, or nobody reads it any more; nobody is left to be told
        pass
