from collections.abc import Callable

import pytest
import torch

from sigmascope.lora.effect import effect_of, measured_effect
from sigmascope.probes.applied_patch import AppliedPatch

Randn = Callable[..., torch.Tensor]
MakePatch = Callable[..., AppliedPatch]


def norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def dense(patch: AppliedPatch) -> torch.Tensor:
    """strength · scale · up @ down, in float64."""
    up, down = patch.tensors["up"].double(), patch.tensors["down"].double()
    return (patch.strength or 0.0) * (patch.scale or 0.0) * up.flatten(1) @ down.flatten(1)


def test_plain_factors_have_the_norm_of_their_product(randn: Randn, make_patch: MakePatch) -> None:
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 8), strength=0.7, scale=0.5)
    weight = randn(12, 8)
    effect = effect_of([patch], weight)
    assert effect.delta_norm == pytest.approx(norm(dense(patch)), rel=1e-12)
    assert effect.weight_norm == pytest.approx(norm(weight), rel=1e-12)
    assert effect.relative_change == pytest.approx(norm(dense(patch)) / norm(weight), rel=1e-12)


def test_factors_beside_a_packed_weight_have_their_norm(randn: Randn, make_patch: MakePatch) -> None:
    """As GGUF's and bitsandbytes' weights: codes of another shape than the matrix."""
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 8), weight_shape=(12, 8))
    effect = effect_of([patch], torch.zeros(12, 9, dtype=torch.uint8))
    assert effect.delta_norm == pytest.approx(norm(dense(patch)), rel=1e-12)
    assert effect.weight_norm is None
    assert "packed codes" in effect.unavailable["relative_change"]


def test_several_loras_add_up_before_their_norm(randn: Randn, make_patch: MakePatch) -> None:
    one = make_patch("lora", up=randn(12, 3), down=randn(3, 8), strength=0.7)
    two = make_patch("lora", up=randn(12, 5), down=randn(5, 8), strength=-1.3, scale=0.25, index=1)
    effect = effect_of([one, two], None)
    assert effect.delta_norm == pytest.approx(norm(dense(one) + dense(two)), rel=1e-12)
    assert effect.acting == 2


def test_a_lora_and_its_opposite_leave_nothing(randn: Randn, make_patch: MakePatch) -> None:
    up, down = randn(12, 3), randn(3, 8)
    patches = [make_patch("lora", up=up, down=down, strength=s) for s in (1.0, -1.0)]
    assert effect_of(patches, None).delta_norm == 0.0


def test_what_nearly_cancels_keeps_its_digits(randn: Randn, make_patch: MakePatch) -> None:
    up, down, small = randn(12, 3), randn(3, 8), 1e-9
    patches = [
        make_patch("lora", up=up, down=down),
        make_patch("lora", up=up.double() * (1.0 + small), down=down, strength=-1.0),
    ]
    expected = norm(dense(patches[0]) + dense(patches[1]))
    assert effect_of(patches, None).delta_norm == pytest.approx(expected, rel=1e-5)


def test_strength_zero_is_exactly_no_change(randn: Randn, make_patch: MakePatch) -> None:
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 8), strength=0.0)
    effect = effect_of([patch], randn(12, 8))
    assert (effect.delta_norm, effect.relative_change, effect.acting) == (0.0, 0.0, 0)
    assert effect.left_out == ("its strength is 0",)


@pytest.mark.parametrize("state", ["failed", "inactive"])
def test_what_does_not_act_changes_nothing(randn: Randn, make_patch: MakePatch, state: str) -> None:
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 8), state=state, state_reason="its shape")
    effect = effect_of([patch], None)
    assert effect.delta_norm == 0.0
    assert "its shape" in effect.left_out[0]


def test_a_weight_of_zeros_has_no_relative_change(randn: Randn, make_patch: MakePatch) -> None:
    effect = effect_of([make_patch("lora", up=randn(4, 1), down=randn(1, 4))], torch.zeros(4, 4))
    assert effect.relative_change is None
    assert effect.unavailable["relative_change"] == "the weight is all zeros"


