"""Process many layers in threads of one core each, with only a few layers in memory (`run_layers`, `map_in_order`).

Each worker computes on one core, because small factorisations do not parallelise and layers do. So results do not depend
on the number of cores. PyTorch releases the interpreter lock while it computes.

`map_in_order` also reuses memory between items. Fresh memory costs a page fault every 4 KiB, which is most of the time of
copying a 5 GB model.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Condition
from types import TracebackType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from sigmascope.probes.matmul_precision import full_float32

Result = TypeVar("Result")
Item = TypeVar("Item")

_MAX_WORKERS: Final = 8
_LARGEST_LAYERS_IN_MEMORY: Final = 2
_SECONDS_AFTER_CTRL_C: Final = 0.5
_LISTENS_EVERY: Final = 0.2
"""Seconds. Ctrl-C does not wake a thread that was just about to wait, and on Windows none that waits for another."""
_POOLS: Final = "sigmascope-pool"
"""How the names of the threads begin."""
_MAX_DISK_WORKERS: Final = 3  # more would wait for the disk


def run_layers(
    sizes: Mapping[str, int], work: Callable[[str], Result], *, workers: int | None = None
) -> Iterator[tuple[str, Result]]:
    """Call `work` for every layer in threads, and yield each result as it finishes.

    Layers start in the order given. The layers in work together hold no more than two of the largest. An exception from
    `work` starts no more layers and waits for those in work, which end where they call `require_wanted`. After Ctrl-C, and
    where the loop is left, it waits half a second at most, since one call of LAPACK may take minutes.

    Args:
        sizes: Number of elements by layer.
        work: Safe to call from several threads.
        workers: How many threads; as many as cores by default.

    Yields:
        (layer, result), in the order in which they finish.
    """
    gate = _Gate(_LARGEST_LAYERS_IN_MEMORY * max(sizes.values(), default=0))

    failures: list[BaseException] = []

    def guarded(layer: str) -> Result:
        _OWN.failures = failures
        with gate.room_for(sizes[layer]):
            require_wanted()
            try:
                return work(layer)
            except BaseException as failure:
                failures.append(failure)
                raise

    with _single_threaded_pool(workers or worker_count()) as pool:
        futures: dict[Future[Result], str] = {pool.submit(guarded, layer): layer for layer in sizes}
        finished: SimpleQueue[Future[Result]] = SimpleQueue()
        for future in futures:
            future.add_done_callback(finished.put)
        try:
            while futures:
                future = _next_of(finished)
                yield futures.pop(future), future.result()
        except BaseException as failure:
            failures.append(failure)
            raise


def in_thread(work: Callable[[], Result]) -> Result:
    """Do work that writes nothing in a thread, so that Ctrl-C is heard though it is within one long call of LAPACK."""
    with _Pool(1, "work") as pool:
        return _result(pool.submit(copy_context().run, work))


def _result(future: Future[Result]) -> Result:
    finished: SimpleQueue[Future[Result]] = SimpleQueue()
    future.add_done_callback(finished.put)
    return _next_of(finished).result()


def _next_of(finished: "SimpleQueue[Future[Result]]") -> "Future[Result]":
    while True:
        try:
            return finished.get(timeout=_LISTENS_EVERY)
        except Empty:
            continue


_OWN: Final = threading.local()
"""`failures` of the `run_layers` that a thread works for."""


def require_wanted() -> None:
    """End the work on a layer for whose result nobody waits any more: another failed, or Ctrl-C came. Threads learn of it here first.

    Raises:
        BaseException: That failure. None outside of `run_layers`.
    """
    failures = getattr(_OWN, "failures", [])
    if failures:
        raise failures[0]


class _Gate:
    """Admits work while the elements inside stay below a limit; an empty gate admits work of any size."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._changed = Condition()

    @contextmanager
    def room_for(self, size: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0 or self._inside + size <= self._limit)
            self._inside += size
        try:
            yield
        finally:
            with self._changed:
                self._inside -= size
                self._changed.notify_all()


