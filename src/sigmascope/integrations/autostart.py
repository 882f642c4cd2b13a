"""A process that watches itself from Python's startup to its end, while its code stays as it is.

`sigmascope watch script.py` starts Python anew with the folder `bootstrap` on its path (`launch.launch`);
`SIGMASCOPE=1` does so through a startup file (`launch.install`). Both end up in `start`, which waits for the first
import of what can be watched: `FINDER` hears of imports, and `when_loaded` gives classes of other libraries once they are
loaded. Python's own startup runs this code: until that import it loads nothing but small parts of the standard library.
"""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NamedTuple

_WATCH: Final = "sigmascope.integrations.diffusers.watch"
STARTS_WITH: Final = frozenset({"diffusers", "sigmascope.monitor", _WATCH})
"""Pipelines come from the first; code that names its own stages imports the second, and code with a watch the third."""
_SPAWNED: Final = "--multiprocessing-fork"
"""The last word of the command line with which multiprocessing starts a child that it does not fork."""
USER_PREFIX: Final = "SIGMASCOPE_"
"""Begins the variables that users set, beside `SIGMASCOPE=1`; child processes have them too."""
LAUNCH_PREFIX: Final = "SIGMASCOPE_WATCH_"
"""Begins the variables of one launch, which the launched process takes out of its environment."""


def start(settings: "Settings") -> None:
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

    def __init__(self, settings: "Settings") -> None:
        self.settings = settings
        self._folder = os.getcwd()  # noqa: PTH109 - before the program changes it; pathlib is not loaded yet
        self._process_id = os.getpid()
        self._has_begun = False
        self._end_recording: Callable[[], None] | None = None
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
        if (watching := sys.modules.get(_WATCH)) is not None and not hasattr(watching, "watch"):
            return  # the program's import of it, which has just imported this, begins the watch when it is done
        self._wait_no_more()
        self._has_begun = True
        is_forked = os.getpid() != self._process_id
        is_child = is_forked or _SPAWNED in sys.orig_argv[-1:]
        try:
            from sigmascope.integrations.process_recording import Recording

            self._end_recording = Recording(self.settings, self._folder, say, is_child=is_child).end
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
        if self._end_recording is None:
            if self.settings.launched and not self._has_begun:
                say("nothing was there to watch: neither diffusers nor a stage of sigmascope's was used.")
            return
        try:
            end_recording, self._end_recording = self._end_recording, None
            end_recording()
        except Exception as failure:  # noqa: BLE001 - the program's exit code stays its own
            say(f"the record is lost: {type(failure).__name__}: {failure}")


_process: WatchedProcess | None = None


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
        full: "1": print the summary in full.
        launched: "1": somebody asked for this one process, and is told when there was nothing to see.
        keep_generations: How many generations, the last ones, the record holds in full, as text.
        thumbnails: "1": each generation keeps its first picture, small.
    """

    output: str | None = None
    trace: str | None = None
    prompts: str | None = None
    name: str | None = None
    sample_hz: str | None = None
    step_memory: str | None = None
    quiet: str | None = None
    full: str | None = None
    launched: str | None = None
    keep_generations: str | None = None
    thumbnails: str | None = None

    def is_on(self, name: str) -> bool:
        """Whether one of those that are yes or no is yes."""
        return getattr(self, name) not in (None, "0")

    def as_environment(self, prefix: str) -> dict[str, str]:
        """The variables that say this."""
        settings = self._asdict()
        return {f"{prefix}{name.upper()}": value for name, value in settings.items() if value is not None}


def settings_from(environment: Mapping[str, str], prefix: str) -> Settings:
    """What the variables that begin so say. An empty one says nothing."""
    return Settings(**{name: environment.get(f"{prefix}{name.upper()}") or None for name in Settings._fields})


def take_settings(environment: MutableMapping[str, str], prefix: str) -> Settings:
    """The same, and the variables are gone from the environment."""
    settings = settings_from(environment, prefix)
    for name in Settings._fields:
        environment.pop(f"{prefix}{name.upper()}", None)
    return settings


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


Act = Callable[[type], None]


def when_loaded(module: str, name: str, act: Act) -> Callable[[], None]:
    """Call `act` with a class, at once or when its module has been imported.

    Returns:
        What ends the waiting.
    """
    if _tell(module, name, act):
        return _nothing
    return FINDER.wait(module, functools.partial(_tell, module, name, act))


def _tell(module: str, name: str, act: Act) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type):
        return False
    act(kind)
    return True


def _nothing() -> None:
    pass


class Finder:
    """Finds nothing itself: it lets other finders find, and hears when a module that is waited for has run.

    It is among the finders of the process only while something is waited for. The module gets its own loader back
    before its code runs.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[], object]]] = {}
        self._asking = threading.local()
        self.new_lock()

    def new_lock(self) -> None:
        """Take another lock: for a forked child, in which nobody frees one that another thread held."""
        self._lock = threading.RLock()

    def wait(self, module: str, act: Callable[[], object]) -> Callable[[], None]:
        """Call `act` once, after the module's import; what is returned ends the waiting."""
        with self._lock:
            self._waiting.setdefault(module, []).append(act)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        return functools.partial(self._forget, module, act)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that tells when it is done."""
        if name not in self._waiting or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = _found_by_others(self, name, path, target)
        except BaseException as error:
            without_this_frame(error)
            raise
        finally:
            self._asking.name = None
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Telling(spec.loader, functools.partial(self._loaded, name))  # type: ignore[assignment]
        return spec

    def _loaded(self, module: str) -> None:
        with self._lock:
            acts = list(self._waiting.get(module, ()))
        for act in acts:
            act()
            self._forget(module, act)

    def _forget(self, module: str, act: Callable[[], object]) -> None:
        with self._lock:
            waiting = [other for other in self._waiting.get(module, ()) if other is not act]
            if waiting:
                self._waiting[module] = waiting
            else:
                self._waiting.pop(module, None)
            if not self._waiting and self in sys.meta_path:
                sys.meta_path.remove(self)


def _found_by_others(
    own_finder: Finder, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = None if finder is own_finder else getattr(finder, "find_spec", None)
        try:
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
        except BaseException as error:
            without_this_frame(error)
            raise
        if spec is not None:
            return spec
    return None


class _Telling:
    """A loader that does what another does, and tells when the module has been executed."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """What the loader creates."""
        try:
            module: ModuleType | None = self._loader.create_module(spec)
        except BaseException as error:
            without_this_frame(error)
            raise
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own loader back, run it, then tell."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            without_this_frame(error)
            raise
        self._done()


def without_this_frame(error: BaseException) -> None:
    """Take the frame that has just caught an error out of the error's traceback.

    To be called first in an `except BaseException as error` that ends with a bare `raise`, which adds no frame. Nothing
    else of the error changes.
    """
    trace = error.__traceback__
    if trace is not None:
        error.__traceback__ = trace.tb_next


FINDER = Finder()
"""The process's only one, however many watches wait."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FINDER.new_lock)
