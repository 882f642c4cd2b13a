"""What is on ComfyUI's patchers, as its versions shape them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.adapters import LoRAAdapter, lora_adapter, lora_parts, lora_tuple
from tests.comfy_shapes.modules import OUT, BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import EarlyModelPatcher, NamedModelPatcher, OldModelPatcher
from tests.stages.lora_targets import Analysis, Apply, delta_norm, patches

import sigmascope
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

VERSIONS = (OldModelPatcher, EarlyModelPatcher, NamedModelPatcher, ModelPatcher)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", [lora_adapter(), lora_tuple()], ids=["adapter", "tuple"])
def test_every_version_gives_the_same_details(version: type[ModelPatcher], value: Any) -> None:
    patcher = version(BaseModel())
    patcher.add_patches({Q: value}, 0.7)
    details = sigmascope.analyze_lora_patches(patcher, "UNet")["patch_details"][Q]
    assert details["strength_patch"] == 0.7
    assert details["patch_type"] == "lora_up"
    assert details["adapter_type"] == "lora"
    assert details["patch_count"] == 1
    assert details["patch_data_shape"] == str(type(value))


def test_strength_0_has_no_effect(apply: Apply) -> None:
    found = apply(patches(), strength=0.0)
    assert found["unet_lora_patches"]["total_patched_keys"] == 1
    assert found["unet_weight_changes"]["keys_value_changed"] == {}
    assert found["effective"] is False
    assert found["findings"][0]["id"] == "lora_strength_zero"


def test_a_wrong_shape_is_a_finding_with_its_reason(apply: Apply) -> None:
    found = apply({Q: lora_adapter(out=6)}, load=True)
    assert found["success"] is False
    assert list(found["unet_lora_patches"]["failed"]) == [Q]
    assert "lora_changes_failed" in {finding["id"] for finding in found["findings"]}


def test_nan_is_found(apply: Apply) -> None:
    adapter = lora_adapter()
    adapter.weights[0][0, 0] = torch.nan
    found = apply({Q: adapter})
    assert found["unet_lora_patches"]["not_finite"] == [Q]
    assert found["success"] is False


def test_the_same_lora_twice_is_found(apply: Apply, unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    twice = unet.clone()
    twice.add_patches({Q: lora_adapter()}, 1.0)
    twice.add_patches({Q: copy.deepcopy(lora_adapter())}, 0.5)
    found = analyze_lora_application_results(baseline, twice, None, (twice, None))
    assert [one["keys"] for one in found["unet_lora_patches"]["applied_twice"]] == [1]
    change = found["unet_weight_changes"]["keys_value_changed"][Q]
    assert change["delta_norm"] == pytest.approx(delta_norm(strength=1.5))


def test_the_same_lora_forth_and_back_cancels_where_another_acts(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    several = unet.clone()
    for changes, strength in (
        ({Q: lora_adapter()}, 0.8),
        ({Q: lora_adapter()}, -0.8),
        ({OUT: LoRAAdapter(FILES[1], lora_parts(6))}, 1.0),
    ):
        several.add_patches(changes, strength)
    found = analyze_lora_application_results(baseline, several, None, (several, None))
    assert found["effective"] is True
    assert found["unet_weight_changes"]["keys_value_changed"].keys() == {OUT}
    assert "Denoiser: the same changes cancel each other on 1 weight (LoRA 1 and LoRA 2), since" in next(
        finding["message"] for finding in found["findings"] if finding["id"] == "lora_cancelled"
    )
    assert "lora_applied_twice" not in {finding["id"] for finding in found["findings"]}


def test_weights_that_were_made_in_inference_mode_are_read_after_it(
    unet: ModelPatcher, tmp_path: Path
) -> None:
    """ComfyUI makes models in inference mode, and its parameters may want gradients: a merge has the other model's."""
    up, down, alpha, *_ = lora_parts()
    file = tmp_path / "style.safetensors"
    parts = {"lora_B.weight": up, "lora_A.weight": down, "alpha": torch.tensor(alpha)}
    save_file({f"{Q.removesuffix('.weight')}.{name}": part for name, part in parts.items()}, file)
    with torch.inference_mode():
        other = torch.nn.Parameter(torch.ones(8, 8))
    merged = unet.clone()
    merged.add_patches({Q: [(other, lambda weight, **_: weight)]}, 0.5, 0.5)
    merged.add_patches({Q: lora_adapter()}, 0.8)
    baseline = capture_lora_baseline(unet, None, file)
    found = analyze_lora_application_results(baseline, merged, None, (merged, None))
    assert found["applied_verdict"] is not None
    assert found["applied_verdict"]["modules_there"] == 1


@pytest.mark.parametrize(
    ("strength", "told"),
    [(-0.4, "lora_cancelled"), (-0.8, "strengths 0.4 and -0.8 leave -0.4"), (0.4, "lora_applied_twice")],
)
def test_a_merge_leaves_a_part_of_the_changes_before_it(
    unet: ModelPatcher, strength: float, told: str
) -> None:
    """(W + 0.8·Δ)/2 + V/2 has 0.4·Δ, which −0.4·Δ cancels and −0.8·Δ does not."""
    several = unet.clone()
    several.add_patches({Q: lora_adapter()}, 0.8)
    several.add_patches({Q: [(torch.ones(8, 8), lambda weight, **_: weight)]}, 0.5, 0.5)
    several.add_patches({Q: lora_adapter()}, strength)
    found = analyze_lora_application_results(
        capture_lora_baseline(unet, None), several, None, (several, None)
    )
    assert found["effective"] is True
    about = [one for one in found["findings"] if one["id"] != "lora_registered_only"]
    assert told in " ".join(f"{one['id']} {one['message']}" for one in about)
    assert ("lora_cancelled" in {one["id"] for one in about}) is (told == "lora_cancelled")


