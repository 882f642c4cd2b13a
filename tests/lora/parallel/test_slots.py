import threading
import time

import pytest
import torch

from sigmascope.lora.parallel import Scratch, map_in_order


def test_results_come_in_order_whatever_takes_longest() -> None:
    def work(slot: Scratch, item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0.0)
        return item * item

    assert list(map_in_order(range(12), work)) == [(item, item * item) for item in range(12)]


def test_what_a_result_holds_stays_until_the_next_is_taken() -> None:
    def work(slot: Scratch, item: int) -> torch.Tensor:
        return slot.scratch("value", 1000, torch.float32).fill_(item)

    for item, tensor in map_in_order(range(30), work):
        time.sleep(0.001)
        assert bool((tensor == item).all())


def test_memory_is_used_again() -> None:
    slot = Scratch()
    first = slot.scratch("a", 100, torch.float32)
    assert slot.scratch("a", 50, torch.float32).data_ptr() == first.data_ptr()
    assert slot.scratch("b", 50, torch.float32).data_ptr() != first.data_ptr()
    assert slot.scratch("a", 200, torch.float32).numel() == 200


def test_an_error_reaches_the_caller_and_begins_no_more() -> None:
    begun: list[int] = []

    def work(slot: Scratch, item: int) -> int:
        begun.append(item)
        if item == 3:
            raise ValueError("no")
        return item

    with pytest.raises(ValueError, match="no"):
        list(map_in_order(range(1000), work))
    assert len(begun) < 20


def test_leaving_early_ends_all_threads_and_keeps_the_thread_setting() -> None:
    before, threads = torch.get_num_threads(), {*threading.enumerate()}
    for item, _ in map_in_order(range(1000), lambda slot, item: item):
        if item == 2:
            break
    assert {*threading.enumerate()} <= threads
    assert torch.get_num_threads() == before


def test_nothing_to_do() -> None:
    assert list(map_in_order([], lambda slot, item: item)) == []
