"""Count the forward calls of a module as steps, through hooks that leave no trace."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sigmascope.monitor.guard import describe
from sigmascope.monitor.live import Step

COMPILED_IN_PLACE = (
    "the module was compiled in place (module.compile()), where hooks never run; "
    "put recorder.step() around its call"
)


class HookedSteps:
    """While entered, every forward call of a module is a step. The hooks change neither input nor output.

    The steps begin before the module's other pre-hooks and end after its other hooks, and a call that
    raises is a step too. Inside a function that torch.compile traces the hooks do nothing, so that they
    break no graph; hook the compiled wrapper that `torch.compile(module)` returns.

    Args:
        new_step: Makes a step; one is made for each thread.
        module: Whose calls to count.
        unavailable: Takes the reason when calls cannot be counted.
    """

    def __init__(self, new_step: Callable[[], Step], module: nn.Module, unavailable: dict[str, str]) -> None:
        self._new_step = new_step
        self._module = module
        self._unavailable = unavailable
        self._handles: list[RemovableHandle] = []
        self._calls = threading.local()

    def __enter__(self) -> "HookedSteps":
        if getattr(self._module, "_compiled_call_impl", None) is not None:
            self._unavailable["hook_steps"] = COMPILED_IN_PLACE
        elif not self._handles:
            self._put_on()
        return self

    def _put_on(self) -> None:
        module, handles = self._module, self._handles
        try:
            handles.append(module.register_forward_pre_hook(Hook(self._before), prepend=True))
            handles.append(module.register_forward_hook(Hook(self._after), always_call=True))
        except Exception as failure:  # noqa: BLE001 - a module may refuse hooks; the host goes on without
            self.remove()
            self._unavailable["hook_steps"] = describe(failure)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off. A call that Ctrl-C broke off in this thread is a step that ends now."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while getattr(self._calls, "open", 0) > 0:
            self._after()

    def _before(self) -> None:
        calls = self._calls
        if not hasattr(calls, "step"):
            calls.step, calls.open = self._new_step(), 0
        calls.step.__enter__()
        calls.open += 1

    def _after(self) -> None:
        calls = self._calls
        if getattr(calls, "open", 0) > 0:  # the hooks may have been put on in the middle of a call
            calls.open -= 1
            calls.step.__exit__(None, None, None)


class Hook:
    """A forward hook of either kind. A copy or pickle of the hooked module gets one that does nothing."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __call__(self, *_: Any) -> None:
        """Act, whatever the call was given."""
        if not torch.compiler.is_compiling():
            self._act()

    def __reduce__(self) -> tuple[type, tuple[Callable[[], None]]]:
        return Hook, (_nothing,)


def _nothing() -> None:
    pass
