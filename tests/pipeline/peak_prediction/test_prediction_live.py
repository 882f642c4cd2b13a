import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from sigmascope.pipeline.peak_prediction import counted

ROW = 1000 * 4
"""Bytes of a thousand float32 elements."""


def row() -> Tensor:
    return torch.empty(1000, device="meta")


def test_what_is_alive_together_is_added() -> None:
    def code() -> Tensor:
        first = row()
        second = first + 1
        return first + second

    assert counted(code).tensor_bytes == 3 * ROW


def test_what_was_let_go_of_is_not() -> None:
    def code() -> Tensor:
        value = row()
        for _ in range(5):
            value = value + 1
        return value

    assert counted(code).tensor_bytes == 2 * ROW


def test_views_and_work_in_place_take_nothing() -> None:
    assert counted(lambda: row().view(10, 100).add_(1)[2:].relu_()).tensor_bytes == ROW


def test_what_was_there_before_is_not_counted() -> None:
    given = row()
    assert counted(lambda: given * 2).tensor_bytes == ROW


def test_views_of_what_was_there_before_are_not_counted() -> None:
    given = row()
    assert counted(lambda: given[:500].view(5, 100) + given[500:].view(5, 100)).tensor_bytes == ROW // 2


def test_a_convolution_lays_out_its_input_and_weight_anew() -> None:
    conv = nn.Conv2d(2, 4, 3, padding=1, bias=False, device="meta")
    picture = torch.empty(1, 2, 10, 10, device="meta")
    found = counted(lambda: conv(picture))
    assert found.tensor_bytes == 4 * 100 * 4
    assert found.peak_bytes == (4 * 100 + 2 * 100 + 2 * 4 * 9) * 4


def test_attention_does_not_hold_all_pairs() -> None:
    query = torch.empty(1, 1, 5000, 8, device="meta")
    found = counted(lambda: functional.scaled_dot_product_attention(query, key=query, value=query))
    assert found.tensor_bytes == 5000 * 8 * 4
    assert isinstance(found.result, Tensor)
    assert found.result.shape == query.shape


def test_the_hosts_own_counting_is_not_told() -> None:
    with FlopCounterMode(display=False) as host:
        counted(lambda: torch.empty(8, 8, device="meta") @ torch.empty(8, 8, device="meta"))
    assert host.get_total_flops() == 0


def test_random_numbers_are_left_to_the_host() -> None:
    before = torch.get_rng_state()
    counted(lambda: torch.randn(100, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)
