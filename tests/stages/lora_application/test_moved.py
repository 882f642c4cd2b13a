"""Models that go to another dtype or whose weights go away between two moments."""

import pytest
import torch
from torch import nn

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_is_no_change(dtype: torch.dtype) -> None:
    made = model()
    baseline = capture_lora_baseline(made, None)
    analysis = analyze_lora_application_results(baseline, made.to(dtype), None, made)
    weights = analysis["unet_weight_changes"]
    assert (weights["keys_value_changed"], weights["unexplained"]) == ({}, [])
    assert all(change["dtype_changed"] for change in weights["weight_changes"].values())
    assert analysis["effective"] is False


def test_weights_that_went_away_are_not_said_to_be_unchanged() -> None:
    made = model()
    baseline = capture_lora_baseline(made, None)
    analysis = analyze_lora_application_results(baseline, made.to("meta"), None, made)
    assert analysis["effective"] is None
    assert analysis["unavailable"]["effective"]
    assert [finding["id"] for finding in analysis["findings"]] == ["lora_not_seen"]


def test_without_a_baseline_nothing_is_said_to_be_unchanged() -> None:
    analysis = analyze_lora_application_results(None, model(), None, (1, 2))
    assert analysis["effective"] is None


def test_a_missing_file_is_said_once() -> None:
    made = model()
    baseline = capture_lora_baseline(made, None, "nowhere.safetensors")
    findings = analyze_lora_application_results(baseline, made, None, made)["findings"]
    assert [finding["id"] for finding in findings].count("lora_unreadable") == 1


def test_an_unknown_word_for_keys_means_all() -> None:
    assert capture_lora_baseline(model(), None, keys="lorra")["unet"]["fingerprinted_keys"] == 4


def test_a_weight_with_nan_has_no_norm_of_its_change() -> None:
    made = model()
    weight = next(made.parameters()).data
    weight[0] = torch.nan
    baseline = capture_lora_baseline(made, None)
    weight[1:] += 1.0
    weights = analyze_lora_application_results(baseline, made, None, made)["unet_weight_changes"]
    assert weights["keys_value_changed"]["0.weight"]["delta_norm"] is None
    assert weights["keys_value_changed"]["0.weight"]["unavailable"]["delta_norm"]
