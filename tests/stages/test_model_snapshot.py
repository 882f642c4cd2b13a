"""Whether a model is still the same."""

import gc

import pytest
from torch import nn

import sigmascope
from sigmascope.stages.lora_application import capture_lora_baseline


def cloned(original: object, modified: object) -> bool | None:
    baseline = capture_lora_baseline(None, original, keys="none")
    return sigmascope.track_model_identity_changes(baseline["clip"], modified, "CLIP")["model_cloned"]


def test_a_list_of_the_same_models_is_the_same() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert cloned([one, other], [one, other]) is False
    assert cloned({"a": one}, {"a": one}) is False
    assert cloned([one, other], [other, one]) is True
    assert cloned([one, other], [one]) is True


def test_an_original_that_is_gone_is_another_object() -> None:
    baseline = capture_lora_baseline(nn.Linear(2, 2), None)
    gc.collect()
    found = sigmascope.track_model_identity_changes(baseline["unet"], nn.Linear(2, 2), "UNet")
    assert found["model_cloned"] is True


@pytest.mark.parametrize(("original", "modified"), [(None, nn.Linear(1, 1)), (nn.Linear(1, 1), None)])
def test_a_model_that_is_missing_leaves_it_open_with_the_reason(original: object, modified: object) -> None:
    found = sigmascope.track_model_identity_changes(original, modified, "UNet")
    assert (found["model_cloned"], found["class_changed"]) == (None, None)
    assert found["unavailable"]["model_cloned"] == "no model was given"


def test_another_class_is_told() -> None:
    found = sigmascope.track_model_identity_changes(nn.Linear(1, 1), nn.Conv2d(1, 1, 1), "UNet")
    assert found["class_changed"] is True
    assert (found["original_class"], found["modified_class"]) == ("Linear", "Conv2d")


def test_a_model_without_adapters_has_no_patches() -> None:
    found = sigmascope.track_model_identity_changes(nn.Linear(1, 1), nn.Linear(1, 1), "UNet")
    assert (found["original_patch_count"], found["patches_added"]) == (0, 0)
    assert found["uuid_changed"] is None
