"""What can be told of a change when the old content is gone."""

import pytest
import torch
from torch import Tensor

from sigmascope.lora.effect import effect_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.fingerprints import samples
from sigmascope.stages.weight_verdict import rounding, sampled_effect, with_unmerged_norm


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def patch(
    out: int, width: int, kernel: tuple[int, ...] = (), strength: float = 1.0, seed: int = 0
) -> AppliedPatch:
    tensors = {"up": random(out, 4, seed=seed), "down": random(4, width, *kernel, seed=seed + 1)}
    shape = (out, width, *kernel)
    return AppliedPatch(
        "w",
        "lora",
        "lora_up",
        "",
        "merged",
        index=seed,
        strength=strength,
        tensors=tensors,
        weight_shape=shape,
    )


def delta(one: AppliedPatch) -> Tensor:
    assert one.strength is not None
    return one.strength * (one.tensors["up"] @ one.tensors["down"].flatten(1))


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_the_norm_before_merging_is_found_from_the_merged_weight(kernel: tuple[int, ...]) -> None:
    patches = [patch(24, 40, kernel), patch(24, 40, kernel, strength=-0.5, seed=5)]
    weight = random(24, 40, *kernel, seed=9)
    merged = weight + sum(delta(one) for one in patches).reshape(weight.shape)  # type: ignore[union-attr]
    found = with_unmerged_norm(effect_of(patches, None), merged, patches)
    assert found.weight_norm == pytest.approx(float(weight.norm()), rel=1e-5)
    assert found.relative_change == pytest.approx(float((merged - weight).norm() / weight.norm()), rel=1e-5)


def test_a_weight_that_merging_cancelled_is_unknown() -> None:
    one = patch(8, 8)
    found = with_unmerged_norm(effect_of([one], None), delta(one), [one])
    assert (found.weight_norm, found.relative_change) == (None, None)
    assert found.unavailable["weight_norm"] == "the weight without the changes is gone"


def test_samples_estimate_change_and_weight() -> None:
    weight, change = random(256, 300, seed=1), random(256, 300, seed=2)
    pair = samples({"w": weight})["w"], samples({"w": weight + 0.1 * change})["w"]
    found = sampled_effect(pair, weight.numel())
    assert found is not None
    assert found.delta_norm == pytest.approx(0.1 * float(change.norm()), rel=0.1)
    assert found.weight_norm == pytest.approx(float(weight.norm()), rel=0.1)


def test_without_two_samples_nothing_is_estimated() -> None:
    assert sampled_effect(None, 4) is None
    assert sampled_effect((torch.ones(3), torch.ones(4)), 4) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.01, 1.0])
def test_rounding_covers_adding_and_taking_away(dtype: torch.dtype, size: float) -> None:
    weight, change = random(512, 512, seed=3).to(dtype), (size * random(512, 512, seed=4)).to(dtype)
    drift = ((weight + change) - change - weight).double().norm() / weight.double().norm()
    assert 0.0 < float(drift) <= rounding(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_of_some_per_cent_is_more_than_rounding(dtype: torch.dtype) -> None:
    assert rounding(dtype) < 0.02
    assert rounding(torch.int8) == 0.0
