from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, make_pipeline
from tests.probes.models.pipelines import read_only
from torch import nn

from sigmascope.probes.models import detect_architecture, pipeline_facts

KINDS = {
    "sd15": "UNet",
    "sdxl": "UNet",
    "flux": "MMDiT",
    "sd3": "MMDiT",
    "qwen_image": "MMDiT",
    "wan": "DiT",
    "wan_vace": "DiT",
}


def kind_of(model: object) -> str | None:
    found = detect_architecture(model).value
    return None if found is None else found.kind


def tree(*paths: str) -> nn.Module:
    """A module with linear layers at these paths."""
    root = nn.Module()
    for path in paths:
        here = root
        *parents, last = path.split(".")
        for name in parents:
            if name not in dict(here.named_children()):
                here.add_module(name, nn.Module())
            here = here.get_submodule(name)
        here.add_module(last, nn.Linear(2, 2))
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_is_known_from_its_pipeline_and_from_its_denoiser_alone(family: str) -> None:
    pipeline = read_only(family)
    denoiser = pipeline.components[FAMILIES[family].denoiser]
    assert kind_of(pipeline) == kind_of(denoiser) == KINDS[family]
    others = [part for name, part in pipeline.components.items() if part is not denoiser]
    assert [kind_of(part) for part in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("PixArtTransformer2DModel", "DiT"),
        ("AuraFlowTransformer2DModel", "MMDiT"),
        ("LTXVideoTransformer3DModel", "DiT"),
        ("CogVideoXTransformer3DModel", "DiT"),
        ("SanaTransformer2DModel", "DiT"),
        ("HunyuanVideoTransformer3DModel", "MMDiT"),
        ("UNet3DConditionModel", "UNet"),
    ],
)
def test_further_models_of_diffusers_are_known_without_their_weights(name: str, kind: str) -> None:
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, name)()
    assert kind_of(model) == kind


@pytest.mark.parametrize(
    ("paths", "kind"),
    [
        (("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_attn.qkv", "time_in.in_layer"), "MMDiT"),
        (("joint_blocks.0.x_block.attn.qkv", "joint_blocks.0.context_block.attn.qkv"), "MMDiT"),
        (("double_layers.0.attn.w1q", "double_layers.0.attn.w2q", "t_embedder.mlp.0"), "MMDiT"),
        (("double_stream_blocks.0.block.attn1.to_q", "double_stream_blocks.0.block.attn1.to_q_t"), "MMDiT"),
        (("input_blocks.0.0", "output_blocks.0.0", "time_embed.0"), "UNet"),
        (("blocks.0.self_attn.q", "blocks.0.cross_attn.q", "time_embedding.0"), "DiT"),
    ],
)
def test_the_models_own_names_in_comfyui_are_known(paths: tuple[str, ...], kind: str) -> None:
    base_model = nn.Module()
    base_model.add_module("diffusion_model", tree(*paths))
    assert kind_of(base_model) == kind
    assert kind_of(SimpleNamespace(model=base_model, patches={})) == kind


def test_a_name_decides_nothing() -> None:
    class FluxTransformer2DModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    assert kind_of(FluxTransformer2DModel()) is None


def test_a_text_model_of_attention_blocks_is_no_denoiser() -> None:
    reading = detect_architecture(tree("layers.0.self_attn.q_proj", "embed_tokens"))
    assert reading.value is None
    assert reading.reason is not None
    assert "no denoiser" in reading.reason


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_compiling_and_adapters_change_nothing() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    unet = read_only("sd15").unet
    assert kind_of(torch.compile(unet)) == "UNet"
    transformer = make_pipeline("flux").transformer
    inject_adapter_in_model(LoraConfig(target_modules=["add_q_proj", "to_q"], r=2), transformer)
    assert kind_of(transformer) == "MMDiT"


def test_the_evidence_names_a_block_and_counts() -> None:
    found = detect_architecture(read_only("flux")).value
    assert found is not None
    assert found.evidence.startswith("2 blocks")
    assert "transformer_blocks.0.attn" in found.evidence


@pytest.mark.parametrize("thing", [None, 3, "FluxTransformer2DModel", {}, nn.Linear(2, 2)])
def test_what_is_no_model_has_a_reason(thing: Any) -> None:
    assert detect_architecture(thing).reason is not None


def test_a_module_that_holds_unet_and_vae_is_a_unet() -> None:
    whole = nn.Module()
    pipe = read_only("sd15")
    whole.denoiser, whole.vae = pipe.unet, pipe.vae
    found = detect_architecture(whole).value
    assert found is not None
    assert (found.kind, found.evidence) == ("UNet", "8 blocks down and up again")


def test_a_controlnet_is_half_a_unet_and_no_denoiser() -> None:
    from diffusers import ControlNetModel

    pipe = read_only("sd15")
    controlnet = ControlNetModel.from_unet(pipe.unet)
    assert detect_architecture(controlnet).value is None
    facts = pipeline_facts({**pipe.components, "controlnet": controlnet})
    assert list(facts.of_role("denoiser")) == ["unet"]
