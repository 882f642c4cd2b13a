"""Work in several threads, each in memory that is used again, with results in order.

Fresh memory costs a fault for each page: for a model of 5 GB that is most of the time of copying it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final, TypeVar

import torch
from torch import Tensor

from sigmascope.lora.extraction.layer_pool import worker_count

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_DISK_WORKERS: Final = 3  # more would wait for the disk


class Slot:
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
        found = self._memory.get(name)
        if found is None or found.numel() < size:
            found = self._memory[name] = torch.empty(size, dtype=torch.uint8)
        return found[:size].view(dtype)


def map_in_order(
    items: Sequence[Item], work: Callable[[Slot, Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Do the same work on each item, a few at a time, each thread computing on one core.

    Args:
        items: In the order of the results.
        work: Called in a thread with a slot of its own. What its result refers to in the slot stays until the
            next result is taken.

    Yields:
        (item, result). Leaving the loop early, or an error in it, begins no more.
    """
    workers = min(worker_count(), _MOST_DISK_WORKERS)
    slots: SimpleQueue[Slot] = SimpleQueue()
    for _ in range(workers + 1):
        slots.put(Slot())

    def job(item: Item) -> tuple[Slot, Result]:
        slot = slots.get()
        return slot, work(slot, item)

    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    waiting: deque[tuple[Item, Future[tuple[Slot, Result]]]] = deque()
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
        for _ in waiting:  # a thread that waits for a slot must end too
            slots.put(Slot())
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(before)  # threads begun later take the process's last setting


def _taken(
    waiting: "deque[tuple[Item, Future[tuple[Slot, Result]]]]", slots: "SimpleQueue[Slot]"
) -> Iterator[tuple[Item, Result]]:
    item, future = waiting.popleft()
    slot, result = future.result()
    try:
        yield item, result
    finally:
        slots.put(slot)
