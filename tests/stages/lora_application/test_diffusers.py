"""PEFT's adapters in a real pipeline of diffusers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from torch import Tensor

from sigmascope.stages.lora_application import (
    analyze_lora_application_results,
    analyze_lora_patches,
    capture_lora_baseline,
)

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
TARGETS = ["to_q", "to_v"]
KEY = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"


@pytest.fixture
def pipeline() -> Any:
    return make_pipeline("sd15")


def inject(unet: Any, name: str = "style", **options: Any) -> None:
    from peft import LoraConfig

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)
    unet.add_adapter(config, name)


def delta(unet: Any, key: str = KEY, name: str = "style") -> Tensor:
    """What PEFT itself says that the adapter adds to a weight."""
    found: Tensor = unet.get_submodule(key.removesuffix(".weight")).get_delta_weight(name)
    return found.detach()


Analyse = Callable[[], dict[str, Any]]


@pytest.fixture
def analyse(pipeline: Any) -> Analyse:
    """The U-Net's analysis against its state before the test."""
    baseline = capture_lora_baseline(pipeline.unet, pipeline)

    def run() -> dict[str, Any]:
        return dict(analyze_lora_application_results(baseline, pipeline.unet, pipeline, pipeline))

    return run


def test_an_adapter_is_told_with_its_effect(pipeline: Any, analyse: Analyse) -> None:
    weight = pipeline.unet.get_parameter(KEY).detach().clone()
    inject(pipeline.unet)
    found = analyse()
    norm = float(delta(pipeline.unet).norm())
    change = found["unet_weight_changes"]["keys_value_changed"][KEY]
    assert change["delta_norm"] == pytest.approx(norm, rel=1e-5)
    assert change["relative_change"] == pytest.approx(norm / float(weight.norm()), rel=1e-5)
    assert (change["predicted"], change["content_changed"]) == (True, False)
    assert found["unet_lora_patches"]["loras"]["style"]["ranks"] == {
        4: found["unet_changes"]["patches_added"]
    }


def test_names_stay_those_without_adapters(pipeline: Any, analyse: Analyse) -> None:
    before = set(pipeline.unet.state_dict())
    inject(pipeline.unet)
    found = analyse()["unet_weight_changes"]
    assert set(found["keys_modified"]) == before
    assert found["keys_removed"] == []
    assert all("lora_" in key for key in found["keys_added"])
    assert found["total_keys_modified"] == len(pipeline.unet.state_dict())
    assert found["keys_wrapped"] == sum(".base_layer." in key for key in pipeline.unet.state_dict())


def test_fused_it_is_the_same_change(pipeline: Any, analyse: Analyse) -> None:
    weight = pipeline.unet.get_parameter(KEY).detach().clone()
    inject(pipeline.unet)
    norm = float(delta(pipeline.unet).norm())
    pipeline.unet.fuse_lora()
    found = analyse()["unet_weight_changes"]
    change = found["keys_value_changed"][KEY]
    assert change["content_changed"] is True
    assert change["delta_norm"] == pytest.approx(norm, rel=1e-5)
    assert change["relative_change"] == pytest.approx(norm / float(weight.norm()), rel=1e-4)
    assert change["sampled_delta_norm"] == pytest.approx(norm, rel=1e-4)
    assert (found["not_as_predicted"], found["unexplained"], found["drift"]["keys"]) == ([], [], [])


def test_drift_of_unfusing_is_told_and_called_no_change(pipeline: Any, analyse: Analyse) -> None:
    inject(pipeline.unet)
    pipeline.unet.fuse_lora()
    pipeline.unet.unfuse_lora()
    pipeline.unet.delete_adapters("style")
    found = analyse()
    drift = found["unet_weight_changes"]["drift"]
    assert KEY in drift["keys"]
    assert 0.0 < drift["largest_relative_change"] < 1e-6
    assert found["unet_weight_changes"]["keys_value_changed"] == {}
    assert found["effective"] is False
    assert "lora_drift" in {finding["id"] for finding in found["findings"]}


