"""The public functions: the structures of the seed, and what holds for all of them."""

import json
import uuid
from typing import Any

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP
from tests.stages.lora_targets import Apply, patches

from sigmascope.records.memory import PeakMemory
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

UNET_BASELINE = {
    "model_id",
    "class",
    "device",
    "patches_count",
    "patches_uuid",
    "memory_allocated",
    "memory_reserved",
}
CLIP_BASELINE = {
    "model_id",
    "class",
    "device",
    "patcher_patches_count",
    "patcher_patches_uuid",
    "memory_allocated",
    "memory_reserved",
}
ANALYSIS = {
    "lora_application_success",
    "models_returned",
    "unet_changes",
    "clip_changes",
    "unet_weight_changes",
    "clip_weight_changes",
    "unet_lora_patches",
    "clip_lora_patches",
    "placement_changes",
    "memory_impact",
}
IDENTITY = {
    "model_cloned",
    "class_changed",
    "patches_added",
    "uuid_changed",
    "original_patch_count",
    "modified_patch_count",
}
WEIGHTS = {"keys_added", "keys_removed", "keys_modified", "total_keys_original", "total_keys_modified"}
WEIGHT = {"shape_changed", "dtype_changed", "device_changed", "original_shape", "modified_shape"}
PATCH = {"strength_patch", "patch_type", "patch_data_shape", "patch_count"}
PLACEMENT = {
    "model_device_changed",
    "load_device_changed",
    "offload_device_changed",
    "original_device",
    "modified_device",
}
CLIP_PLACEMENT = {"clip_model_device", "clip_patcher_load_device", "clip_patcher_offload_device"}
MEMORY = {"allocated_change_mb", "reserved_change_mb", "current_allocated_mb", "current_reserved_mb"}


def test_the_baseline_has_the_seeds_keys_and_types(unet: ModelPatcher, clip: CLIP) -> None:
    found = capture_lora_baseline(unet, clip)
    assert set(found) >= {"timestamp", "unet", "clip"}
    assert set(found["unet"]) >= UNET_BASELINE
    assert set(found["clip"]) >= CLIP_BASELINE
    assert isinstance(found["timestamp"], float)
    assert found["unet"]["model_id"] == id(unet)
    assert found["unet"]["class"] == "ModelPatcher"
    assert found["unet"]["device"] == torch.device("cpu")
    assert found["unet"]["patches_count"] == 0
    assert isinstance(found["unet"]["patches_uuid"], uuid.UUID)
    assert found["clip"]["patcher_patches_uuid"] == clip.patcher.patches_uuid


def test_the_analysis_has_the_seeds_keys(apply: Apply) -> None:
    found = apply(patches())
    assert set(found) >= ANALYSIS
    for side in ("unet", "clip"):
        assert set(found[f"{side}_changes"]) >= IDENTITY
        assert set(found[f"{side}_weight_changes"]) >= WEIGHTS
        assert all(set(one) == WEIGHT for one in found[f"{side}_weight_changes"]["weight_changes"].values())
        assert set(found[f"{side}_lora_patches"]) >= {"total_patched_keys", "patch_details"}
        assert all(set(one) >= PATCH for one in found[f"{side}_lora_patches"]["patch_details"].values())
        assert set(found["placement_changes"][side]) >= PLACEMENT
        assert set(found["memory_impact"][f"{side}_memory_change"]) >= MEMORY
    assert set(found["placement_changes"]["clip"]) >= CLIP_PLACEMENT


def test_what_the_host_returned_is_counted(apply: Apply) -> None:
    found = apply(patches())
    assert found["lora_application_success"] is True
    assert found["models_returned"] == 2


def test_nothing_returned_is_no_success(unet: ModelPatcher, clip: CLIP) -> None:
    found = analyze_lora_application_results(capture_lora_baseline(unet, clip), unet, clip, None)
    assert found["lora_application_success"] is False
    assert found["models_returned"] == 0


def test_a_clone_with_patches_is_told(apply: Apply) -> None:
    assert apply(patches())["unet_changes"] == {
        "model_cloned": True,
        "class_changed": False,
        "patches_added": 1,
        "uuid_changed": True,
        "original_patch_count": 0,
        "modified_patch_count": 1,
        "original_class": "ModelPatcher",
        "modified_class": "ModelPatcher",
        "unavailable": {},
    }


def test_each_model_is_compared_with_its_own_original(unet: ModelPatcher, clip: CLIP) -> None:
    found = analyze_lora_application_results(capture_lora_baseline(unet, clip), unet, clip, (unet, clip))
    for side in ("unet_changes", "clip_changes"):
        assert found[side]["model_cloned"] is False
        assert found[side]["class_changed"] is False


def test_the_analysis_is_plain_json_and_has_the_baseline(apply: Apply) -> None:
    found = json.loads(json.dumps(apply(patches(), load=True)))
    assert found["baseline"]["unet"]["device"] == "cpu"
    assert "captured" not in found["baseline"]["unet"]


def test_what_the_application_raised_is_on_record(unet: ModelPatcher) -> None:
    try:
        raise ValueError("no such layer")
    except ValueError as error:
        found = analyze_lora_application_results(
            capture_lora_baseline(unet, None), unet, None, None, elapsed_time=0.5, error=error
        )
    assert found["error"] == "ValueError: no such layer"
    assert found["exception_details"] is not None
    assert "test_what_the_application_raised" in found["exception_details"]["traceback"]
    assert (found["lora_application_success"], found["elapsed_time"]) == (False, 0.5)


def test_a_stages_peak_is_taken_over(unet: ModelPatcher) -> None:
    peak = PeakMemory(rss_bytes=2**20, rss_at_seconds=0.1)
    found = analyze_lora_application_results(None, unet, None, (unet, None), peak_memory=peak)
    assert found["peak_memory"] is not None
    assert found["peak_memory"]["process"] == {"peak_rss_mb": 1.0, "peak_rss_at_seconds": 0.1}


@pytest.mark.parametrize("baseline", [None, {}, {"unet": 7}, {"unet": {"captured": 3}, "references": "text"}])
def test_without_a_baseline_there_is_still_what_is_on_the_model(unet: ModelPatcher, baseline: Any) -> None:
    unet.add_patches({Q: lora_adapter()}, 1.0)
    found = analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["unet_changes"]["model_cloned"] is None
    assert found["unet_weight_changes"]["keys_added"] == []
    assert list(found["unet_weight_changes"]["keys_value_changed"]) == [Q]
    assert found["effective"] is True
