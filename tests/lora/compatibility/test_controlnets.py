"""LoRAs that are for a ControlNet, and files that are ControlNets themselves: each is called what it is."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from safetensors.torch import save_file
from tests.families import make_pipeline
from torch import Tensor, nn

import sigmascope
from sigmascope import convert_lora, judge_lora
from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.errors import LoraFormatError, SigmascopeError
from sigmascope.lora.hosts import host_readings

pytestmark = pytest.mark.filterwarnings("ignore:No LoRA keys", "ignore:Already found a `peft_config`")
_NEW = "controlnet_"  # layers that only the ControlNet has


@cache
def pipeline() -> Any:
    parts = make_pipeline("sd15").components
    torch.manual_seed(0)
    controlnet = ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 16))
    return StableDiffusionControlNetPipeline(**parts, controlnet=controlnet)


def factors(prefix: str, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
    """A LoRA of chosen layers of the ControlNet."""
    random, state = torch.Generator().manual_seed(0), {}
    for path, layer in pipeline().controlnet.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and chosen(path):
            outputs, *inputs = layer.weight.shape
            state[f"{prefix}{path}.lora_A.weight"] = torch.randn(2, *inputs, generator=random)
            state[f"{prefix}{path}.lora_B.weight"] = torch.randn(
                outputs, 2, *([1, 1] if len(inputs) > 1 else []), generator=random
            )
    return state


def saved(state: dict[str, Tensor], folder: Path) -> Path:
    save_file(state, folder / "lora.safetensors")
    return folder / "lora.safetensors"


FILES = {
    "with its name": ("controlnet.", lambda path: "attn" in path or _NEW in path),
    "its name alone tells": ("controlnet.", lambda path: "attn" in path),
    "its layers alone tell": ("", lambda path: "attn" in path or _NEW in path),
    "as PEFT saves": ("base_model.model.", lambda path: "attn" in path or _NEW in path),
}


@pytest.mark.parametrize("name", FILES)
def test_a_lora_for_a_controlnet_is_not_for_the_denoiser(name: str, tmp_path: Path) -> None:
    file = saved(factors(*FILES[name]), tmp_path)
    verdict = judge_lora(file, {"unet": pipeline().unet})
    assert verdict.reasons == {"controlnet": len(verdict.modules)}
    assert "all are for a ControlNet" in verdict.findings[0].message
    assert "pipe.controlnet.load_lora_adapter" in str(verdict.findings[0].advice)
    assert [reading.taken for reading in host_readings(file)] == [None, None, None]
    beside = judge_lora(file, {"controlnet": pipeline().controlnet})
    assert beside.fits


@pytest.mark.parametrize("name", FILES)
def test_a_pipelines_loader_puts_it_nowhere_and_the_watch_says_what_it_is_for(
    name: str, tmp_path: Path
) -> None:
    file = saved(factors(*FILES[name]), tmp_path)
    with sigmascope.watch(pipeline()) as watching:
        pipeline().load_lora_weights(file)
    assert not hasattr(pipeline().unet, "peft_config")
    said = headline(watching.record())
    assert "for a ControlNet" in said
    assert acting_lora(watching.record()) is None


@pytest.mark.parametrize("name", FILES)
def test_the_controlnets_own_loader_takes_it_and_the_watch_finds_all_of_it_there(
    name: str, tmp_path: Path
) -> None:
    prefix, _ = FILES[name]
    file = saved(factors(*FILES[name]), tmp_path)
    controlnet = pipeline().controlnet
    try:
        with sigmascope.watch(pipeline()) as watching:
            controlnet.load_lora_adapter(file, prefix=prefix.rstrip(".") or None)
        assert hasattr(controlnet, "peft_config")
    finally:
        controlnet.unload_lora()
    run = watching.record()
    told = [stage.facts["lora_application"] for stage in run.walk() if "lora_application" in stage.facts]
    assert [analysis["effective"] for analysis in told] == [True]
    assert not {finding["severity"] for finding in told[0]["findings"]} & {"error", "critical"}
    assert acting_lora(run) is not None


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("lora_controlnet", "a Control-LoRA"),
        ("lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight", "a ControlNet-LLLite"),
        ("controlnet_cond_embedding.conv_in.weight", "a ControlNet"),
        ("control_model.input_hint_block.0.weight", "a ControlNet"),
        ("image_proj.latents", "an IP-Adapter"),
        ("emb_params", "a textual inversion"),
        ("clip_g", "a textual inversion"),
    ],
)
def test_a_file_that_is_no_lora_is_called_what_it_is(key: str, what: str, tmp_path: Path) -> None:
    file = saved({key: torch.ones(2, 2)}, tmp_path)
    with pytest.raises(LoraFormatError, match=f"it is {what}") as raised:
        host_readings(file)
    assert raised.value.hint
    with pytest.raises(SigmascopeError, match=f"it is {what}"):
        convert_lora(file, tmp_path / "new.safetensors", "peft")
