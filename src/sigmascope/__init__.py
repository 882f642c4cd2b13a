"""Know what your LoRA does and where your diffusion pipeline's time and memory go.

`__init__.pyi` lists what the package offers. A name is loaded when it is first used (PEP 562), so that
`import sigmascope` stays light.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lazy_loader

from sigmascope.__about__ import __version__

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = ["__version__", *(name for name in _names if not name.startswith("_"))]


class _OldModule(ModuleType):
    """A module of the last release: gives its names from where they are now."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from sigmascope.moved import moved_name

        return moved_name(self.__name__, name)


class _OldPaths:
    """Finds the modules of the last release. It is asked last: no import of what is there passes by it."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        if package != "sigmascope":
            return None
        from sigmascope.moved import MOVED, OLD_FOLDERS

        if old not in MOVED and old not in OLD_FOLDERS:
            return None
        # typeshed wants the base class of importlib.abc, which would be one more module loaded
        return ModuleSpec(fullname, self, is_package=old in OLD_FOLDERS)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is imported before a name is asked for."""


if not any(type(finder).__name__ == _OldPaths.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_OldPaths())
for _old in ("analysis.diagnostics.diagnose", "integrations.autostart.process"):
    # a folder was where a module is now, and Python looks for nothing below a module
    sys.modules.setdefault(f"sigmascope.{_old}", _OldModule(f"sigmascope.{_old}"))
