"""Layouts of the field's real architectures, made by diffusers and transformers on the meta device."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sigmascope.lora.families import ModelLayout, Part, family_misfit, layout_of

if TYPE_CHECKING:
    from torch import nn

Shapes = dict[str, tuple[int, ...]]
UNET: dict[str, Any] = {"block_out_channels": (320, 640), "layers_per_block": 1}
UNET_BLOCKS: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
XL_BLOCKS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "attention_head_dim": [5, 10],
}
XL_ADDED: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@cache
def made(name: str) -> Shapes:
    """Keys and shapes of an architecture: the families' own widths, few blocks."""
    import diffusers
    import transformers

    makers: dict[str, Callable[[], "nn.Module"]] = {
        "sd15": lambda: diffusers.UNet2DConditionModel(**UNET, **UNET_BLOCKS, cross_attention_dim=768),
        "sd2": lambda: diffusers.UNet2DConditionModel(
            **UNET, **UNET_BLOCKS, cross_attention_dim=1024, use_linear_projection=True
        ),
        "sdxl": lambda: diffusers.UNet2DConditionModel(
            **UNET, **XL_BLOCKS, **XL_ADDED, cross_attention_dim=2048
        ),
        "refiner": lambda: diffusers.UNet2DConditionModel(
            **UNET, **XL_BLOCKS, **XL_ADDED, cross_attention_dim=1280
        ),
        "lbm": lambda: diffusers.UNet2DConditionModel(**UNET, **XL_BLOCKS, cross_attention_dim=[320, 640]),
        "video": lambda: diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            num_attention_heads=(2, 2),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        ),
        "sd3": lambda: diffusers.SD3Transformer2DModel(num_layers=1),
        "sd35": lambda: diffusers.SD3Transformer2DModel(
            num_layers=1, qk_norm="rms_norm", dual_attention_layers=(0,)
        ),
        "flux": lambda: diffusers.FluxTransformer2DModel(
            num_layers=1, num_single_layers=1, guidance_embeds=True
        ),
        "wan": lambda: diffusers.WanTransformer3DModel(num_layers=1),
        "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(num_layers=1),
        "vae": lambda: diffusers.AutoencoderKL(),
        "wan_vae": lambda: diffusers.AutoencoderKLWan(),
        "clip": lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(num_hidden_layers=1)),
        "clip_projection": lambda: transformers.CLIPTextModelWithProjection(
            transformers.CLIPTextConfig(num_hidden_layers=1)
        ),
        "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(num_layers=1)),
    }
    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in makers[name]().state_dict().items()}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + key: shape for key, shape in shapes.items()}


def named(keys: Iterable[str]) -> Shapes:
    return {key: (28, 4) if key.endswith("linear1.weight") else (4, 4) for key in keys}


FAMILIES = ["sd15", "sd2", "sdxl", "sd3", "flux", "wan", "qwen_image"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_diffusers_denoiser_alone_is_recognised(family: str) -> None:
    assert layout_of(made(family)) == ModelLayout(family, "diffusers", {"denoiser": ""})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_diffusers_folder_is_recognised_with_its_parts(family: str) -> None:
    component = "unet." if family in {"sd15", "sd2", "sdxl"} else "transformer."
    shapes = (
        under("text_encoder.", made("clip"))
        | under("text_encoder_2.", made("t5"))
        | under("vae.", made("vae"))
        | under(component, made(family))
    )
    prefixes: dict[Part, str] = {
        "denoiser": component,
        "vae": "vae.",
        "text_encoder": "text_encoder.",
        "text_encoder_2": "text_encoder_2.",
    }
    assert layout_of(shapes) == ModelLayout(family, "diffusers", prefixes)


@pytest.mark.parametrize(("name", "family"), [("sd35", "sd3"), ("refiner", "sdxl")])
def test_a_later_model_of_a_family_is_recognised(name: str, family: str) -> None:
    assert layout_of(made(name)).family == family


def test_a_model_that_only_resembles_a_family_is_unknown() -> None:
    layout = layout_of(made("video"))
    assert layout.family == "unknown"
    assert layout.prefixes == {"denoiser": ""}


def test_an_lbm_checkpoint_has_a_denoiser_and_a_vae() -> None:
    shapes = under("denoiser.", made("lbm")) | under("vae.vae_model.", made("vae")) | {"num_iterations": ()}
    layout = layout_of(shapes)
    assert layout == ModelLayout("lbm", "lbm", {"denoiser": "denoiser.", "vae": "vae.vae_model."})
    assert layout.split("num_iterations") == ("other", "num_iterations")
    assert layout.split("vae.vae_model.encoder.conv_in.bias") == ("vae", "encoder.conv_in.bias")


@pytest.mark.parametrize(("is_linear", "family"), [(False, "sd15"), (True, "sd2")])
@pytest.mark.parametrize("context", [32, 64])
def test_a_small_unet_whose_text_is_as_wide_as_its_layers_is_no_lbm(
    context: int, is_linear: bool, family: str
) -> None:
    import diffusers

    small = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=context,
        attention_head_dim=8,
        use_linear_projection=is_linear,
    )
    assert layout_of({key: tuple(one.shape) for key, one in small.state_dict().items()}).family == family


