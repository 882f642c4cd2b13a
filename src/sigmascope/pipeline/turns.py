"""One after the other: what an attempt changes of a VAE for a while, another thread must not find changed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any

from sigmascope.pipeline.restore import modules_in
from sigmascope.stages.latents.vae_facts import inner_vae


@dataclass(slots=True)
class _Queue:
    """Whose turn it is, and how many are in it or wait for it."""

    lock: Any = field(default_factory=RLock)
    users: int = 0


_queues: dict[int, _Queue] = {}
_guard = Lock()


@contextmanager
def in_turn(vae: object) -> Iterator[None]:
    """Wait until no other thread encodes or decodes with a VAE; the same thread may come in again.

    Args:
        vae: As the caller has it. It and the modules in it are known by identity.
    """
    inner = inner_vae(vae)
    with ExitStack() as stack:
        keys = {id(thing) for thing in (inner, *modules_in(inner))}
        for key in sorted(keys):  # in one order, so that no two threads wait for each other
            stack.enter_context(_turn(key))
        yield


@contextmanager
def _turn(key: int) -> Iterator[None]:
    with _guard:
        queue = _queues.setdefault(key, _Queue())
        queue.users += 1
    try:
        with queue.lock:
            yield
    finally:
        with _guard:
            queue.users -= 1
            if not queue.users:
                del _queues[key]
