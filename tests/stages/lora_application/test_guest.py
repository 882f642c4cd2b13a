"""Devices and memory, and that nothing is held or left behind."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP
from torch import nn

import sigmascope
from sigmascope.probes import module_tree
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


def test_no_mark_is_left_on_patchers_and_modules(unet: ModelPatcher, clip: CLIP) -> None:
    things = (unet, clip, clip.patcher, unet.model, *unet.model.modules())
    before = [set(vars(thing)) for thing in things]
    baseline = capture_lora_baseline(unet, clip)
    analyze_lora_application_results(baseline, unet, clip, (unet, clip))
    assert [set(vars(thing)) for thing in things] == before


def test_a_baseline_keeps_no_weight_alive() -> None:
    module = nn.Linear(64, 64)
    references: list[Any] = [weakref.ref(module), weakref.ref(module.weight)]
    baseline = capture_lora_baseline(module, None)
    del module
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert baseline["unet"]["fingerprinted_keys"] == 2


def test_devices_are_those_of_patcher_and_model(unet: ModelPatcher, clip: CLIP) -> None:
    moved = clip.clone()
    moved.patcher.load_device = torch.device("meta")
    found = sigmascope.track_model_placement_changes(clip, moved, "CLIP")
    assert found["load_device_changed"] is True
    assert found["offload_device_changed"] is False
    assert (found["original_load_device"], found["clip_patcher_load_device"]) == ("cpu", "meta")
    assert "clip_model_device" not in sigmascope.track_model_placement_changes(unet, unet, "UNet")


def test_memory_is_that_of_the_accelerator_and_unknown_without_one(unet: ModelPatcher) -> None:
    found = sigmascope.calculate_memory_change({"memory_allocated": 0, "memory_reserved": 0}, unet)
    size = sum(weight.nbytes for weight in unet.model.state_dict().values())
    assert found["model_size_mb"] == size / 2**20
    assert found["error"] is None
    if not torch.cuda.is_available():
        assert found["allocated_change_mb"] is None
        assert found["unavailable"]["allocated_change_mb"] == "no accelerator was found"


def test_a_baseline_that_is_none_is_an_error_of_the_memory_alone(unet: ModelPatcher) -> None:
    found = sigmascope.calculate_memory_change(None, unet)
    assert found["error"] == "the baseline is NoneType, not a dict"


def test_the_modules_of_a_model_are_walked_once_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[nn.Module] = []
    walk = module_tree._tree_now

    def tree_now(model: nn.Module) -> module_tree.ModuleTree:
        walked.append(model)
        return walk(model)

    monkeypatch.setattr(module_tree, "_tree_now", tree_now)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    baseline = capture_lora_baseline(model, None)
    assert walked == [model]
    analyze_lora_application_results(baseline, model, None, model)
    assert walked == [model, model]
