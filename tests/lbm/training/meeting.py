"""A team whose members run in threads of one process, and meet where processes would."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sigmascope.lbm.training.distributed import Processes

SECONDS = 5
Result = TypeVar("Result")


class Meeting(Processes):
    """One member of a team whose members run in threads; waits for the others as a real gather does."""

    def __init__(self, number: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        self.size = barrier.parties
        self._number, self._barrier, self._table = number, barrier, table

    def gather(self, values: list[int]) -> list[list[int]]:
        return self.objects(values)

    def objects(self, value: Any) -> list[Any]:
        self._table[self._number] = value
        self._barrier.wait(SECONDS)
        found = [self._table[number] for number in range(self.size)]
        self._barrier.wait(SECONDS)
        return found


def meet(count: int, work: Callable[[int, Processes], Result]) -> list[Result]:
    """Call `work` with each member's number and its team; what they gave."""
    barrier = threading.Barrier(count)
    table: dict[int, Any] = {}
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: work(number, Meeting(number, barrier, table)), range(count)))