def test_an_lbm_denoiser_taken_out_of_its_checkpoint_is_recognised() -> None:
    assert layout_of(made("lbm")) == ModelLayout("lbm", "diffusers", {"denoiser": ""})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("vae", "vae"),
        ("wan_vae", "vae"),
        ("clip", "text_encoder"),
        ("clip_projection", "text_encoder"),
        ("t5", "text_encoder"),
    ],
)
def test_a_component_alone_is_its_own_part(name: str, part: str) -> None:
    layout = layout_of(made(name))
    assert dict(layout.prefixes) == {part: ""}
    assert layout.family == "unknown"


SGM: dict[str, tuple[int, ...]] = {
    "input_blocks.0.0.weight": (320, 4, 3, 3),
    "time_embed.0.weight": (1280, 320),
    "out.2.weight": (4, 320, 3, 3),
}


def sgm(context: int, block: str = "input_blocks.1.1", *, added: bool = False) -> Shapes:
    """A few keys of a U-Net as CompVis and Stability AI publish it."""
    shapes = SGM | {f"{block}.transformer_blocks.0.attn2.to_k.weight": (320, context)}
    return shapes | ({"label_emb.0.0.weight": (1280, 2816)} if added else {})


@pytest.mark.parametrize(
    ("unet", "encoder", "family"),
    [
        (sgm(768), "cond_stage_model.transformer.", "sd15"),
        (sgm(1024), "cond_stage_model.model.", "sd2"),
        (sgm(1024, added=True), "cond_stage_model.model.", "sd2"),  # the unclip models
        (sgm(2048, "input_blocks.4.1", added=True), "conditioner.embedders.0.transformer.", "sdxl"),
    ],
)
def test_a_single_file_is_recognised_with_its_parts(unet: Shapes, encoder: str, family: str) -> None:
    shapes = (
        under("model.diffusion_model.", unet)
        | named(["first_stage_model.encoder.conv_in.weight", "alphas_cumprod", "denoiser.sigmas"])
        | named([encoder + "text_model.embeddings.token_embedding.weight"])
    )
    layout = layout_of(shapes)
    assert layout == ModelLayout(
        family,
        "sgm",
        {"denoiser": "model.diffusion_model.", "vae": "first_stage_model.", "text_encoder": encoder},
    )
    assert layout.split("alphas_cumprod")[0] == "other"


def test_the_second_text_encoder_of_a_single_file_is_found() -> None:
    keys = named(["conditioner.embedders.0.transformer.a", "conditioner.embedders.1.model.b"])
    prefixes = layout_of(under("model.diffusion_model.", sgm(2048, added=True)) | keys).prefixes
    assert prefixes["text_encoder"] == "conditioner.embedders.0.transformer."
    assert prefixes["text_encoder_2"] == "conditioner.embedders.1.model."


