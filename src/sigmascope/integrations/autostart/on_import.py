"""Act once, right after the first of some modules has been imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class OnImport:
    """A finder that finds nothing itself: it lets the others find, and hears when the module has run.

    The module gets its own loader back before its code runs, so that nothing of ours stays on it.

    Args:
        names: The modules, by their full names.
        act: What to do, once. It must not raise.
    """

    def __init__(self, names: frozenset[str], act: Callable[[], None]) -> None:
        self._names = names
        self._act: Callable[[], None] | None = act

    def put_on(self) -> None:
        """Wait for the modules; act now if one of them is there already."""
        sys.meta_path.insert(0, self)
        if any(name in sys.modules for name in self._names):
            self.loaded()

    def take_off(self) -> None:
        """Wait no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the finders after this one find, with a loader that tells when it is done."""
        if name not in self._names:
            return None
        for finder in [one for one in sys.meta_path if one is not self]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Telling(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def loaded(self) -> None:
        """Act, unless that was done."""
        act, self._act = self._act, None
        self.take_off()
        if act is not None:
            act()


class _Telling:
    """A loader that does what another does, and tells when a module has been executed."""

    def __init__(self, loader: Any, hook: OnImport) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook.loaded()

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)