def test_the_weight_itself_may_be_scaled(randn: Randn, make_patch: MakePatch) -> None:
    weight = randn(12, 8)
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 8), strength_model=0.9)
    expected = norm(-0.1 * weight.double() + dense(patch))
    assert effect_of([patch], weight).delta_norm == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("offset", "up", "down"), [((0, 4, 6), 6, 8), ((1, 2, 5), 12, 5)])
def test_a_part_of_a_weight_is_changed_where_it_lies(
    randn: Randn, make_patch: MakePatch, offset: tuple[int, int, int], up: int, down: int
) -> None:
    whole = make_patch("lora", up=randn(12, 3), down=randn(3, 8), strength=0.5)
    part = make_patch("lora", up=randn(up, 2), down=randn(2, down), offset=offset)
    expected = dense(whole)
    expected.narrow(*offset).add_(dense(part))
    effect = effect_of([whole, part], randn(12, 8))
    assert effect.delta_norm == pytest.approx(norm(expected), rel=1e-12)


def test_a_convolution_is_its_matrix(randn: Randn, make_patch: MakePatch) -> None:
    patch = make_patch("lora", up=randn(12, 3, 1, 1), down=randn(3, 8, 3, 3))
    effect = effect_of([patch], randn(12, 8, 3, 3))
    assert effect.delta_norm == pytest.approx(norm(dense(patch)), rel=1e-12)


def test_factors_of_another_shape_are_said(randn: Randn, make_patch: MakePatch) -> None:
    effect = effect_of([make_patch("lora", up=randn(12, 3), down=randn(3, 7))], randn(12, 8))
    assert effect.delta_norm is None
    assert (
        effect.unavailable["delta_norm"]
        == "a.weight: a change of shape (12, 7) does not fit a weight (12, 8)."
    )


def test_nan_is_no_norm(randn: Randn, make_patch: MakePatch) -> None:
    up = randn(12, 3)
    up[0, 0] = torch.nan
    effect = effect_of([make_patch("lora", up=up, down=randn(3, 8))], None)
    assert effect.delta_norm is None
    assert "NaN" in effect.unavailable["delta_norm"]


def test_an_unreadable_strength_is_no_guess(randn: Randn, make_patch: MakePatch) -> None:
    patch = make_patch(
        "lora", up=randn(4, 1), down=randn(1, 4), strength=None, unavailable={"strength": "no"}
    )
    effect = effect_of([patch], None)
    assert effect.delta_norm is None
    assert effect.unavailable["delta_norm"].endswith("could not be read: no.")


def test_contents_are_subtracted(randn: Randn) -> None:
    before, after = randn(12, 8).bfloat16(), randn(12, 8)
    effect = measured_effect(before, after)
    assert effect.delta_norm == pytest.approx(norm(after.double() - before.double()), rel=1e-12)
    assert not effect.predicted


def test_contents_of_other_shapes_have_no_difference(randn: Randn) -> None:
    effect = measured_effect(randn(3, 4), randn(4, 3))
    assert effect.unavailable["delta_norm"] == "the weight's shape was (3, 4) and is now (4, 3)."


def test_a_weight_that_its_change_enlarges_grows_by_zeros(randn: Randn, make_patch: MakePatch) -> None:
    """As ComfyUI does for the input of FLUX' control LoRAs."""
    patch = make_patch("lora", up=randn(12, 3), down=randn(3, 16), weight_shape=(12, 8))
    effect = effect_of([patch], randn(12, 8))
    assert effect.delta_norm == pytest.approx(norm(dense(patch)), rel=1e-12)


def test_a_change_is_reshaped_where_only_the_count_agrees(randn: Randn, make_patch: MakePatch) -> None:
    patch = make_patch("lora", up=randn(8, 3), down=randn(3, 12))
    effect = effect_of([patch], randn(12, 8))
    assert effect.delta_norm == pytest.approx(norm(dense(patch)), rel=1e-12)
