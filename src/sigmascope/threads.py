"""Threads of Sigmascope's own beside the host's: how they start, and what they must not touch.

A host may be capturing a CUDA graph, during which a call of CUDA by any other thread is an error that ends the capture.
So nothing of ours calls a device's driver off the thread that the host works in. `own_thread` makes every thread of a
monitor with its hands off devices, and `hands_off` does the same for a part of another thread's work. What PyTorch's
allocator and NVML count may be read everywhere.

A host may also fork. A module that a thread of ours was importing then would stay half imported in the child, and locked: who
imports it there fails, or waits for good. And SQLite takes the locks of an open database for the child's own, so that it finds
it locked for good. So a thread of ours imports and opens databases in the block of `unforked`, for which a fork waits: as long
as a module is being imported, since the child could never import it, and a moment for a database, which the child can do without.
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


_MOST_FORK_SECONDS = 0.5
"""A fork waits no longer for a database. Its child then leaves the database alone, see `was_forked_amid`."""
_MOST_IMPORT_SECONDS = 5.0
"""A fork waits no longer for an import: one may hang, on a disk of another machine."""
_unforked = threading.RLock()
_importing: set[int] = set()
"""Threads that import in the block of `unforked`."""
_forking: set[int] = set()
"""Threads that fork, or wait to do so."""
_waited = threading.local()
_forked_amid = False


class ForkFirst(Exception):
    """Work in the block of `unforked` that has not begun is to be left, and begun anew after `let_forks_pass`."""


@contextmanager
def unforked() -> Iterator[None]:
    """Let forks by other threads wait for the block."""
    with _unforked:
        before, _HERE.is_unforked = getattr(_HERE, "is_unforked", False), True
        try:
            yield
        finally:
            _HERE.is_unforked = before


@contextmanager
def importing() -> Iterator[None]:
    """Import modules in the block: a fork that waits for `unforked` waits longer for that."""
    thread = threading.get_ident()
    _importing.add(thread)
    try:
        yield
    finally:
        _importing.discard(thread)


def is_fork_waiting() -> bool:
    """Whether another thread wants to fork, and waits for this one."""
    return bool(_forking) and getattr(_HERE, "is_unforked", False)


def let_forks_pass() -> None:
    """Inside the block of `unforked`, and of no other such block: let those fork that wait."""
    while _forking:
        _unforked.release()
        time.sleep(0.001)
        _unforked.acquire()


def was_forked_amid() -> bool:
    """Whether this process was forked in the middle of a block of `unforked`: what was open then must not be touched."""
    return _forked_amid


def _before_fork() -> None:
    _forking.add(threading.get_ident())
    now = time.monotonic()
    until, longest = now + _MOST_FORK_SECONDS, now + _MOST_IMPORT_SECONDS
    has_lock = False
    while not has_lock and now < until:
        has_lock = _unforked.acquire(timeout=min(until - now, 0.01))
        now = time.monotonic()
        if _importing and now < longest:  # after which it is let pass
            until = now + _MOST_FORK_SECONDS
    _waited.has_lock = has_lock


def _after_fork() -> None:
    _forking.discard(threading.get_ident())
    if _waited.has_lock:
        _unforked.release()


def _begin_anew() -> None:
    """The child's lock is its own."""
    global _unforked, _forked_amid
    _forked_amid = _forked_amid or not _waited.has_lock
    _unforked = threading.RLock()
    _forking.clear()
    _importing.clear()
    _HERE.is_unforked = False


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
