"""A file that a program merged into the weights by itself: how strongly, against float64 arithmetic of the file."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
import torch
from tests.families import make_pipeline
from torch import Tensor, nn

from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.fingerprints import positions
from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    capture_lora_baseline,
)
from sigmascope.stages.lora_summary import weight_rows
from sigmascope.stages.signed_patches import SignedPatches
from sigmascope.stages.weight_verdict import WeightEvidence, judge_weight, sampled_effect

STRENGTHS: Final = {"once": [1.0], "below 0": [-0.37], "twice": [0.7, 0.7], "half taken out": [1.0, -0.5]}
WITHIN: Final = 1e-3


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = {"to_q": nn.Linear(96, 64), "to_k": nn.Linear(96, 64), "conv": nn.Conv2d(16, 48, 3)}
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict(layers)])}).to(dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.1


def lora_of(seed: int = 0) -> dict[str, Tensor]:
    return {
        "unet.blocks.0.to_q.lora_A.weight": random(4, 96, seed=seed),
        "unet.blocks.0.to_q.lora_B.weight": random(64, 4, seed=seed),
        "unet.blocks.0.conv.lora_A.weight": random(4, 16, 3, 3, seed=seed),
        "unet.blocks.0.conv.lora_B.weight": random(48, 4, 1, 1, seed=seed),
    }


def lokr_of(seed: int = 0) -> dict[str, Tensor]:
    start = "lycoris_blocks_0_to_q"
    return {f"{start}.lokr_w1": random(8, 8, seed=seed), f"{start}.lokr_w2": random(8, 12, seed=seed)}


def changes_of(file: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ΔW of each layer at strength 1, in float64."""
    if any("lokr" in name for name in file):
        first, second = (file[f"lycoris_blocks_0_to_q.lokr_w{side}"].double() for side in (1, 2))
        return {"to_q": torch.kron(first, second)}
    found = {}
    for layer in ("to_q", "conv"):
        up, down = (file[f"unet.blocks.0.{layer}.lora_{side}.weight"].double() for side in "BA")
        found[layer] = (up.flatten(1) @ down.flatten(1)).reshape(len(up), *down.shape[1:])
    return found


def merge(unet: Any, file: Mapping[str, Tensor], *strengths: float) -> None:
    for strength in strengths:
        for layer, change in changes_of(file).items():
            weight = unet["blocks"][0][layer].weight
            weight.data = (weight.double() + strength * change).to(weight.dtype)


def analysed(unet: Any, file: Mapping[str, Tensor], act: Callable[[], None]) -> Any:
    baseline = capture_lora_baseline(unet, None, dict(file))
    act()
    return analyze_lora_application_results(baseline, unet, None, None)


@pytest.mark.parametrize("strengths", STRENGTHS.values(), ids=STRENGTHS)
@pytest.mark.parametrize("file", [lora_of(), lokr_of()], ids=["LoRA", "LoKr"])
def test_a_file_that_was_merged_by_hand_has_the_norm_of_its_factors(
    file: dict[str, Tensor], strengths: list[float]
) -> None:
    unet = network()
    before = {layer: unet["blocks"][0][layer].weight.detach().double() for layer in changes_of(file)}
    found = analysed(unet, file, lambda: merge(unet, file, *strengths))
    told = found["unet_weight_changes"]
    for layer, change in changes_of(file).items():
        one = told["keys_value_changed"][f"blocks.0.{layer}.weight"]
        true = abs(sum(strengths)) * float(change.norm())
        assert one["delta_norm"] == pytest.approx(true, rel=WITHIN)
        assert one["relative_change"] == pytest.approx(true / float(before[layer].norm()), rel=WITHIN)
    assert told["spread"] == 0.0
    assert told["unexplained"] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_strength_is_known_but_for_rounding(dtype: torch.dtype) -> None:
    unet, file = network(dtype), lora_of()
    found = analysed(unet, file, lambda: merge(unet, file, 1.0))
    for layer, change in changes_of(file).items():
        told = found["unet_weight_changes"]["keys_value_changed"][f"blocks.0.{layer}.weight"]
        assert told["delta_norm"] == pytest.approx(float(change.norm()), rel=WITHIN)


def test_two_files_one_after_the_other() -> None:
    unet, first, second = network(), lora_of(1), lora_of(2)
    for file in (first, second):
        found = analysed(unet, file, lambda one=file: merge(unet, one, 0.8))  # type: ignore[misc]
        told = found["unet_weight_changes"]["keys_value_changed"]
        for layer, change in changes_of(file).items():
            true = 0.8 * float(change.norm())
            assert told[f"blocks.0.{layer}.weight"]["delta_norm"] == pytest.approx(true, rel=WITHIN)


