"""Strength 0, fusing, unfusing and two LoRAs on real pipelines: what the analysis says is what diffusers did."""

from pathlib import Path

import pytest
import torch
from tests.families import FAMILIES, generate
from tests.families.loras import half, modules_of, parts_of, write
from tests.families.styled import Styled, styled

from sigmascope.lora.applied_verdict import judge_applied
from sigmascope.probes.peft import read_adapters

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
WITH_ENCODER_AND_WITHOUT = pytest.mark.parametrize("own", ["flux", "wan"], indirect=True)


@pytest.fixture(params=["flux"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Styled:
    """For tests that change it."""
    return styled(
        request.param,
        tmp_path,
        leave_out=("up_blocks", "mid_block", *(f"down_blocks.{n}" for n in (1, 2, 3))),
    )


def test_strength_of_0_is_no_effective_change(own: Styled) -> None:
    own.pipeline.set_adapters(["style"], adapter_weights=[0.0])
    analysis = own.analysis()
    assert analysis["effective"] is False
    assert analysis["unet_weight_changes"]["keys_value_changed"] == {}
    assert [f["id"] for f in analysis["findings"] if f["severity"] == "warning"].count("lora_strength_zero")
    assert torch.equal(generate(own.pipeline, own.family), own.bare_image)


def test_strength_multiplies_the_change(own: Styled) -> None:
    own.pipeline.set_adapters(["style"], adapter_weights=[0.25])
    start = f"{FAMILIES[own.family].denoiser}."
    squares = [own.delta(m).square().sum() for m in modules_of(own.state) if m.startswith(start)]
    expected = 0.25 * float(sum(squares)) ** 0.5
    assert own.analysis()["unet_weight_changes"]["delta_norm"] == pytest.approx(expected, rel=1e-6)


def fuse(styled: Styled, scale: float = 1.0) -> None:
    styled.pipeline.fuse_lora(components=list(parts_of(styled.family)), lora_scale=scale)


@pytest.mark.parametrize("own", ["sd15", "wan"], indirect=True)
def test_fused_weights_are_base_and_scaled_product(own: Styled) -> None:
    originals = {module: own.weight(module).double().clone() for module in modules_of(own.state)}
    fuse(own, 0.5)
    for module, original in originals.items():
        expected = original + 0.5 * own.delta(module)
        torch.testing.assert_close(own.weight(module).double(), expected, rtol=0.0, atol=1e-6)


@WITH_ENCODER_AND_WITHOUT
def test_fused_changes_are_found_as_predicted(own: Styled) -> None:
    fuse(own)
    analysis = own.analysis()
    weights = analysis["unet_weight_changes"]
    assert analysis["unet_lora_patches"]["states"].keys() == {"merged"}
    assert len(weights["keys_value_changed"]) == analysis["unet_lora_patches"]["total_patched_keys"]
    assert not weights["not_as_predicted"]
    assert not weights["unexplained"]


def test_unfused_and_unloaded_is_drift_and_no_change(own: Styled) -> None:
    fuse(own)
    own.pipeline.unfuse_lora(components=list(parts_of(own.family)))
    own.pipeline.unload_lora_weights()
    analysis = own.analysis()
    weights = analysis["unet_weight_changes"]
    assert weights["keys_value_changed"] == {}
    assert weights["drift"]["keys"]
    assert weights["drift"]["largest_relative_change"] < 1e-5
    assert analysis["effective"] is False
    assert {f["severity"] for f in analysis["findings"] if f["id"] == "lora_drift"} == {"info"}


@WITH_ENCODER_AND_WITHOUT
def test_unloaded_is_as_before(own: Styled) -> None:
    own.pipeline.unload_lora_weights()
    weights = own.analysis()["unet_weight_changes"]
    assert (weights["keys_added"], weights["keys_removed"], weights["keys_value_changed"]) == ([], [], {})
    assert not weights["drift"]["keys"]


def test_lora_that_is_loaded_twice_is_named_and_overlaps_itself(own: Styled) -> None:
    own.pipeline.load_lora_weights(str(own.path), adapter_name="again")
    own.pipeline.set_adapters(["style", "again"])
    patches = own.analysis()["unet_lora_patches"]
    assert patches["loras"].keys() == {"style", "again"}
    assert [set(twice["sources"]) for twice in patches["applied_twice"]] == [{"style", "again"}]
    assert [pair["overall"] for pair in patches["overlaps"]] == [pytest.approx(1.0)]
    assert judge_applied(own.path, read_adapters(own.pipeline).value or (), own.pipeline).findings[0].id == (
        "lora_applied_twice"
    )


@pytest.mark.slow
def test_two_loras_in_orthogonal_directions_are_both_seen_and_do_not_overlap(
    own: Styled, tmp_path: Path
) -> None:
    own.pipeline.unload_lora_weights()
    for name in (0, 1):
        path = write(half(own.state, name), tmp_path / f"{name}.safetensors")
        own.pipeline.load_lora_weights(str(path), adapter_name=f"half{name}")
    own.pipeline.set_adapters(["half0", "half1"], adapter_weights=[0.5, 2.0])
    patches = own.analysis()["unet_lora_patches"]
    assert {name: facts["strengths"] for name, facts in patches["loras"].items()} == {
        "half0": [0.5],
        "half1": [2.0],
    }
    assert [pair["overall"] for pair in patches["overlaps"]] == [pytest.approx(0.0, abs=1e-9)]