class _Pool(ThreadPoolExecutor):
    """Threads for whose end the block waits, but after Ctrl-C only for a moment: what they make is nowhere but in memory."""

    def __init__(self, workers: int, name: str, **options: Any) -> None:
        super().__init__(workers, thread_name_prefix=f"{_POOLS}-{name}", **options)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Of Ctrl-C in the caller's loop, the generator hears that nobody wants more.
        is_stopped = kind is not None and issubclass(kind, KeyboardInterrupt | GeneratorExit)
        self.shutdown(wait=not is_stopped, cancel_futures=True)
        if is_stopped:
            ends = time.monotonic() + _SECONDS_AFTER_CTRL_C
            for thread in _at_work():  # the pool itself does not know one that Ctrl-C came to while it began
                thread.join(max(ends - time.monotonic(), 0.0))


def _at_work() -> list[threading.Thread]:
    own = threading.current_thread()
    return [one for one in threading.enumerate() if one.name.startswith(_POOLS) and one is not own]


def is_left_working() -> bool:
    """Whether threads that Ctrl-C stopped are still in work: Python waits for them before it exits."""
    return bool(_at_work())


@contextmanager
def _single_threaded_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that compute on one core each, in full float32; the caller's settings are restored afterwards."""
    before = torch.get_num_threads()
    with full_float32():
        try:
            with _Pool(workers, "layer", initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield pool
        finally:
            torch.set_num_threads(before)  # later threads inherit the process's last setting


def run_layers_in_order(
    sizes: Mapping[str, int], work: Callable[[str], Result]
) -> Iterator[tuple[str, Result]]:
    """Like `run_layers`, but an early result waits for those of the layers before it.

    Args:
        sizes: As for `run_layers`.
        work: As for `run_layers`.

    Yields:
        (layer, result), in the order of `sizes`.
    """
    waiting: dict[str, Result] = {}
    upcoming = iter(sizes)
    following = next(upcoming, None)
    for layer, result in run_layers(sizes, work):
        waiting[layer] = result
        while following is not None and following in waiting:
            yield following, waiting.pop(following)
            following = next(upcoming, None)


def worker_count() -> int:
    """How many cores this process may use, at most eight."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores, _MAX_WORKERS))


class Scratch:
    """Buffers for one item at a time, reused for the next."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def scratch(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        """A buffer of one axis with arbitrary contents; the same name gives the same memory.

        Args:
            name: What it is for.
            elements: Its length.
            dtype: Its dtype.
        """
        size = elements * dtype.itemsize
        buffer = self._memory.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype)


class ThreadScratch(threading.local):
    """A `Scratch` for each thread."""

    def __init__(self) -> None:
        self.memory = Scratch()


def map_in_order(
    items: Sequence[Item], work: Callable[[Scratch, Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Call `work` for each item in threads, a few at a time, and yield the results in order.

    Args:
        items: The items.
        work: Called with a thread's buffers and an item. Its result may lie in the buffers: they are not reused until the
            next result is taken.

    Yields:
        (item, result). After leaving the loop early, or an error, no more items start.
    """
    workers = min(worker_count(), _MAX_DISK_WORKERS)
    slots: SimpleQueue[Scratch] = SimpleQueue()
    for _ in range(workers + 1):
        slots.put(Scratch())

    def job(item: Item) -> tuple[Scratch, Result]:
        slot = slots.get()
        return slot, work(slot, item)

    waiting: deque[tuple[Item, Future[tuple[Scratch, Result]]]] = deque()
    with _single_threaded_pool(workers) as pool:
        try:
            for item in items:
                waiting.append((item, pool.submit(job, item)))
                if len(waiting) > workers:
                    yield from _taken(waiting, slots)
            while waiting:
                yield from _taken(waiting, slots)
        finally:
            for _, future in waiting:
                future.cancel()
                slots.put(Scratch())  # lets a thread that waits for a slot end


def _taken(
    waiting: "deque[tuple[Item, Future[tuple[Scratch, Result]]]]", slots: "SimpleQueue[Scratch]"
) -> Iterator[tuple[Item, Result]]:
    item, future = waiting.popleft()
    slot, result = _result(future)
    try:
        yield item, result
    finally:
        slots.put(slot)
