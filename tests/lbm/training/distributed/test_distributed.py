"""What processes agree on, with two that stand for two machines: threads that meet where processes would."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.lbm.training.tiny_run import batch_of

from sigmascope.errors import DataError, OtherProcessError, SigmascopeError, WriteError
from sigmascope.lbm.data import Batch
from sigmascope.lbm.training.distributed import Processes, StepBatches, step_batches

SECONDS = 5


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


def stream(count: int, failing: bool = False) -> Iterator[tuple[Batch, int]]:
    for number in range(count):
        yield batch_of(2, side=8), number
    if failing:
        raise DataError("the shards hold no samples.", hint="Make some.")


def together(*streams: Iterator[tuple[Batch, int]], size: int = 2) -> list[Any]:
    """What each member's groups came to: a list, or the error that ended them."""
    barrier = threading.Barrier(len(streams))
    table: dict[int, Any] = {}

    def member(number: int) -> list[StepBatches[int]] | Exception:
        try:
            return list(step_batches(streams[number], size, Meeting(number, barrier, table)))
        except (SigmascopeError, threading.BrokenBarrierError) as error:
            return error

    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(member, range(len(streams))))


def test_all_have_as_many_batches_in_each_group() -> None:
    first, second = together(stream(5), stream(3))
    assert [len(group.batches) for group in first] == [len(group.batches) for group in second] == [2, 1]
    assert [group.samples for group in first] == [8, 4]
    assert [group.position for group in first] == [1, 2]


@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_where_ones_data_fails_all_stop_and_say_why(good: int) -> None:
    first, second = together(stream(9), stream(good, failing=True))
    assert isinstance(second, DataError)
    assert str(second) == "the shards hold no samples. Make some."
    assert isinstance(first, OtherProcessError)
    assert first.message == "process 1 of 2 failed: the shards hold no samples. Make some."


def test_a_team_of_one_raises_its_own_error() -> None:
    (found,) = together(stream(1, failing=True))
    assert str(found) == "the shards hold no samples. Make some."


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_in_one_process_ends_all(failing: int) -> None:
    barrier = threading.Barrier(2)
    table: dict[int, Any] = {}

    def member(number: int) -> Exception | None:
        try:
            with Meeting(number, barrier, table).together():
                if number == failing:
                    raise WriteError("checkpoint", "the disk is full.", hint="Free some space.")
        except (SigmascopeError, threading.BrokenBarrierError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(member, range(2)))
    assert isinstance(found[failing], WriteError)
    other = found[1 - failing]
    assert isinstance(other, OtherProcessError)
    assert other.message == f"process {failing} of 2 failed: checkpoint: the disk is full. Free some space."


def test_a_mistake_in_one_process_ends_all_too() -> None:
    barrier = threading.Barrier(2)
    table: dict[int, Any] = {}

    def member(number: int) -> Exception | None:
        try:
            with Meeting(number, barrier, table).together():
                if number == 1:
                    raise IndexError("list index out of range")
        except (IndexError, OtherProcessError) as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(member, range(2))
    assert isinstance(second, IndexError)
    assert isinstance(first, OtherProcessError)
    assert first.message == "process 1 of 2 failed: IndexError: list index out of range."
