"""What became of the weights."""

import pytest
import torch
from tests.comfy_shapes.adapters import lora_adapter
from tests.comfy_shapes.modules import OUT, BaseModel, Q
from tests.comfy_shapes.patchers import ModelPatcher
from tests.stages.lora_targets import Apply, delta_norm, patches
from torch import nn

import sigmascope
from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline


def test_names_are_those_of_the_state_dict(apply: Apply, unet: ModelPatcher) -> None:
    names = list(unet.model.state_dict())
    found = apply(patches())["unet_weight_changes"]
    assert (found["keys_added"], found["keys_removed"]) == ([], [])
    assert sorted(found["keys_modified"]) == sorted(names)
    assert found["total_keys_original"] == found["total_keys_modified"] == len(names)
    assert found["weight_changes"][Q]["original_shape"] == "torch.Size([8, 8])"


def test_registered_changes_are_predicted(apply: Apply) -> None:
    found = apply(patches(), strength=0.5)
    changed = found["unet_weight_changes"]["keys_value_changed"]
    assert list(changed) == [Q]
    assert changed[Q]["delta_norm"] == pytest.approx(delta_norm(strength=0.5))
    assert (changed[Q]["predicted"], changed[Q]["content_changed"]) == (True, False)
    assert found["unet_lora_patches"]["states"] == {"registered": 1}


@pytest.mark.parametrize("lowvram", [False, True], ids=["merged", "low VRAM"])
def test_the_effect_is_the_same_however_it_is_applied(
    apply: Apply, unet: ModelPatcher, lowvram: bool
) -> None:
    weight = unet.model.state_dict()[Q].clone()
    found = apply(patches(), load=True, lowvram=lowvram)
    change = found["unet_weight_changes"]["keys_value_changed"][Q]
    assert change["delta_norm"] == pytest.approx(delta_norm(), rel=1e-5)
    assert change["relative_change"] == pytest.approx(delta_norm() / float(weight.norm()), rel=1e-5)
    assert change["predicted"] is lowvram
    assert change["measured_from"] == ("patches" if lowvram else "contents")
    assert found["unet_lora_patches"]["states"] == {"lazy" if lowvram else "merged": 1}
    assert found["unet_weight_changes"]["not_as_predicted"] == []


def test_only_what_is_new_since_the_baseline_counts(unet: ModelPatcher) -> None:
    unet.add_patches({Q: lora_adapter()}, 1.0)
    baseline = capture_lora_baseline(unet, None)
    second = unet.clone()
    second.add_patches({OUT: lora_adapter(6)}, 1.0)
    found = analyze_lora_application_results(baseline, second, None, (second, None))
    assert found["unet_changes"]["patches_added"] == 1
    assert list(found["unet_weight_changes"]["keys_value_changed"]) == [OUT]


def test_a_weight_written_by_somebody_else_is_unexplained(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    with torch.no_grad():
        unet.model.get_parameter(Q).mul_(1.5)
    found = analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["unet_weight_changes"]["unexplained"] == [Q]
    change = found["unet_weight_changes"]["keys_value_changed"][Q]
    assert change["measured_from"] == "sample"
    assert change["relative_change"] == pytest.approx(0.5)


def test_a_merge_that_is_not_what_the_changes_say_is_found(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    unet.add_patches({Q: lora_adapter()}, 1.0)
    unet.load()
    with torch.no_grad():
        unet.model.get_parameter(Q).add_(torch.ones(8, 8))
    found = analyze_lora_application_results(baseline, unet, None, (unet, None))
    assert found["unet_weight_changes"]["not_as_predicted"] == [Q]


def test_a_modules_own_original_gives_the_contents() -> None:
    before, after = BaseModel(), BaseModel()
    change = torch.randn(8, 8)
    with torch.no_grad():
        after.get_parameter(Q).add_(change)
    found = sigmascope.track_weight_modifications(before, after, "UNet")
    assert list(found["keys_value_changed"]) == [Q]
    assert found["keys_value_changed"][Q]["delta_norm"] == pytest.approx(float(change.norm()), rel=1e-5)
    assert found["keys_value_changed"][Q]["measured_from"] == "contents"
    assert [block["name"] for block in found["by_block"]] == ["mid_block"]


def test_a_baselines_part_stands_for_the_original(unet: ModelPatcher) -> None:
    baseline = capture_lora_baseline(unet, None)
    assert sigmascope.track_model_identity_changes(baseline["unet"], unet, "UNet")["model_cloned"] is False
    assert sigmascope.track_weight_modifications(baseline["unet"], unet, "UNet")["keys_value_changed"] == {}


def test_added_and_removed_weights_are_named() -> None:
    before, after = (
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False)),
    )
    found = sigmascope.track_weight_modifications(before, after, "UNet")
    assert found["keys_added"] == ["1.weight"]
    assert sigmascope.track_weight_modifications(after, before, "UNet")["keys_removed"] == ["1.weight"]


def test_other_dtypes_and_shapes_are_told() -> None:
    found = sigmascope.track_weight_modifications(nn.Linear(2, 2), nn.Linear(3, 2).half(), "UNet")
    assert found["weight_changes"]["weight"]["shape_changed"] is True
    assert found["weight_changes"]["weight"]["modified_shape"] == "torch.Size([2, 3])"
    assert found["weight_changes"]["bias"]["dtype_changed"] is True


def test_contents_can_be_limited_to_names(unet: ModelPatcher) -> None:
    assert capture_lora_baseline(unet, None, keys=[Q])["unet"]["fingerprinted_keys"] == 1
    assert capture_lora_baseline(unet, None, keys="none")["unet"]["fingerprinted_keys"] == 0


def test_what_is_merged_into_one_of_two_tied_weights_is_in_both() -> None:
    import peft

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    baseline = capture_lora_baseline(model, None)
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    peft.get_peft_model(model, config).merge_adapter()
    weights = analyze_lora_application_results(baseline, model, None, model)["unet_weight_changes"]
    assert weights["keys_value_changed"].keys() == {"0.weight", "1.weight"}
    assert weights["unexplained"] == []
