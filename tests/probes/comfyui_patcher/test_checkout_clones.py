"""Against a real ComfyUI: clones share one model, and each is compared by its own weights whatever is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.checkout import Checkout
from tests.comfy_shapes.real import kohya_file, real_clip, unet_patcher

import sigmascope
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.comfyui
Analysis = dict[str, Any]


class Host:
    """ComfyUI with a U-Net, a text encoder, and a LoRA for both; its memory management loads and unloads."""

    def __init__(self, comfy: Checkout) -> None:
        self.comfy = comfy
        self.management = comfy.module("comfy.model_management")
        self.model, self.clip = unet_patcher(comfy), real_clip(comfy)
        self.file = kohya_file(comfy, self.model, self.clip)
        self.weights = {name: w.clone() for name, w in self.model.model.state_dict().items()}

    def with_lora(self, model: Any, clip: Any, strength: float = 0.8) -> tuple[Any, Any]:
        loader = self.comfy.module("comfy.sd").load_lora_for_models
        loaded: tuple[Any, Any] = loader(model, clip, self.file, strength, strength)
        return loaded

    def load(self, *patchers: Any) -> None:
        """As sampling and text encoding do first."""
        self.management.load_models_gpu(list(patchers))

    def delta_norm(self) -> float:
        """‖ΔW‖ of what the model holds now against what it was made with."""
        now = self.model.model.state_dict()
        changes = [(now[name].double() - weight.double()).norm() for name, weight in self.weights.items()]
        return float(torch.stack(changes).norm())


@pytest.fixture
def host(comfy: Checkout) -> Any:
    host = Host(comfy)
    yield host
    host.management.unload_all_models()


def analysed(baseline: object, model: Any, clip: Any) -> Analysis:
    return dict(analyze_lora_application_results(baseline, model, clip, (model, clip)))


def check_unchanged(analysis: Analysis) -> None:
    for side in ("unet", "clip"):
        weights = analysis[f"{side}_weight_changes"]
        assert (weights["keys_value_changed"], weights["drift"]["keys"]) == ({}, [])
    assert analysis["effective"] is False


def check_changed(analysis: Analysis, delta_norm: float) -> None:
    weights = analysis["unet_weight_changes"]
    assert weights["delta_norm"] == pytest.approx(delta_norm, rel=1e-3)
    assert (weights["unexplained"], weights["not_as_predicted"]) == ([], [])


def test_the_original_is_unchanged_after_its_clones_were_used(host: Host) -> None:
    baseline = capture_lora_baseline(host.model, host.clip)
    model, clip = host.with_lora(host.model, host.clip)
    host.load(clip.patcher)
    check_unchanged(analysed(baseline, host.model, host.clip))
    host.load(model)
    assert host.delta_norm() > 0.1
    check_unchanged(analysed(baseline, host.model, host.clip))


def test_a_clone_is_compared_with_its_original_after_sampling(host: Host) -> None:
    model, _ = host.with_lora(host.model, host.clip)
    host.load(model)
    found = sigmascope.track_weight_modifications(host.model, model, "UNet")
    assert found["delta_norm"] == pytest.approx(host.delta_norm(), rel=1e-3)


@pytest.mark.parametrize("again", [False, True], ids=["the same clone", "loaded again"])
def test_a_second_run_finds_what_the_first_found(host: Host, again: bool) -> None:
    model, clip = host.with_lora(host.model, host.clip)
    host.load(model, clip.patcher)
    baseline = capture_lora_baseline(host.model, host.clip)
    second = host.with_lora(host.model, host.clip) if again else (model, clip)
    check_changed(analysed(baseline, *second), host.delta_norm())


def test_what_another_clone_merged_is_not_ones_own(host: Host) -> None:
    baseline = capture_lora_baseline(host.model, host.clip)
    model, clip = host.with_lora(host.model, host.clip)
    host.load(model)
    expected = host.delta_norm()
    for origin, strength in ((model, 0.5), (host.model, 0.3)):
        other, _ = host.with_lora(origin, None, strength)
        host.load(other)
        assert host.delta_norm() != pytest.approx(expected, rel=0.1)
        check_changed(analysed(baseline, model, clip), expected)


def test_a_baseline_taken_while_a_clone_is_merged_holds_after_unloading(host: Host) -> None:
    model, clip = host.with_lora(host.model, host.clip)
    host.load(model, clip.patcher)
    baseline = capture_lora_baseline(host.model, host.clip)
    host.management.unload_all_models()
    assert host.delta_norm() == 0.0
    check_unchanged(analysed(baseline, host.model, host.clip))


def test_strength_zero_changes_nothing_while_a_clone_is_loaded(host: Host) -> None:
    baseline = capture_lora_baseline(host.model, host.clip)
    host.load(host.with_lora(host.model, host.clip)[0])
    loader = host.comfy.module("nodes").LoraLoader()
    result = loader.load_lora(host.model, host.clip, "style.safetensors", 0, 0)
    check_unchanged(analysed(baseline, *result))


@pytest.mark.parametrize("clip_is_given", [True, False])
def test_the_loader_for_the_model_alone_leaves_nothing_out(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip_is_given: bool
) -> None:
    path = tmp_path / "style.safetensors"
    save_file(host.file, path)
    nodes = host.comfy.module("nodes")
    monkeypatch.setattr(nodes.folder_paths, "get_full_path_or_raise", lambda _kind, _name: str(path))
    clip = host.clip if clip_is_given else None
    baseline = capture_lora_baseline(host.model, clip, path)
    result = nodes.LoraLoaderModelOnly().load_lora_model_only(host.model, path.name, 0.8)
    found = analyze_lora_application_results(baseline, result[0], clip, result)
    assert {one["id"] for one in found["findings"]} == {"lora_registered_only", "lora_part_left_out"}
    assert found["success"] is True
    assert found["applied_verdict"] is not None
    assert found["applied_verdict"]["complete"] is True
