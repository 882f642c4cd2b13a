"""LoRAs that were fused and then unloaded, as diffusers' guide has it: no adapter tells of them any more."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.loras import lora_state, write

from sigmascope.stages.lora_application import analyze_lora_application_results, capture_lora_baseline

pytestmark = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`", "ignore:Adapter cannot be set when the model is merged"
)


def fused(folder: Path, *, scale: float = 1.0, others: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The analysis of a LoRA that was fused, with others beside it, and unloaded."""
    pipeline = make_pipeline("sd15").to(dtype)
    parts = ("unet", "text_encoder")
    state = lora_state(pipeline, ("unet",), only="mid_block") | lora_state(pipeline, ("text_encoder",))
    beside = [lora_state(pipeline, parts, seed=seed, only="to_") for seed in range(1, 1 + others)]
    paths = [
        write(factors, folder / f"{number}.safetensors") for number, factors in enumerate([state, *beside])
    ]
    baseline = capture_lora_baseline(pipeline.unet, pipeline.text_encoder, paths[0])
    for number, path in enumerate(paths):
        pipeline.load_lora_weights(str(path), adapter_name=f"lora{number}")
    pipeline.set_adapters([f"lora{number}" for number in range(len(paths))])
    pipeline.fuse_lora(components=list(parts), lora_scale=scale)
    pipeline.unload_lora_weights()
    return analyze_lora_application_results(baseline, pipeline.unet, pipeline.text_encoder, pipeline)


@pytest.fixture(scope="module")
def at_half_strength(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The analysis of one LoRA, fused at half its strength."""
    return fused(tmp_path_factory.mktemp("fused"), scale=0.5)


def test_it_is_found_in_the_weights_whole(at_half_strength: Any) -> None:
    analysis = at_half_strength
    assert analysis["applied_verdict"]["complete"]
    assert analysis["applied_verdict"]["states"] == {"merged": analysis["applied_verdict"]["total_modules"]}
    assert analysis["success"]
    assert analysis["findings"] == []


def test_what_it_explains_is_no_longer_unexplained(at_half_strength: Any) -> None:
    analysis = at_half_strength
    assert analysis["unet_weight_changes"]["keys_value_changed"]
    assert analysis["unet_weight_changes"]["unexplained"] == []
    assert analysis["clip_weight_changes"]["unexplained"] == []


def test_its_strength_is_that_of_the_fusing(at_half_strength: Any) -> None:
    assert set(at_half_strength["applied_verdict"]["strengths"]) == {0.5}


@pytest.mark.slow
def test_it_is_found_beside_others_and_in_bfloat16(tmp_path: Path) -> None:
    verdict = fused(tmp_path, others=1, dtype=torch.bfloat16)["applied_verdict"]
    assert (
        verdict["modules_there"] > 0.95 * verdict["total_modules"]
    )  # not in the smallest, of 8 × 8 elements


def test_another_lora_is_not_found_in_them(tmp_path: Path) -> None:
    pipeline = make_pipeline("sd15")
    state, other_state = (lora_state(pipeline, ("unet",), seed=seed, only="mid_block") for seed in (0, 5))
    path, other = (
        write(state, tmp_path / "own.safetensors"),
        write(other_state, tmp_path / "other.safetensors"),
    )
    baseline = capture_lora_baseline(pipeline.unet, None, path)
    pipeline.load_lora_weights(str(other))
    pipeline.fuse_lora(components=["unet"])
    pipeline.unload_lora_weights()
    analysis = analyze_lora_application_results(baseline, pipeline.unet, None, pipeline)
    verdict = analysis["applied_verdict"] or {}
    assert verdict["modules_there"] < 0.1 * verdict["total_modules"]
    assert analysis["unet_weight_changes"]["unexplained"]
    assert not analysis["success"]


TWICE = {
    "fused and loaded again": ("fuse, unload, load", {"lora_applied_twice"}),
    "fused, unfused and loaded again": ("fuse, unfuse, unload, load", set()),
    "fused and loaded again at -1": ("fuse, unload, load, set -1", {"lora_cancelled"}),
    "fused, kept and both set": ("fuse, load, set both", {"lora_applied_twice"}),
}
OF_TWO = {"lora_applied_twice", "lora_cancelled", "lora_opposed", "lora_without_effect"}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("since", ["bare", "fused"])
def test_a_file_that_was_fused_and_loaded_again_is_told_as_what_it_does(
    name: str, since: str, tmp_path: Path
) -> None:
    pipeline = make_pipeline("sd15")
    bare = generate(pipeline, "sd15", num_inference_steps=1)
    path = str(write(lora_state(pipeline, ("unet",), size=0.3), tmp_path / "style.safetensors"))
    pipeline.load_lora_weights(path, adapter_name="once")
    once = generate(pipeline, "sd15", num_inference_steps=1)
    pipeline.unload_lora_weights()
    acts = {
        "fuse": lambda: pipeline.fuse_lora(),
        "unfuse": lambda: pipeline.unfuse_lora(),
        "unload": lambda: pipeline.unload_lora_weights(),
        "load": lambda: pipeline.load_lora_weights(path, adapter_name="b"),
        "set -1": lambda: pipeline.set_adapters(["b"], [-1.0]),
        "set both": lambda: pipeline.set_adapters(["a", "b"]),
    }
    program, says = TWICE[name]
    baseline = capture_lora_baseline(pipeline.unet, None, path)
    pipeline.load_lora_weights(path, adapter_name="a")
    for number, act in enumerate(program.split(", ")):
        acts[act]()
        if number == 0 and since == "fused":
            baseline = capture_lora_baseline(pipeline.unet, None, path)
    found = analyze_lora_application_results(baseline, pipeline.unet, None, pipeline)
    picture = generate(pipeline, "sd15", num_inference_steps=1)
    is_nothing = torch.allclose(picture, bare, atol=1e-5)
    is_once = torch.allclose(picture, once, atol=1e-5)
    assert (is_nothing, is_once) == ("lora_cancelled" in says, not says)
    told = {one["id"] for one in found["findings"]} & OF_TWO
    if since == "bare":
        assert found["effective"] is not is_nothing
        assert told == says
    else:  # what was in the weights then is not what changed
        assert told <= says
