"""Process many layers or tensors in threads of one core each, with a few of them in memory.

Each worker thread computes with one thread of its own: small factorisations do not parallelise, layers do, and
the results then do not depend on the number of cores. PyTorch lets go of the interpreter while it computes.

`map_in_order` also gives each piece of work memory that is used again. Fresh memory costs a fault for each page: for
a model of 5 GB that is most of the time of copying it.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition
from typing import Final, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Item = TypeVar("Item")

_MAX_WORKERS: Final = 8
_LARGEST_LAYERS_IN_MEMORY: Final = 2  # layers under way hold as much as this many of the largest
_MAX_DISK_WORKERS: Final = 3  # of `map_in_order`: more would wait for the disk


def run_layers(
    sizes: Mapping[str, int], work: Callable[[str], Result], *, workers: int | None = None
) -> Iterator[tuple[str, Result]]:
    """Call `work` for every layer, in threads, and yield each result when it is there.

    Layers are begun in the order given. As much is under way at once as two of the largest layers hold. An
    exception of `work`, or one thrown into the iterator (Ctrl-C), stops the rest and waits for what has begun.

    Args:
        sizes: Elements by layer.
        work: Safe to call from several threads.
        workers: Threads; as many as cores when left out.

    Yields:
        (layer, result), in the order in which they finish.
    """
    gate = _Gate(_LARGEST_LAYERS_IN_MEMORY * max(sizes.values(), default=0))

    failures: list[BaseException] = []

    def guarded(layer: str) -> Result:
        with gate.room_for(sizes[layer]):
            if failures:  # the caller hears of it later than the threads do
                raise failures[0]
            try:
                return work(layer)
            except BaseException as failure:
                failures.append(failure)
                raise

    with _single_threaded_pool(workers or worker_count()) as pool:
        futures: dict[Future[Result], str] = {pool.submit(guarded, layer): layer for layer in sizes}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()


class _Gate:
    """Lets work in while the elements under way stay below a limit; a single one is always let in."""

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


@contextmanager
def _single_threaded_pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that compute with one core each, in full float32; the caller's settings are as before afterwards."""
    before = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a host may have traded digits of float32 for speed
    pool = ThreadPoolExecutor(
        workers, thread_name_prefix="layer", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(before)  # threads begun later take the process's last setting


def run_layers_in_order(
    sizes: Mapping[str, int], work: Callable[[str], Result], *, workers: int | None = None
) -> Iterator[tuple[str, Result]]:
    """As `run_layers`, but results that are there early wait for those of the layers before them.

    Args:
        sizes: As there.
        work: As there.
        workers: As there.

    Yields:
        (layer, result), in the order of `sizes`.
    """
    waiting: dict[str, Result] = {}
    upcoming = iter(sizes)
    following = next(upcoming, None)
    for layer, result in run_layers(sizes, work, workers=workers):
        waiting[layer] = result
        while following is not None and following in waiting:
            yield following, waiting.pop(following)
            following = next(upcoming, None)


def worker_count() -> int:
    """The cores that this process may use, and no more than eight."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores, _MAX_WORKERS))


class Scratch:
    """Memory for one item at a time."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def scratch(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of one axis, with whatever is in it: the same for the same name.

        Args:
            name: What it is for.
            elements: How many are needed.
            dtype: Of the elements.
        """
        size = elements * dtype.itemsize
        buffer = self._memory.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(dtype)


class ThreadScratch(threading.local):
    """Memory of its own for each thread that asks."""

    def __init__(self) -> None:
        self.memory = Scratch()


def map_in_order(
    items: Sequence[Item], work: Callable[[Scratch, Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Do the same work on each item, a few at a time, each thread computing on one core.

    Args:
        items: In the order of the results.
        work: Called in a thread with a slot of its own. What its result refers to in the slot stays until the
            next result is taken.

    Yields:
        (item, result). Leaving the loop early, or an error in it, begins no more.
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
                slots.put(Scratch())  # a thread that waits for a slot must end too


def _taken(
    waiting: "deque[tuple[Item, Future[tuple[Scratch, Result]]]]", slots: "SimpleQueue[Scratch]"
) -> Iterator[tuple[Item, Result]]:
    item, future = waiting.popleft()
    slot, result = future.result()
    try:
        yield item, result
    finally:
        slots.put(slot)