ORIGINAL = {
    "flux": [
        "img_in.weight",
        "vector_in.in_layer.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
    ],
    "sd3": ["x_embedder.proj.weight", "context_embedder.weight", "joint_blocks.0.x_block.attn.qkv.weight"],
    "wan": ["patch_embedding.weight", "head.modulation", "blocks.0.self_attn.q.weight"],
}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("family", ORIGINAL)
def test_a_family_s_own_keys_are_recognised_under_any_prefix(family: str, prefix: str) -> None:
    layout = layout_of(under(prefix, named(ORIGINAL[family])))
    assert layout == ModelLayout(family, "original", {"denoiser": prefix})


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own use of it
def test_models_that_share_names_with_flux_are_not_taken_for_it() -> None:
    """Keys and shapes of the files that FLUX.2 [dev] and HunyuanVideo were published in."""
    hunyuan: Shapes = {
        "img_in.proj.weight": (3072, 16, 1, 2, 2),
        "txt_in.individual_token_refiner.blocks.0.self_attn.qkv.weight": (9216, 3072),
        "vector_in.in_layer.weight": (3072, 768),
        "double_blocks.0.img_attn.qkv.weight": (9216, 3072),
        "double_blocks.0.img_mod.lin.weight": (18432, 3072),
        "single_blocks.0.linear1.weight": (21504, 3072),
    }
    flux2: Shapes = {
        "img_in.weight": (6144, 128),
        "double_stream_modulation_img.lin.weight": (36864, 6144),
        "double_blocks.0.img_attn.qkv.weight": (18432, 6144),
        "double_blocks.0.img_mlp.0.weight": (36864, 6144),
        "single_blocks.0.linear1.weight": (55296, 6144),
    }
    for shapes in (hunyuan, flux2):
        assert layout_of(under("model.diffusion_model.", shapes)).family == "unknown"
    # Were there keys of FLUX.1 beside them, FLUX.2's shapes would still tell
    shared: Shapes = {
        "vector_in.in_layer.weight": (6144, 768),
        "double_blocks.0.img_mod.lin.weight": (36864, 6144),
    }
    assert layout_of(flux2 | shared).family == "unknown"
    # Of a file with nothing but attention, the width does: 6144 of [dev], 4096 of [klein] 9B, FLUX.1's is 3072.
    for width, fits in ((6144, False), (4096, False), (3072, True)):
        for name in ("double_blocks.0.img_attn.qkv", "single_transformer_blocks.3.attn.to_q"):
            wrong = family_misfit("flux", {name: (3 * width if "qkv" in name else width, width)})
            assert (wrong is None) == fits
            assert fits or wrong == f"{name} reads {width} features, more than 3072"


@pytest.mark.parametrize(("family", "part"), [("flux", "text_encoder_2"), ("sd3", "text_encoder_3")])
def test_the_t5_encoder_is_the_one_that_the_family_counts_it_as(family: str, part: str) -> None:
    t5 = "text_encoders.t5xxl.transformer."
    clip = "text_encoders.clip_l.transformer."
    keys = named([f"{t5}shared.weight", f"{clip}text_model.embeddings.token_embedding.weight"])
    layout = layout_of(under("model.diffusion_model.", named(ORIGINAL[family])) | keys)
    assert dict(layout.prefixes) == {"denoiser": "model.diffusion_model.", "text_encoder": clip, part: t5}


def test_the_second_expert_of_a_folder_is_a_part() -> None:
    shapes = under("transformer.", made("wan")) | under("transformer_2.", made("wan"))
    layout = layout_of(shapes)
    assert layout.split("transformer_2.blocks.0.attn1.to_q.weight") == (
        "denoiser_2",
        "blocks.0.attn1.to_q.weight",
    )


def test_an_unknown_pipeline_still_has_its_parts() -> None:
    keys = ["transformer.layers.0.weight", "vae.encoder.weight", "text_encoder.layers.0.weight"]
    layout = layout_of(named(keys))
    assert layout.family == "unknown"
    assert [layout.split(key) for key in keys] == [
        ("denoiser", "layers.0.weight"),
        ("vae", "encoder.weight"),
        ("text_encoder", "layers.0.weight"),
    ]


@pytest.mark.parametrize("keys", [["layers.0.weight"], ["transformer.h.0.weight", "lm_head.weight"], []])
def test_an_unknown_model_is_one_part(keys: list[str]) -> None:
    layout = layout_of(named(keys))
    assert layout == ModelLayout("unknown", "unknown", {"denoiser": ""})
    assert all(layout.split(key) == ("denoiser", key) for key in keys)


def test_the_keys_of_a_single_file_unet_are_those_that_diffusers_converts() -> None:
    from diffusers.loaders import single_file_utils

    mapping = single_file_utils.DIFFUSERS_TO_LDM_MAPPING["unet"]
    assert SGM.keys() <= set(mapping["layers"].values())
    assert "label_emb.0.0.weight" in mapping["addition_embed_type"].values()


def test_wan_s_own_keys_are_those_that_diffusers_converts() -> None:
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    converted = convert_wan_transformer_to_diffusers({key: torch.zeros(1) for key in ORIGINAL["wan"]})
    assert converted.keys() <= made("wan").keys()
    assert "blocks.0.attn1.to_q.weight" in converted
