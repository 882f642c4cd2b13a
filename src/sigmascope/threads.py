"""Threads of Sigmascope's own beside the host's: how they start, and what they must not touch.

A host may be capturing a CUDA graph, during which a call of CUDA by any other thread is an error that ends the capture.
So nothing of ours calls a device's driver off the thread that the host works in. `own_thread` makes every thread of a
monitor with its hands off devices, and `hands_off` does the same for a part of another thread's work. What PyTorch's
allocator and NVML count may be read everywhere.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_HERE = threading.local()


class _Life:
    """Of one thread: it ends with it."""

    __slots__ = ("__weakref__",)


Life = weakref.ref[_Life]
"""Gives None once the thread has ended. An ident would be another thread's then."""


def this_thread() -> Life:
    """The life of the thread that asks."""
    try:
        life: Life = _HERE.reference
    except AttributeError:
        _HERE.life = _Life()
        life = _HERE.reference = weakref.ref(_HERE.life)
    return life


def own_thread(name: str, target: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Return a daemon thread, not started, that never calls a device's driver."""
    return threading.Thread(
        target=_without_driver, args=(target, *arguments), name=f"sigmascope-{name}", daemon=True
    )


def _without_driver(target: Callable[..., object], *arguments: Any) -> None:
    with hands_off():
        target(*arguments)


@contextmanager
def hands_off() -> Iterator[None]:
    """Call no device's driver on this thread meanwhile."""
    before = has_hands_off()
    _HERE.hands_off = True
    try:
        yield
    finally:
        _HERE.hands_off = before


def has_hands_off() -> bool:
    """Whether this thread must not call a device's driver now."""
    return getattr(_HERE, "hands_off", False)


def start_thread(thread: threading.Thread, stop: threading.Event) -> None:
    """Start a thread that ends once `stop` is set.

    Ctrl-C during the start sets `stop` too: the thread may run already without the caller knowing of it.

    Raises:
        RuntimeError: The system gives no more threads.
    """
    try:
        thread.start()
    except BaseException:
        stop.set()
        raise
