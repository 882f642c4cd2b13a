"""Calls of modules heard through forward hooks that leave no trace, or around what torch.compile made of them."""

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords

COMPILED = "_compiled_call_impl"
"""Where `module.compile()` puts what is called in place of the module, hooks and all."""

BeforeCall = Callable[[Arguments, Keywords], After | None]


class ModuleHook:
    """A forward hook of either kind.

    A copy or pickle of the hooked module gets one of the standard library's in its place, which does nothing, so that
    it can be loaded where there is no Sigmascope.

    Args:
        act: What to do with what the hook is given after the module; it may raise.
        failed: Told of what it raised.
    """

    __slots__ = ("act", "failed")

    def __init__(self, act: Callable[..., object], failed: Callable[[Exception], None]) -> None:
        self.act = act
        self.failed = failed

    def __call__(self, _module: object, *seen: Any) -> None:
        """Act on a call, unless it is being traced."""
        if is_compiling():
            return
        try:
            self.act(*seen)
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            self.failed(failure)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


def hook_calls(instrument: Instrument, module: object, before: BeforeCall, *, after: bool = True) -> None:
    """Let an instrument hear every call of a module; a second time changes nothing.

    A module that is compiled in place is heard around its compiled call, where hooks would never run.

    Args:
        instrument: Which keeps how to take the hooks off.
        module: A module; anything else is left alone.
        before: Called before a call with its arguments; gives what is to be called after it.
        after: False: nothing is to be called after it, which is cheaper. A hook is then put on as it is.
    """
    if not isinstance(module, nn.Module):
        return
    if getattr(module, COMPILED, None) is not None:
        instrument.forget(id(module))
        instrument.tap(module, COMPILED, lambda _, args, kwargs: before(args, kwargs))
    elif not instrument.has(id(module), module):
        instrument.keep_undo(id(module), _hooked(module, before, after, instrument.failed), module)


def _hooked(
    module: nn.Module, before: BeforeCall, after: bool, failed: Callable[[Exception], None]
) -> Callable[[], None]:
    if not after:
        alone = before if isinstance(before, ModuleHook) else ModuleHook(before, failed)
        return module.register_forward_pre_hook(alone, prepend=True, with_kwargs=True).remove
    pairs = _Pairs(before)
    first = module.register_forward_pre_hook(ModuleHook(pairs.enter, failed), prepend=True, with_kwargs=True)
    last = module.register_forward_hook(ModuleHook(pairs.leave, failed), always_call=True)

    def undo() -> None:
        with suppress(Exception):
            first.remove()
        last.remove()

    return undo


class _Pairs:
    """Brings what is to be called after a call from its first hook to its last, in each thread by itself."""

    def __init__(self, before: BeforeCall) -> None:
        self._before = before
        self._threads = threading.local()

    def enter(self, args: Arguments, kwargs: Keywords) -> None:
        threads = self._threads
        if not hasattr(threads, "afters"):
            threads.afters = []
        threads.afters.append(None)
        threads.afters[-1] = self._before(args, kwargs)

    def leave(self, _args: object, result: object) -> None:
        afters = getattr(self._threads, "afters", None)
        after = afters.pop() if afters else None
        if after is not None:
            after(result, sys.exception() if result is None else None)
