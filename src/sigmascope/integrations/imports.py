"""Imports of the watched program: who waits for a module hears when it has run, and what imports take is noted.

`FINDER` hears of imports, and `when_loaded` gives classes of other libraries once they are loaded. Python's own startup
runs this code: it loads nothing but small parts of the standard library.
"""

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, Final

_MOST_SEGMENTS: Final = 4096
Act = Callable[[type], None]


def when_loaded(module: str, name: str, act: Act) -> Callable[[], None]:
    """Call `act` with a class, at once or when its module has been imported.

    Returns:
        A function that ends the waiting.
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


class ImportTimes:
    """What each package's import takes on one thread, without the packages that it imports itself.

    Attributes:
        began_ns: When this began, by `time.perf_counter_ns`.
        is_over: Tells whether no more is wanted.
        segments: Package, beginning and end, in their order; at most 4,096.
    """

    def __init__(self) -> None:
        self.began_ns = time.perf_counter_ns()
        self.is_over: Callable[[], bool] = bool
        self.segments: list[tuple[str, int, int]] = []
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._since_ns = 0

    def wants(self, module: str) -> bool:
        """Whether to time this module's import, which is not so if it is part of its own package's import."""
        if threading.get_ident() != self._thread or len(self.segments) >= _MOST_SEGMENTS:
            return False
        return not self._open or self._open[-1] != module.partition(".")[0]

    def begin(self, module: str) -> None:
        """Note that a module's body is about to run."""
        self._add_segment()
        self._open.append(module.partition(".")[0])

    def end(self) -> None:
        """Note that the last module's body has run."""
        self._add_segment()
        self._open.pop()

    def _add_segment(self) -> None:
        now_ns = time.perf_counter_ns()
        if self._open:
            self.segments.append((self._open[-1], self._since_ns, now_ns))
        self._since_ns = now_ns

    def seconds_before(self, moment_ns: int) -> dict[str, float]:
        """What each package took until then, the longest first."""
        seconds: dict[str, float] = {}
        for package, began_ns, ended_ns in list(self.segments):
            taken = (min(ended_ns, moment_ns) - began_ns) / 1e9
            if taken > 0:
                seconds[package] = seconds.get(package, 0.0) + taken
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


class Finder:
    """Finds nothing itself: it lets other finders find, and hears when a module that is waited for has run.

    It is among the finders of the process only while something is waited for, or imports are timed. The module gets its
    own loader back before its code runs.
    """

    def __init__(self) -> None:
        self.times: ImportTimes | None = None
        self._waiting: dict[str, list[Callable[[], object]]] = {}
        self._asking = threading.local()
        self.new_lock()

    def new_lock(self) -> None:
        """Take another lock: for a forked child, in which nobody frees one that another thread held."""
        self._lock = threading.RLock()

    def wait(self, module: str, act: Callable[[], object]) -> Callable[[], None]:
        """Call `act` once, after the module's import; what is returned ends the waiting."""
        with self._lock:
            try:
                self._waiting.setdefault(module, []).append(act)
                self._be_first()
            except BaseException:  # nobody would end the waiting
                self._forget(module, act)
                raise
        return functools.partial(self._forget, module, act)

    def time_imports(self) -> None:
        """Note from now on what the calling thread's imports take, until a stage is opened."""
        with self._lock:
            times = ImportTimes()
            self._be_first()
            self.times = times

    def time_no_more(self) -> None:
        """Stop noting. What was noted stays."""
        with self._lock:
            self.times = None
            if not self._waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

    def _be_first(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def _timing(self, name: str) -> ImportTimes | None:
        """What times this import; None: nothing does, or somebody only asks for the spec, without an import."""
        times = self.times
        if times is None:
            return None
        if times.is_over():
            self.time_no_more()
            return None
        return times if times.wants(name) and _is_import() else None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that tells when it is done."""
        if getattr(self._asking, "name", None) == name:
            return None
        times = self._timing(name)
        if name not in self._waiting and times is None:
            return None
        self._asking.name = name
        try:
            spec = _found_by_others(self, name, path, target)
        except BaseException as error:
            without_this_frame(error)
            raise
        finally:
            self._asking.name = None
        is_file = spec is not None and spec.has_location  # what is built in takes no time
        if spec is not None and hasattr(spec.loader, "exec_module") and (is_file or name in self._waiting):
            spec.loader = _Telling(spec.loader, functools.partial(self._loaded, name), times)  # type: ignore[assignment]
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
            # Not by a method of its own, which could fail: the finder would stay for good.
            if not self._waiting and self.times is None and self in sys.meta_path:
                sys.meta_path.remove(self)


def _is_import() -> bool:
    """Whether Python looks for a module in order to import it, rather than for `importlib.util.find_spec`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_find_spec":
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


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

    def __init__(self, loader: Any, done: Callable[[], None], times: ImportTimes | None = None) -> None:
        self._loader = loader
        self._done = done
        self._times = times

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
        if self._times is not None:
            self._times.begin(module.__name__)
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            without_this_frame(error)
            raise
        finally:
            if self._times is not None:
                self._times.end()
        self._done()

    # A module's body may warn at the line that imports it (stacklevel=2). Python passes over frames of its own import
    # system for that, and over this one under such a name.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap_external>")


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
