import threading
from collections.abc import Iterator

import pytest

from sigmascope.lbm.data import prefetch


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_the_order_of_their_inputs(workers: int) -> None:
    squares = prefetch(lambda number: number**2, iter(range(50)), workers=workers, ahead=7)
    assert list(squares) == [number**2 for number in range(50)]


def test_only_so_much_is_done_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = prefetch(str, items(), workers=2, ahead=5)
    assert next(results) == "0"
    assert len(taken) == 6
    results.close()


def test_an_error_of_the_work_is_raised_in_its_place() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ZeroDivisionError
        return number

    results = prefetch(work, iter(range(9)), workers=2, ahead=9)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sigmascope-data")]
