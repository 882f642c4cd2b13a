import pytest
import torch

from sigmascope.lora.applied_verdict import is_same
from sigmascope.lora.factors import LoraFactors
from sigmascope.probes.applied_patch import AppliedPatch

_UP, _DOWN = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((40, 3), (3, 30)))
CHANGE = LoraFactors(_UP, _DOWN, 3.0, (40, 30))


def patch(up: torch.Tensor, down: torch.Tensor) -> AppliedPatch:
    return AppliedPatch("a.weight", "lora", "lora_up", "", "lazy", tensors={"up": up, "down": down})


def test_other_factors_of_the_same_product_are_the_same_change() -> None:
    mixing = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 5.0], [1.0, 0.0, 1.0]])
    assert is_same(CHANGE, patch(_UP @ mixing, 7.0 * torch.linalg.inv(mixing) @ _DOWN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_and_scaled_factors_are_the_same_change(dtype: torch.dtype) -> None:
    assert is_same(CHANGE, patch((_UP * 1.7).to(dtype), (_DOWN / 3.0).to(dtype)))


def test_a_change_in_a_few_rows_is_found_in_them() -> None:
    up = torch.zeros(40, 3)
    up[17] = _UP[17]
    mostly_zero = LoraFactors(up, _DOWN, 3.0, (40, 30))
    noise = 1e-9 * torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    assert is_same(mostly_zero, patch(2.0 * up + noise, _DOWN))


@pytest.mark.parametrize("part", ["up", "down"])
def test_one_other_factor_is_another_change(part: str) -> None:
    own = {"up": _UP, "down": _DOWN}
    assert not is_same(CHANGE, patch(**own | {part: own[part].roll(1, 0)}))


def test_an_opposite_change_is_another() -> None:
    assert not is_same(CHANGE, patch(-_UP, _DOWN))


@pytest.mark.parametrize("file", ["of other values", "of zeros"])
def test_a_zero_change_in_factors_of_a_larger_rank_is_the_same(file: str) -> None:
    down = _DOWN if file == "of other values" else torch.zeros(3, 30)
    untrained = LoraFactors(torch.zeros(40, 3), down, 3.0, (40, 30))
    padded = torch.cat([down, torch.zeros(5, 30)])
    assert is_same(untrained, patch(torch.zeros(40, 8), padded))
    assert not is_same(untrained, patch(torch.zeros(40, 8), padded + 1.0))
