"""Every layer of the field's real architectures, made by diffusers and transformers on the meta device."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sigmascope.errors import LoraFormatError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, ModelLayout, UnetBlocks, row_of_diffusers, row_of_original
from sigmascope.lora.families.unet import SD_BLOCKS, SDXL_BLOCKS
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats import format_named
from sigmascope.lora.layer_names import blocks_of, to_diffusers, to_sgm
from sigmascope.lora.module_names import LayerIndex, flat, unflattened_denoiser, unflattened_text_encoder

if TYPE_CHECKING:
    from torch import nn

XL: dict[str, Any] = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
}
ADDED: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
UNETS = ["sd15", "sdxl", "lbm"]
TRANSFORMERS = ["flux", "sd3", "wan", "qwen_image"]


@cache
def layers(name: str) -> tuple[str, ...]:
    """Paths of the Linear and convolution layers of an architecture."""
    import diffusers
    import transformers

    makers: dict[str, Callable[[], "nn.Module"]] = {
        "sd15": lambda: diffusers.UNet2DConditionModel(cross_attention_dim=768),
        "sdxl": lambda: diffusers.UNet2DConditionModel(**XL, **ADDED, cross_attention_dim=2048),
        "lbm": lambda: diffusers.UNet2DConditionModel(**XL, cross_attention_dim=[320, 640, 1280]),
        "flux": lambda: diffusers.FluxTransformer2DModel(
            num_layers=2, num_single_layers=2, guidance_embeds=True
        ),
        "sd3": lambda: diffusers.SD3Transformer2DModel(
            num_layers=2, qk_norm="rms_norm", dual_attention_layers=(0,)
        ),
        "wan": lambda: diffusers.WanTransformer3DModel(num_layers=2, image_dim=1280, added_kv_proj_dim=5120),
        "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(num_layers=2),
        "clip": lambda: transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(num_hidden_layers=2)
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(num_layers=2, feed_forward_proj="gated-gelu")
        ),
    }
    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers' own use of what it deprecates
        return tuple(path for path, module in makers[name]().named_modules() if isinstance(module, kinds))


def lora_of(names: list[str], shape: tuple[int, int] = (2, 3)) -> LoraFile:
    factors = LoraFactors(torch.zeros(shape[0], 1), torch.zeros(1, shape[1]), 1.0, shape)
    return LoraFile(dict.fromkeys(names, factors))


def diffusers_layout(family: str) -> ModelLayout:
    prefix = "unet." if family in UNETS else "transformer."
    return ModelLayout(family, "diffusers", {"denoiser": prefix})


LBM = ModelLayout("lbm", "lbm", {"denoiser": "denoiser."})


def test_all_792_layers_of_an_lbm_have_one_name_each_in_every_format() -> None:
    for name in ("native", "kohya", "peft", "comfyui"):
        lora_format = format_named(name)
        names = [lora_format.name_for(f"denoiser.{layer}", LBM) for layer in layers("lbm")]
        assert len(names) == len(set(names)) == 792
        match = LayerIndex.of([f"denoiser.{layer}" for layer in layers("lbm")], LBM).match(lora_of(names))
        assert match.unmatched == ()
        assert [match.matched[name] for name in names] == [f"denoiser.{layer}" for layer in layers("lbm")]


@pytest.mark.parametrize(
    ("layer", "kohya", "peft", "comfyui"),
    [
        ("conv_in", "lora_unet_conv_in", "unet.conv_in", "diffusion_model.input_blocks.0.0"),
        (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0",
            "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0",
            "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0",
            "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_out.0",
        ),
        (
            "mid_block.resnets.1.time_emb_proj",
            "lora_unet_mid_block_resnets_1_time_emb_proj",
            "unet.mid_block.resnets.1.time_emb_proj",
            "diffusion_model.middle_block.2.emb_layers.1",
        ),
        (
            "up_blocks.0.upsamplers.0.conv",
            "lora_unet_up_blocks_0_upsamplers_0_conv",
            "unet.up_blocks.0.upsamplers.0.conv",
            "diffusion_model.output_blocks.2.2.conv",
        ),
    ],
)
def test_names_of_an_lbm_layer(layer: str, kohya: str, peft: str, comfyui: str) -> None:
    wanted = {"kohya": kohya, "peft": peft, "comfyui": comfyui, "native": f"denoiser.{layer}"}
    named = {name: format_named(name).name_for(f"denoiser.{layer}", LBM) for name in wanted}
    assert named == wanted


def test_kohya_names_sdxl_as_its_original_file_does() -> None:
    kohya = format_named("kohya")
    name = kohya.name_for("unet.down_blocks.1.resnets.0.conv1", diffusers_layout("sdxl"))
    assert name == "lora_unet_input_blocks_4_0_in_layers_2"


@pytest.mark.parametrize(("prefix", "start"), [("denoiser", "denoiser."), ("", "")])
def test_the_prefix_of_peft_names_can_be_chosen(prefix: str, start: str) -> None:
    assert format_named("peft").name_for("denoiser.conv_in", LBM, prefix=prefix) == f"{start}conv_in"


@pytest.mark.parametrize("family", UNETS)
def test_both_names_of_a_unets_layers_lead_to_each_other(family: str) -> None:
    paths = layers(family)
    blocks = blocks_of(paths)
    names = [to_sgm(path, blocks) for path in paths]
    sgm = [name for name in names if name is not None]
    assert len(set(sgm)) == len(paths)
    assert [to_diffusers(name, blocks) for name in sgm] == list(paths)
    assert blocks_of(sgm) == blocks == (SD_BLOCKS if family == "sd15" else SDXL_BLOCKS)


def test_a_small_unet_counts_its_blocks_by_its_own_layers() -> None:
    blocks = UnetBlocks(layers_per_block=1, attention=frozenset({0}))
    assert to_sgm("down_blocks.1.resnets.0.conv1", blocks) == "input_blocks.3.0.in_layers.2"
    assert to_sgm("up_blocks.1.upsamplers.0.conv", blocks) == "output_blocks.3.1.conv"


@pytest.mark.parametrize(
    "path", ["blocks.0.attn1.to_q", "mid_block.resnets.7.conv1", "down_blocks.0.resnets.0.gate"]
)
def test_layers_of_other_models_have_no_sgm_name(path: str) -> None:
    assert to_sgm(path) is None
    assert to_diffusers(path) is None


@pytest.mark.parametrize("family", UNETS)
def test_flat_names_of_unets_get_their_dots_back(family: str) -> None:
    paths = layers(family)
    blocks = blocks_of(paths)
    for path in (*paths, *(to_sgm(path, blocks) or "" for path in paths)):
        assert unflattened_denoiser(flat(path)) == path


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_every_layer_of_a_transformer_is_in_its_table(family: str) -> None:
    for path in layers(family):
        row = row_of_diffusers(family, path)
        assert row is not None, path
        assert row_of_original(family, row.original) == row
        assert unflattened_denoiser(flat(path)) is not None
        assert unflattened_denoiser(flat(row.original)) is not None
    originals = [row.original for row in FAMILIES[family].rows]
    assert len(set(originals)) == len(originals)


@pytest.mark.parametrize("encoder", ["clip", "t5"])
def test_flat_names_of_text_encoders_get_their_dots_back(encoder: str) -> None:
    for path in layers(encoder):
        assert unflattened_text_encoder(flat(path)) == path


def test_a_flat_name_of_no_known_model_stays_as_it_is() -> None:
    assert unflattened_denoiser("encoder_layer_3_gate_proj") is None


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.parametrize("naming", ["diffusers", "sgm"])
@pytest.mark.parametrize("name", ["kohya", "peft", "comfyui"])
def test_a_unets_lora_matches_the_model_in_either_naming(family: str, naming: str, name: str) -> None:
    paths = layers(family)
    blocks = blocks_of(paths)
    other = [f"model.diffusion_model.{to_sgm(path, blocks)}" for path in paths]
    layout = (
        diffusers_layout(family)
        if naming == "diffusers"
        else ModelLayout(family, "sgm", {"denoiser": "model.diffusion_model."})
    )
    model = [f"unet.{path}" for path in paths] if naming == "diffusers" else other
    lora_format, own = format_named(name), diffusers_layout(family)
    names = [lora_format.name_for(f"unet.{path}", own, blocks=blocks) for path in paths]
    match = LayerIndex.of(model, layout).match(lora_of(names))
    assert [match.matched.get(name) for name in names] == model


@pytest.mark.parametrize("family", ["wan", "qwen_image"])
@pytest.mark.parametrize("name", ["kohya", "peft", "comfyui"])
def test_a_transformers_lora_matches_the_model_in_either_naming(family: str, name: str) -> None:
    paths = layers(family)
    original = [row.original for path in paths if (row := row_of_diffusers(family, path)) is not None]
    lora_format, own = format_named(name), diffusers_layout(family)
    names = [lora_format.name_for(f"transformer.{path}", own) for path in paths]
    lora = lora_of(names)
    assert list(
        LayerIndex.of([f"transformer.{path}" for path in paths], own).match(lora).matched.values()
    ) == [f"transformer.{path}" for path in paths]
    single_file = ModelLayout(family, "original", {"denoiser": "model.diffusion_model."})
    model = [f"model.diffusion_model.{path}" for path in original]
    assert list(LayerIndex.of(model, single_file).match(lora).matched.values()) == model


def test_fused_matrices_of_the_other_naming_are_left_unmatched() -> None:
    paths = layers("flux")
    originals = dict.fromkeys(row.original for path in paths if (row := row_of_diffusers("flux", path)))
    index = LayerIndex.of([f"transformer.{path}" for path in paths], diffusers_layout("flux"))
    match = index.match(lora_of([f"lora_unet_{flat(path)}" for path in originals]))
    assert {name.rsplit("_", 1)[1] for name in match.unmatched} == {"qkv", "linear1"}
    assert match.matched["lora_unet_img_in"] == "transformer.x_embedder"


def test_rows_that_lie_the_other_way_round_are_left_unmatched() -> None:
    model, layout = ["transformer.norm_out.linear"], diffusers_layout("flux")
    name = "lora_unet_final_layer_adaLN_modulation_1"
    assert LayerIndex.of(model, layout).match(lora_of([name], (8, 4))).unmatched == (name,)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1", "text_encoder.text_model.encoder.layers.0.mlp.fc1"),
        ("text_encoder.text_model.encoder.layers.0.mlp.fc1", "text_encoder.encoder.layers.0.mlp.fc1"),
        (
            "lora_te2_text_model_encoder_layers_0_mlp_fc1",
            "conditioner.embedders.1.model.transformer.resblocks.0.mlp.c_fc",
        ),
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q", "t5.encoder.block.0.layer.0.SelfAttention.q"),
        ("text_encoders.clip_l.transformer.text_projection", "text_encoder.text_projection"),
    ],
)
def test_text_encoders_match_under_their_many_names(name: str, layer: str) -> None:
    layout = ModelLayout(
        "sdxl",
        "diffusers",
        {
            "denoiser": "unet.",
            "text_encoder": "text_encoder.",
            "text_encoder_2": "conditioner.embedders.1.model.",
            "text_encoder_3": "t5.",
        },
    )
    assert LayerIndex.of([layer], layout).match(lora_of([name])).matched == {name: layer}


def test_a_name_without_prefix_is_found_in_the_denoiser() -> None:
    assert LayerIndex.of(["unet.conv_in"], diffusers_layout("sdxl")).match(lora_of(["conv_in"])).matched == {
        "conv_in": "unet.conv_in"
    }


def test_a_model_of_no_known_family_matches_by_its_own_names() -> None:
    layout = ModelLayout("unknown", "unknown", {"denoiser": ""})
    names = ["lora_unet_blocks_0_attn_q", "diffusion_model.blocks.0.attn.k", "blocks.0.attn.v"]
    model = ["blocks.0.attn.q", "blocks.0.attn.k", "blocks.0.attn.v"]
    assert list(LayerIndex.of(model, layout).match(lora_of(names)).matched.values()) == model


def test_a_flat_name_that_could_be_two_layers_is_unmatched() -> None:
    layout = ModelLayout("unknown", "unknown", {"denoiser": ""})
    match = LayerIndex.of(["a.b_c", "a_b.c"], layout).match(lora_of(["lora_unet_a_b_c"]))
    assert match.unmatched == ("lora_unet_a_b_c",)


def test_a_layer_under_two_names_is_refused() -> None:
    with pytest.raises(LoraFormatError, match=r"lora_unet_conv_in and unet\.conv_in are both for"):
        LayerIndex.of(["denoiser.conv_in"], LBM).match(lora_of(["lora_unet_conv_in", "unet.conv_in"]))


def test_changes_of_biases_and_norms_are_matched_too() -> None:
    names = ["lora_unet_conv_in.bias", "unet.mid_block.resnets.0.norm1", "diffusion_model.out.0.bias"]
    model = ["denoiser.conv_in", "denoiser.mid_block.resnets.0.norm1", "denoiser.conv_norm_out"]
    match = LayerIndex.of(model, LBM).match(lora_of(names))
    assert list(match.matched.values()) == [f"{model[0]}.bias", model[1], f"{model[2]}.bias"]
