"""Where the host waits for the device."""

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

_NOTICE = "Synchronization debug mode is a prototype feature"
_WAITED = "called a synchronizing"


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """`torch.cuda.set_sync_debug_mode`, without its notice, which is a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NOTICE)
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def waits_of(device: torch.device) -> Iterator[list[str]]:
    """Collect where the host waits for the device within the block: the innermost lines of the stack.

    PyTorch warns of copies that block and of waiting for a stream. It does not of `torch.cuda.synchronize` and of
    waiting for an event, so their calls are counted; on the CPU, these alone.
    """
    places: list[str] = []

    def note(*_: object) -> None:
        frames = traceback.extract_stack()[:-2]
        places.append(" < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-4:])))

    def shown(message: object, *_: object, **__: object) -> None:
        if _WAITED in str(message):
            note()

    def counting(wait: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            note()
            return wait(*args, **options)

        return counted

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.filterwarnings("always", message=_WAITED)
        patched.setattr(warnings, "showwarning", shown)
        for owner in (torch.cuda, torch.accelerator, torch.cuda.Event, torch.Event):
            with suppress(AttributeError, TypeError):  # a class of C's cannot be patched
                patched.setattr(owner, "synchronize", counting(owner.synchronize))
        if device.type == "cuda":
            with sync_debug_mode("warn"):
                yield places
        else:
            yield places
