"""ComfyUI's clones share one model: whatever of them is loaded, each is compared by its own weights."""

import pytest
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import CLIP_Q, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.comfy_shapes.versions import CLIP
from tests.stages.lora_targets import Analysis, delta_norm

import sigmascope
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


def with_lora(unet: ModelPatcher, *seeds: int) -> ModelPatcher:
    clone = unet.clone()
    for seed in seeds:
        clone.add_patches({Q: lora_adapter(seed=seed)})
    return clone


def analysed(baseline: object, unet: ModelPatcher, clip: CLIP | None = None) -> Analysis:
    return dict(analyze_lora_application_results(baseline, unet, clip, (unet, clip)))


def delta(analysis: Analysis) -> float:
    change: float = analysis["unet_weight_changes"]["keys_value_changed"][Q]["delta_norm"]
    return change


def unchanged(analysis: Analysis) -> bool:
    weights = [analysis[f"{side}_weight_changes"] for side in ("unet", "clip")]
    assert [one["drift"]["keys"] for one in weights] == [[], []]
    return analysis["effective"] is False and not any(one["keys_value_changed"] for one in weights)


def test_the_original_is_unchanged_while_clones_are_loaded(unet: ModelPatcher, clip: CLIP) -> None:
    baseline = capture_lora_baseline(unet, clip)
    new_unet, new_clip = with_lora(unet, 0), clip.clone()
    new_clip.add_patches({CLIP_Q: lora_adapter(seed=5)})
    new_clip.patcher.load()
    assert unchanged(analysed(baseline, unet, clip))
    new_unet.load()
    assert unchanged(analysed(baseline, unet, clip))


def test_two_clones_are_compared_after_sampling(unet: ModelPatcher) -> None:
    loaded = with_lora(unet, 0)
    loaded.load()
    found = sigmascope.track_weight_modifications(unet, loaded, "UNet")["keys_value_changed"]
    assert found[Q]["delta_norm"] == pytest.approx(delta_norm(), rel=1e-5)
    assert found[Q]["measured_from"] == "contents"
    assert sigmascope.track_weight_modifications(unet, unet.clone(), "UNet")["keys_value_changed"] == {}


@pytest.mark.parametrize("again", [False, True], ids=["the same clone", "a new clone"])
def test_a_second_run_finds_what_the_first_found(unet: ModelPatcher, again: bool) -> None:
    loaded = with_lora(unet, 0)
    loaded.load()
    baseline = capture_lora_baseline(unet, None)
    found = analysed(baseline, with_lora(unet, 0) if again else loaded)
    assert delta(found) == pytest.approx(delta_norm(), rel=1e-5)
    assert found["unet_weight_changes"]["not_as_predicted"] == []
    assert found["unet_weight_changes"]["unexplained"] == []


@pytest.mark.parametrize("child", [False, True], ids=["another clone", "a clone of it"])
def test_what_another_clone_merged_is_not_ones_own(unet: ModelPatcher, child: bool) -> None:
    baseline = capture_lora_baseline(unet, None)
    first = with_lora(unet, 0)
    (with_lora(first, 5) if child else with_lora(unet, 0, 5)).load()
    found = analysed(baseline, first)
    assert delta(found) == pytest.approx(delta_norm(), rel=1e-5)
    assert found["unet_weight_changes"]["unexplained"] == []
    assert found["unet_weight_changes"]["not_as_predicted"] == []


def test_a_parents_merge_is_a_part_of_its_clones_change(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    first = with_lora(unet, 0)
    both = with_lora(first, 5)
    expected = delta(analysed(baseline, both))
    first.load()
    assert delta(analysed(baseline, both)) == pytest.approx(expected, rel=1e-5)


def test_a_baseline_taken_while_a_clone_is_merged_holds_after_unloading(unet: ModelPatcher) -> None:
    loaded = with_lora(unet, 0)
    loaded.load()
    baselines = capture_lora_baseline(unet, None), capture_lora_baseline(loaded, None)
    loaded.unpatch_model()
    assert unchanged(analysed(baselines[0], unet))
    assert unchanged(analysed(baselines[1], loaded))


def test_strength_zero_changes_nothing_while_a_clone_is_loaded(unet: ModelPatcher, clip: CLIP) -> None:
    baseline = capture_lora_baseline(unet, clip)
    with_lora(unet, 0).load()
    assert unchanged(analysed(baseline, unet, clip))


def test_only_the_second_lora_counts_for_a_baseline_with_the_first(unet: ModelPatcher) -> None:
    first = with_lora(unet, 0)
    first.load()
    baseline = capture_lora_baseline(first, None)
    first.unpatch_model()
    both = with_lora(first, 5)
    both.load()
    assert delta(analysed(baseline, both)) == pytest.approx(delta_norm(seed=5), rel=1e-5)