def test_a_fused_lora_whose_adapter_is_gone_is_unexplained(pipeline: Any, analyse: Analyse) -> None:
    inject(pipeline.unet)
    norm = float(delta(pipeline.unet).norm())
    pipeline.unet.fuse_lora()
    pipeline.unload_lora_weights()
    found = analyse()["unet_weight_changes"]
    assert KEY in found["unexplained"]
    assert found["keys_value_changed"][KEY]["measured_from"] == "sample"
    assert found["keys_value_changed"][KEY]["delta_norm"] == pytest.approx(norm, rel=1e-4)


def test_scale_0_has_no_effect(pipeline: Any, analyse: Analyse) -> None:
    inject(pipeline.unet)
    pipeline.unet.set_adapters(["style"], [0.0])
    found = analyse()
    assert found["unet_weight_changes"]["keys_value_changed"] == {}
    assert found["unet_lora_patches"]["states"] == {"inactive": found["unet_changes"]["patches_added"]}


def test_two_adapters_add_up(pipeline: Any, analyse: Analyse) -> None:
    inject(pipeline.unet, "one")
    inject(pipeline.unet, "two")
    pipeline.unet.set_adapters(["one", "two"], [0.5, 2.0])
    both = delta(pipeline.unet, name="one") + delta(pipeline.unet, name="two")  # with their strengths in it
    found = analyse()
    change = found["unet_weight_changes"]["keys_value_changed"][KEY]
    assert list(found["unet_lora_patches"]["loras"]) == ["one", "two"]
    assert change["delta_norm"] == pytest.approx(float(both.norm()), rel=1e-5)


def test_dora_is_told_by_its_name(pipeline: Any, analyse: Analyse) -> None:
    inject(pipeline.unet, use_dora=True)
    found = analyse()
    assert found["unet_lora_patches"]["patch_details"][KEY]["adapter_type"] == "dora"
    assert found["unet_weight_changes"]["keys_value_changed"][KEY]["delta_norm"] > 0


def test_an_adapter_on_the_text_encoder_is_the_clips(pipeline: Any, analyse: Analyse) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    pipeline.text_encoder.add_adapter(config, "words")
    found = analyse()
    assert found["unet_lora_patches"]["total_patched_keys"] == 0
    assert found["clip_lora_patches"]["loras"]["words"]["keys"] == found["clip_changes"]["patches_added"] > 0


def test_a_model_on_another_device_has_not_changed() -> None:
    unet = make_pipeline("sd15").unet
    baseline = capture_lora_baseline(unet, None)
    found = analyze_lora_application_results(
        baseline, unet.to("cpu", memory_format=torch.channels_last), None, 1
    )
    assert found["unet_weight_changes"]["keys_value_changed"] == {}


def test_a_file_that_loads_nothing_is_named(pipeline: Any, analyse: Analyse, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    factors = {"lora_A": torch.randn(4, 8), "lora_B": torch.randn(8, 4)}
    save_file({f"transformer.blocks.0.to_q.{name}.weight": value for name, value in factors.items()}, path)
    baseline = capture_lora_baseline(pipeline.unet, pipeline, path)
    pipeline.load_lora_weights(path)
    found = analyze_lora_application_results(baseline, pipeline.unet, pipeline, pipeline)
    ids = {finding["id"] for finding in found["findings"]}
    assert (found["lora_application_success"], found["effective"], found["success"]) == (True, False, False)
    assert "lora_not_loaded" in ids
    assert found["verdict"] is not None
    assert found["verdict"]["matched_modules"] == 0


def test_images_are_the_same_bit_for_bit_with_and_without_the_monitor() -> None:
    plain, watched = make_pipeline("sd15"), make_pipeline("sd15")
    inject(plain.unet)
    baseline = capture_lora_baseline(watched.unet, watched)
    inject(watched.unet)
    analyze_lora_application_results(baseline, watched.unet, watched, watched)
    assert analyze_lora_patches(watched, "UNet")["total_patched_keys"]
    assert torch.equal(generate(watched, "sd15"), generate(plain, "sd15"))
