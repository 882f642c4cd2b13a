"""PEFT's adapters in a real pipeline of diffusers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, write
from torch import Tensor, nn

from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    analyze_lora_patches,
    capture_lora_baseline,
)

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
TARGETS = ["to_q", "to_v"]
KEY = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"


def inject(unet: Any, name: str = "style", **options: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)
    unet.add_adapter(config, name)


def delta(unet: Any, name: str = "style") -> Tensor:
    """What PEFT itself says that the adapter adds to a weight, with its strength in it."""
    found: Tensor = unet.get_submodule(KEY.removesuffix(".weight")).get_delta_weight(name)
    return found.detach()


@dataclass
class Story:
    """What was done to one U-Net, adapter by adapter: each time the analysis against its state before all."""

    keys: set[str]
    norm: float
    analyses: dict[str, dict[str, Any]] = field(default_factory=dict)
    deltas: dict[str, float] = field(default_factory=dict)
    keys_with_adapter: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def story() -> Story:
    from peft import LoraConfig

    pipeline = make_pipeline("sd15")
    unet = pipeline.unet
    told = Story(set(unet.state_dict()), float(unet.get_parameter(KEY).norm()))
    baseline = capture_lora_baseline(unet, pipeline)

    def analyse(chapter: str) -> None:
        told.analyses[chapter] = dict(analyze_lora_application_results(baseline, unet, pipeline, pipeline))

    inject(unet, use_dora=True)
    analyse("dora")
    unet.unload_lora()
    inject(unet, "one")
    inject(unet, "two")
    unet.set_adapters(["one", "two"], [0.5, 2.0])
    told.deltas["two"] = float((delta(unet, "one") + delta(unet, "two")).norm())
    analyse("two")
    unet.unload_lora()
    inject(unet)
    told.deltas["style"] = float(delta(unet).norm())
    told.keys_with_adapter = list(unet.state_dict())
    analyse("injected")
    unet.set_adapters(["style"], [0.0])
    analyse("at scale 0")
    unet.set_adapters(["style"], [1.0])
    unet.fuse_lora()
    analyse("fused")
    unet.unfuse_lora()
    unet.delete_adapters("style")
    analyse("unfused")
    unet.unload_lora()
    inject(unet)
    unet.fuse_lora()
    pipeline.unload_lora_weights()
    analyse("fused, and the adapter gone")
    words = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    pipeline.text_encoder.add_adapter(words, "words")
    analyse("on the text encoder")
    return told


def test_an_adapter_is_told_with_its_effect(story: Story) -> None:
    found, norm = story.analyses["injected"], story.deltas["style"]
    change = found["unet_weight_changes"]["keys_value_changed"][KEY]
    assert change["delta_norm"] == pytest.approx(norm, rel=1e-5)
    assert change["relative_change"] == pytest.approx(norm / story.norm, rel=1e-5)
    assert (change["predicted"], change["content_changed"]) == (True, False)
    assert found["unet_lora_patches"]["loras"]["style"]["ranks"] == {
        4: found["unet_changes"]["patches_added"]
    }


def test_names_stay_those_without_adapters(story: Story) -> None:
    found = story.analyses["injected"]["unet_weight_changes"]
    assert set(found["keys_modified"]) == story.keys
    assert found["keys_removed"] == []
    assert all("lora_" in key for key in found["keys_added"])
    assert found["total_keys_modified"] == len(story.keys_with_adapter)
    assert found["keys_wrapped"] == sum(".base_layer." in key for key in story.keys_with_adapter)


def test_fused_it_is_the_same_change(story: Story) -> None:
    found, norm = story.analyses["fused"]["unet_weight_changes"], story.deltas["style"]
    change = found["keys_value_changed"][KEY]
    assert change["content_changed"] is True
    assert change["delta_norm"] == pytest.approx(norm, rel=1e-5)
    assert change["relative_change"] == pytest.approx(norm / story.norm, rel=1e-4)
    assert change["sampled_delta_norm"] == pytest.approx(norm, rel=1e-4)
    assert (found["not_as_predicted"], found["unexplained"], found["drift"]["keys"]) == ([], [], [])


def test_drift_of_unfusing_is_told_and_called_no_change(story: Story) -> None:
    found = story.analyses["unfused"]
    drift = found["unet_weight_changes"]["drift"]
    assert KEY in drift["keys"]
    assert 0.0 < drift["largest_relative_change"] < 1e-6
    assert found["unet_weight_changes"]["keys_value_changed"] == {}
    assert found["effective"] is False
    told = {finding["id"]: finding["message"] for finding in found["findings"]}
    assert "lora_drift" in told
    assert "No weight of the models changed," not in " ".join(told.values())


def test_no_loader_is_blamed_for_a_file_that_was_fused_and_unfused(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    state = lora_state(pipeline, ("unet",), rank=4, only="attn1.to_q")
    file = write(state, tmp_path / "style.safetensors")
    baseline = capture_lora_baseline(pipeline.unet, pipeline.text_encoder, file)
    pipeline.load_lora_weights(file)
    pipeline.fuse_lora()
    pipeline.unfuse_lora()
    pipeline.unload_lora_weights()
    models = (pipeline.unet, pipeline.text_encoder)
    found = analyze_lora_application_results(baseline, *models, models)
    told = {finding["id"]: finding["message"] for finding in found["findings"]}
    assert "lora_drift" in told
    assert "load_lora_adapter" not in " ".join(told.values())


def test_a_fused_lora_whose_adapter_is_gone_is_unexplained(story: Story) -> None:
    found = story.analyses["fused, and the adapter gone"]["unet_weight_changes"]
    assert KEY in found["unexplained"]
    assert found["keys_value_changed"][KEY]["measured_from"] == "sample"
    assert found["keys_value_changed"][KEY]["delta_norm"] == pytest.approx(story.deltas["style"], rel=1e-4)


def test_scale_0_has_no_effect(story: Story) -> None:
    found = story.analyses["at scale 0"]
    assert found["unet_weight_changes"]["keys_value_changed"] == {}
    assert found["unet_lora_patches"]["states"] == {"inactive": found["unet_changes"]["patches_added"]}


def test_two_adapters_add_up(story: Story) -> None:
    found = story.analyses["two"]
    change = found["unet_weight_changes"]["keys_value_changed"][KEY]
    assert list(found["unet_lora_patches"]["loras"]) == ["one", "two"]
    assert change["delta_norm"] == pytest.approx(story.deltas["two"], rel=1e-5)


def test_dora_is_told_by_its_name(story: Story) -> None:
    found = story.analyses["dora"]
    assert found["unet_lora_patches"]["patch_details"][KEY]["adapter_type"] == "dora"
    assert found["unet_weight_changes"]["keys_value_changed"][KEY]["delta_norm"] > 0


def test_an_adapter_on_the_text_encoder_is_the_clips(story: Story) -> None:
    found = story.analyses["on the text encoder"]
    assert found["unet_lora_patches"]["total_patched_keys"] == 0
    assert found["clip_lora_patches"]["loras"]["words"]["keys"] == found["clip_changes"]["patches_added"] > 0


def test_weights_in_another_order_in_memory_have_not_changed() -> None:
    unet = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3))
    baseline = capture_lora_baseline(unet, None)
    moved: Any = unet
    moved.to("cpu", memory_format=torch.channels_last)
    found = analyze_lora_application_results(baseline, unet, None, 1)
    assert found["unet_weight_changes"]["keys_value_changed"] == {}


def test_images_are_the_same_bit_for_bit_with_and_without_the_monitor() -> None:
    plain, watched = make_pipeline("sd15"), make_pipeline("sd15")
    inject(plain.unet)
    baseline = capture_lora_baseline(watched.unet, watched)
    inject(watched.unet)
    analyze_lora_application_results(baseline, watched.unet, watched, watched)
    assert analyze_lora_patches(watched, "UNet")["total_patched_keys"]
    assert torch.equal(generate(watched, "sd15"), generate(plain, "sd15"))
