"""Classes of other libraries, now if they are loaded, else as soon as they are. Nothing is imported for them.

Python's own startup loads this module, so it needs nothing but small parts of the standard library. What the host
raises shows the host's calls alone, also to a program that prints its own tracebacks: see `without_this_frame`.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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
