"""What processes agree on, with two that stand for two machines: threads that meet where processes would."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.lbm.training.meeting import meet
from tests.lbm.training.tiny_run import batch_of

from sigmascope.errors import DataError, OtherProcessError, SigmascopeError, WriteError
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.distributed import Processes, StepBatches, step_batches


def stream(count: int, failing: bool = False) -> Iterator[tuple[Batch, int]]:
    for number in range(count):
        yield batch_of(2, side=8), number
    if failing:
        raise DataError("the shards hold no samples.", hint="Make some.")


def together(*streams: Iterator[tuple[Batch, int]], size: int = 2) -> list[Any]:
    """What each member's groups came to: a list, or the error that ended them."""

    def member(number: int, team: Processes) -> list[StepBatches[int]] | Exception:
        try:
            return list(step_batches(streams[number], size, team))
        except (SigmascopeError, threading.BrokenBarrierError) as error:
            return error

    return meet(len(streams), member)


def test_processes_that_read_different_data_keep_step_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    first, second = together(stream(5), stream(3))
    assert {record.message for record in caplog.records} == {
        "Processes read different data: some have batches left where others have none."
    }
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
    def member(number: int, team: Processes) -> Exception | None:
        try:
            with team.together():
                if number == failing:
                    raise WriteError("checkpoint", "the disk is full.", hint="Free some space.")
        except (SigmascopeError, threading.BrokenBarrierError) as error:
            return error
        return None

    found = meet(2, member)
    assert isinstance(found[failing], WriteError)
    other = found[1 - failing]
    assert isinstance(other, OtherProcessError)
    assert other.message == f"process {failing} of 2 failed: checkpoint: the disk is full. Free some space."


def test_a_mistake_in_one_process_ends_all_too() -> None:
    def member(number: int, team: Processes) -> Exception | None:
        try:
            with team.together():
                if number == 1:
                    raise IndexError("list index out of range")
        except (IndexError, OtherProcessError) as error:
            return error
        return None

    first, second = meet(2, member)
    assert isinstance(second, IndexError)
    assert isinstance(first, OtherProcessError)
    assert first.message == "process 1 of 2 failed: IndexError: list index out of range."