@pytest.mark.parametrize(
    ("strength", "is_nothing"), [(1.0, True), (0.999, False), (-1.0, False)], ids=["all", "nearly", "twice"]
)
def test_a_lora_and_its_negation_cancel(unet: ModelPatcher, strength: float, is_nothing: bool) -> None:
    baseline = capture_lora_baseline(unet, None)
    several = unet.clone()
    up, *others = lora_parts()
    for adapter, at in (
        (LoRAAdapter(FILES[0], (up, *others)), 1.0),
        (LoRAAdapter(FILES[1], (-up, *others)), strength),
    ):
        several.add_patches({Q: adapter}, at)
    found = analyze_lora_application_results(baseline, several, None, (several, None))
    assert found["effective"] is not is_nothing
    told = [one["message"] for one in found["findings"] if one["id"] == "lora_opposite"]
    assert (
        told
        == ["The LoRAs change nothing: the changes cancel each other on 1 weight, since their sum is 0."]
        * is_nothing
    )


def test_the_same_lora_against_itself_says_what_is_left(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    several = unet.clone()
    for strength in (1.0, -0.5):
        several.add_patches({Q: copy.deepcopy(lora_adapter())}, strength)
    found = analyze_lora_application_results(baseline, several, None, (several, None))
    norm = found["unet_weight_changes"]["keys_value_changed"][Q]["delta_norm"]
    assert norm == pytest.approx(delta_norm(strength=0.5))
    (finding,) = (one for one in found["findings"] if one["id"] in ("lora_opposed", "lora_applied_twice"))
    assert finding["message"].endswith("strengths 1 and -0.5 leave 0.5.")
    assert finding["evidence"]["left"] == 0.5


FILES: tuple[set[str], set[str]] = ({"one"}, {"other"})


def two(first: tuple[Any, ...], second: tuple[Any, ...]) -> Analysis:
    """Two LoRAs: the first on two weights, the second on one of them at half strength."""
    patcher = ModelPatcher(BaseModel())
    patcher.add_patches({Q: LoRAAdapter(FILES[0], first), OUT: LoRAAdapter(FILES[0], lora_parts(6))}, 1.0)
    patcher.add_patches({Q: LoRAAdapter(FILES[1], second)}, 0.5)
    return dict(sigmascope.analyze_lora_patches(patcher, "UNet"))


def test_two_loras_are_told_apart() -> None:
    loras = two(lora_parts(), lora_parts(seed=7))["loras"]
    assert [lora["keys"] for lora in loras.values()] == [2, 1]
    assert [lora["strengths"] for lora in loras.values()] == [[1.0], [0.5]]


def test_a_lora_overlaps_with_its_copy_wholly() -> None:
    (found,) = two(lora_parts(), lora_parts())["overlaps"]
    assert found["largest"][0]["overall"] == pytest.approx(1.0)
    assert (found["shared_keys"], found["only_a"], found["only_b"]) == (1, 1, 0)


def test_loras_of_orthogonal_directions_do_not_overlap() -> None:
    up, down = torch.eye(8)[:, :2], torch.eye(8)[:2]
    first = (up, down, None, None, None, None)
    (found,) = two(first, (up.roll(2, 0), down.roll(2, 1), *first[2:]))["overlaps"]
    assert found["overall"] == pytest.approx(0.0, abs=1e-9)


def test_the_overlap_of_each_weight_comes_with_the_angles_between_the_directions() -> None:
    up, down = torch.eye(8)[:, :2], torch.eye(8)[:2]
    first = (up, down, None, None, None, None)
    half_turned = (up + torch.eye(8)[:, 2:4], down, *first[2:])
    (found,) = two(first, half_turned)["overlaps"]
    assert found["largest"][0]["column_angles"] == pytest.approx([45.0, 45.0])
    assert found["largest"][0]["row_angles"] == pytest.approx([0.0, 0.0], abs=1e-5)


def test_what_would_take_too_long_is_compared_on_some_weights_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sigmascope.stages.lora_on_model._MOST_OVERLAP_PRODUCTS", 4**2 * 16)
    patcher = ModelPatcher(BaseModel())
    for number, file in enumerate(FILES):
        parts = {Q: lora_parts(seed=number), OUT: lora_parts(6, seed=number)}
        patcher.add_patches({key: LoRAAdapter(file, part) for key, part in parts.items()}, 1.0)
    (found,) = sigmascope.analyze_lora_patches(patcher, "UNet")["overlaps"]
    assert (found["shared_keys"], found["compared_keys"]) == (2, 1)
    assert "1 in 2 of 2 weights" in found["unavailable"]["keys"]


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_a_strength_that_is_no_finite_number_is_an_error(apply: Apply, strength: float) -> None:
    found = apply(patches(), strength=strength)
    assert found["unet_lora_patches"]["not_finite"] == [Q]
    assert (found["success"], found["findings"][0]["id"]) == (False, "lora_not_finite")


def test_a_strength_that_cannot_be_read_is_not_called_no_effect(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    unet.add_patches({Q: lora_adapter()}, "strong")  # type: ignore[arg-type]
    change = analyze_lora_application_results(baseline, unet, None, (unet, None))["unet_weight_changes"][
        "keys_value_changed"
    ][Q]
    assert change["delta_norm"] is None
    assert "strength" in change["unavailable"]["delta_norm"]
