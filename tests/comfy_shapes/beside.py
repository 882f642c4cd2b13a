"""What ComfyUI keeps beside `patches`: hooks of conditionings, and adapters that bypass the weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class HookRef:
    """What clones of one hook share."""


class Hook:
    """A hook of weights; its strength is that of the moment in its schedule."""

    def __init__(self, strength: float = 1.0) -> None:
        self.hook_ref = HookRef()
        self.strength = strength


class HookGroup:
    """What `current_hooks` is."""

    def __init__(self, *hooks: Hook) -> None:
        self.hooks = list(hooks)


class PatcherInjection(NamedTuple):
    """A pair of functions that put something in place and take it away."""

    inject: Callable[[object], None]
    eject: Callable[[object], None]


class BypassForwardHook:
    """One adapter beside one layer; `original_forward` is there while it is in place."""

    def __init__(self, module: nn.Module, adapter: Any, multiplier: float) -> None:
        self.module = module
        self.adapter = adapter
        self.multiplier = multiplier
        self.original_forward: Any = None

    def _bypass_forward(self, values: Tensor) -> Tensor:
        up, down, alpha = self.adapter.weights[:3]
        weight = self.multiplier * (1.0 if alpha is None else alpha / down.shape[0])
        result: Tensor = self.original_forward(values) + weight * values @ (up @ down).mT
        return result


class BypassInjectionManager:
    """Holds the hooks; its injection's functions close over it."""

    def __init__(self, *hooks: BypassForwardHook) -> None:
        self.hooks = list(hooks)

    def create_injections(self) -> list[PatcherInjection]:
        def inject_all(model_patcher: object) -> None:
            for hook in self.hooks:
                hook.original_forward = hook.module.forward
                hook.module.forward = hook._bypass_forward

        def eject_all(model_patcher: object) -> None:
            for hook in self.hooks:
                hook.module.forward, hook.original_forward = hook.original_forward, None

        return [PatcherInjection(inject_all, eject_all)]
