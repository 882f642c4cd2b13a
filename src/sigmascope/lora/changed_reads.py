"""Change what a module reads as its own parameter, while the parameter itself stays as it is (`change_reads`).

A norm's weight, or the modulation of a WAN block, is used inside the module's `forward`, where no hook reaches it. The
module gets a subclass of its class, in which the parameter's name gives the changed tensor. `parameters()`, `state_dict()`
and whoever moves or replaces the parameter see the unchanged one. This also holds in threads and in compiled code.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

__all__ = ["ChangedReads", "change_reads"]

_CHANGES = "_sigmascope_changed_reads"
_CLASS = "_sigmascope_unchanged_class"


class ChangedReads:
    """One change of what a module reads. `remove` takes it back."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name

    def remove(self) -> None:
        """Take the change back; the last one gives the module its own class again. A second call does nothing."""
        changes = _changes_of(self._module)
        if changes.get(self._name, {}).pop(id(self), None) is not None:
            _give_class(self._module, {name: own for name, own in changes.items() if own})


def change_reads(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> ChangedReads:
    """Let a module's code read a changed tensor for one of its parameters. Several changes add up, in their order.

    Args:
        module: Has the parameter itself, not in a module inside it.
        name: Of the parameter, such as "weight".
        change: Gives the changed tensor for the tensor as it is. A parameter on the meta device is read as it is.
    """
    handle = ChangedReads(module, name)
    changes = {own: dict(of_name) for own, of_name in _changes_of(module).items()}
    changes.setdefault(name, {})[id(handle)] = change
    _give_class(module, changes)
    return handle


def _changes_of(module: nn.Module) -> dict[str, dict[int, Callable[[Tensor], Tensor]]]:
    changes: dict[str, dict[int, Callable[[Tensor], Tensor]]] = vars(module).get(_CHANGES, {})
    return changes


def _give_class(module: nn.Module, changes: dict[str, dict[int, Callable[[Tensor], Tensor]]]) -> None:
    unchanged: type[nn.Module] = getattr(type(module), _CLASS, type(module))
    if changes:
        vars(module)[_CHANGES] = changes
        module.__class__ = _reading(unchanged, frozenset(changes))  # type: ignore[arg-type] # mypy: a class is hashable
    else:
        vars(module).pop(_CHANGES, None)
        module.__class__ = unchanged


@cache
def _reading(unchanged: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    """A subclass that reads these parameters changed."""
    body: dict[str, Any] = {name: _property(name) for name in names}
    own = {
        "__module__": unchanged.__module__,
        "__qualname__": unchanged.__qualname__,
        "__doc__": unchanged.__doc__,
    }
    return type(unchanged.__name__, (unchanged,), {**body, **own, _CLASS: unchanged})


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        held = vars(module)
        tensor: Tensor | None = held[name] if name in held else held["_parameters"][name]
        if tensor is None or tensor.is_meta:
            return tensor
        for change in held[_CHANGES][name].values():
            tensor = change(tensor)
        return tensor

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[name] = value  # DataParallel's copies hold their parameters as plain attributes

    return property(read, write)
