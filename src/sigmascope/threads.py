"""Threads of Sigmascope's own beside the host's: how they start, and what they must not touch.

A host may be capturing a CUDA graph, during which a call of CUDA by any other thread is an error that ends the capture.
So nothing of ours calls a device's driver off the thread that the host works in. `own_thread` makes every thread of a
monitor with its hands off devices, and `hands_off` does the same for a part of another thread's work. What PyTorch's
allocator and NVML count may be read everywhere.

A host may also fork. A module that a thread of ours was importing then would stay half imported in the child, and locked: who
imports it there fails, or waits for good. And SQLite takes the locks of an open database for the child's own, so that it finds
it locked for good. So a thread of ours imports and opens databases in the block of `unforked`, for which a fork waits.
"""

import os
import threading
import time
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


_MOST_FORK_SECONDS = 5.0
"""A fork waits no longer: an import may hang, on a disk of another machine."""
_unforked = threading.RLock()
_forking: set[int] = set()
"""Threads that fork, or wait to do so."""
_waited = threading.local()


@contextmanager
def unforked() -> Iterator[None]:
    """Let forks by other threads wait for the block."""
    with _unforked:
        yield


def is_fork_waiting() -> bool:
    """Whether another thread wants to fork."""
    return bool(_forking)


def let_forks_pass() -> None:
    """Inside the block of `unforked`, and of no other such block: let those fork that wait."""
    while _forking:
        _unforked.release()
        time.sleep(0.001)
        _unforked.acquire()


def _before_fork() -> None:
    _forking.add(threading.get_ident())
    _waited.has_lock = _unforked.acquire(timeout=_MOST_FORK_SECONDS)


def _after_fork() -> None:
    _forking.discard(threading.get_ident())
    if _waited.has_lock:
        _unforked.release()


def _begin_anew() -> None:
    """The child's lock is its own."""
    global _unforked
    _unforked = threading.RLock()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_anew)


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