def test_a_joined_layer_of_a_file_is_found_in_the_layers_that_it_is_of() -> None:
    """FLUX's LoRAs in kohya's format have q, k and v as one module."""

    unet = make_pipeline("flux").transformer
    attention = unet.transformer_blocks[0].attn
    layers = [attention.to_q, attention.to_k, attention.to_v]
    rows = [len(layer.weight) for layer in layers]
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    down, up = random(4, layers[0].weight.shape[1]), random(sum(rows), 4)
    file = {
        f"{name}.lora_down.weight": down,
        f"{name}.lora_up.weight": up,
        f"{name}.alpha": torch.tensor(4.0),
    }
    parts = torch.split(up.double() @ down.double(), rows)

    def act() -> None:
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data += part.float()

    told = analysed(unet, file, act)["unet_weight_changes"]["keys_value_changed"]
    for letter, part in zip("qkv", parts, strict=True):
        one = told[f"transformer_blocks.0.attn.to_{letter}.weight"]
        assert one["delta_norm"] == pytest.approx(float(part.norm()), rel=WITHIN)
        assert one["measured_from"] == "patches"


def test_what_no_file_explains_is_called_an_estimate_with_its_spread() -> None:
    """Four standard errors hold 9,999 of 10,000; there are six weights here."""
    for seed in range(3):
        unet, other = network(), lora_of(seed + 3)
        found = analysed(unet, lora_of(), lambda: merge(unet, other, 1.0))  # noqa: B023
        told = found["unet_weight_changes"]
        for layer, change in changes_of(other).items():
            one = told["keys_value_changed"][f"blocks.0.{layer}.weight"]
            assert one["measured_from"] == "sample"
            assert 0.005 < one["spread"] < 0.1
            true = float(change.norm())
            assert abs(one["delta_norm"] - true) < 4 * one["spread"] * true
        assert 0.005 < told["spread"] < 0.1
        assert len(told["unexplained"]) == 2


def test_what_was_merged_by_hand_and_taken_out_again_is_no_loaders_fault() -> None:
    unet, file = network(), lora_of()
    found = analysed(unet, file, lambda: merge(unet, file, 1.0, -1.0))
    assert found["effective"] is False
    (said,) = [one["message"] for one in found["findings"] if one["id"] == "lora_not_loaded"]
    assert "changed by rounding alone" in said
    assert not any("prefix" in one["message"] for one in found["findings"])


def test_of_a_change_that_no_element_shows_no_spread_is_known() -> None:
    unet = network()

    def write() -> None:
        weight = unet["blocks"][0]["to_q"].weight.data
        kept = set(positions(weight.numel()).tolist())
        weight.view(-1)[next(place for place in range(weight.numel()) if place not in kept)] += 1.0

    told = analysed(unet, lora_of(), write)["unet_weight_changes"]
    one = told["keys_value_changed"]["blocks.0.to_q.weight"]
    assert (one["delta_norm"], one["spread"], told["spread"]) == (None, None, None)
    assert one["unavailable"]["spread"] == one["unavailable"]["delta_norm"]
    assert told["unavailable"]["spread"] == f"of 1 of 1 weights: {one['unavailable']['spread']}"


@pytest.mark.parametrize(
    ("elements", "why"),
    [
        ([0.5], "one element alone was looked at"),
        ([0.0, 0.0], "none of the elements that were looked at changed"),
    ],
)
def test_a_spread_that_cannot_be_calculated_is_not_0(elements: list[float], why: str) -> None:
    before, after = torch.zeros(len(elements)), torch.tensor(elements)
    merged = AppliedPatch("w", "lora", "lora_up", "", "merged", strength=1.0)
    nothing, unread = SignedPatches(), SignedPatches((merged,), (), None, "not read")
    evidence = WeightEvidence(torch.ones(4, 4), None, nothing, unread, True, (before, after), (), {})
    told = judge_weight(evidence, None, sampled_effect((before, after), 16)).change
    assert told["measured_from"] == "sample"
    assert (told["spread"], told["unavailable"]["spread"]) == (None, why)
    facts = {"total_keys_modified": 1, "keys_value_changed": {"w": told}, "delta_norm": told["delta_norm"]}
    rows = weight_rows({**facts, "spread": None, "unavailable": {"spread": why}})
    (said,) = [row.value for row in rows if row.label == "  estimated"]
    assert said == f"from a thousand elements of each weight, and how closely is unknown: {why}"
