"""Shapes of published models: every weight at its real size, by diffusers' path; made on the meta device.

Sizes are the defaults of diffusers' classes, where these are a published model's; else those of the model's `config.json`
on the Hugging Face hub, or of the configurations that diffusers' scripts convert checkpoints with (`scripts/convert_*`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import nn

Shapes = dict[str, tuple[int, ...]]


class Published(NamedTuple):
    """A published model.

    Attributes:
        family: As Sigmascope calls it.
        make: The model with few blocks, of the package diffusers.
        blocks: How many it really has, by the list's name.
    """

    family: str
    make: Callable[[Any], nn.Module]
    blocks: dict[str, int]


def _flux_blocks(double: int, single: int) -> dict[str, int]:
    return {"transformer_blocks": double, "single_transformer_blocks": single}


Z_IMAGE: Final = {"layers": 30, "noise_refiner": 2, "context_refiner": 2}
FEW: Final[dict[str, Any]] = {"num_layers": 1, "num_single_layers": 1}
XL_BLOCKS: Final[dict[str, Any]] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
}
XL_ADDED: Final[dict[str, Any]] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
COSMOS2: Final[dict[str, Any]] = {"extra_pos_embed_type": None}
MODELS: Final = {
    "sd15": Published("sd15", lambda d: d.UNet2DConditionModel(cross_attention_dim=768), {}),
    "sd21": Published(
        "sd2",
        lambda d: d.UNet2DConditionModel(
            cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True
        ),
        {},
    ),
    "sdxl": Published(
        "sdxl",
        lambda d: d.UNet2DConditionModel(**XL_BLOCKS, **XL_ADDED, cross_attention_dim=2048),
        {},
    ),
    "lbm": Published(
        "lbm", lambda d: d.UNet2DConditionModel(**XL_BLOCKS, cross_attention_dim=[320, 640, 1280]), {}
    ),
    "flux1": Published(
        "flux", lambda d: d.FluxTransformer2DModel(**FEW, guidance_embeds=True), _flux_blocks(19, 38)
    ),
    "flux2-dev": Published("flux2", lambda d: d.Flux2Transformer2DModel(**FEW), _flux_blocks(8, 48)),
    "flux2-klein-9b": Published(
        "flux2",
        lambda d: d.Flux2Transformer2DModel(**FEW, num_attention_heads=32, joint_attention_dim=12288),
        _flux_blocks(8, 24),
    ),
    "flux2-klein-4b": Published(
        "flux2",
        lambda d: d.Flux2Transformer2DModel(**FEW, num_attention_heads=24, joint_attention_dim=7680),
        _flux_blocks(5, 20),
    ),
    "flux3": Published(
        "flux3",
        lambda d: d.Flux3Transformer2DModel(**FEW, flow_map=True),
        {
            "mode_blocks.image": 5,
            "mode_blocks.image_cond": 5,
            "txt_mode_blocks": 5,
            "single_transformer_blocks": 28,
        },
    ),
    "chroma": Published("chroma", lambda d: d.ChromaTransformer2DModel(**FEW), _flux_blocks(19, 38)),
    "hunyuan-video": Published(
        "hunyuan_video", lambda d: d.HunyuanVideoTransformer3DModel(**FEW), _flux_blocks(20, 40)
    ),
    "sd3-medium": Published(
        "sd3",
        lambda d: d.SD3Transformer2DModel(num_layers=2, num_attention_heads=24, caption_projection_dim=1536),
        {"transformer_blocks": 24},
    ),
    "sd3.5-large": Published(
        "sd3",
        lambda d: d.SD3Transformer2DModel(
            num_layers=2, num_attention_heads=38, caption_projection_dim=2432, qk_norm="rms_norm"
        ),
        {"transformer_blocks": 38},
    ),
    "wan-14b": Published("wan", lambda d: d.WanTransformer3DModel(num_layers=1), {"blocks": 40}),
    "wan-1.3b": Published(
        "wan",
        lambda d: d.WanTransformer3DModel(num_layers=1, num_attention_heads=12, ffn_dim=8960),
        {"blocks": 30},
    ),
    "qwen-image": Published(
        "qwen_image", lambda d: d.QwenImageTransformer2DModel(num_layers=1), {"transformer_blocks": 60}
    ),
    "z-image": Published(
        "z_image", lambda d: d.ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1), Z_IMAGE
    ),
    "lumina2": Published(
        "lumina2",
        lambda d: d.Lumina2Transformer2DModel(num_layers=1, num_refiner_layers=1, cap_feat_dim=2304),
        {**Z_IMAGE, "layers": 26},
    ),
    "ltx-2b": Published(
        "ltx_video", lambda d: d.LTXVideoTransformer3DModel(num_layers=1), {"transformer_blocks": 28}
    ),
    "ltx-13b": Published(
        "ltx_video",
        lambda d: d.LTXVideoTransformer3DModel(
            num_layers=1, attention_head_dim=128, cross_attention_dim=4096
        ),
        {"transformer_blocks": 48},
    ),
    "hidream-i1": Published(
        "hidream",
        lambda d: d.HiDreamImageTransformer2DModel(
            **FEW,
            patch_size=2,
            in_channels=16,
            caption_channels=[4096, 4096],
            llama_layers=(0, 1),  # of 48: each has a matrix in `caption_projection`, all alike
        ),
        {"double_stream_blocks": 16, "single_stream_blocks": 32},
    ),
    "pixart-sigma": Published(
        "pixart",
        lambda d: d.PixArtTransformer2DModel(num_layers=1, caption_channels=4096),
        {"transformer_blocks": 28},
    ),
    "sana-1.6b": Published(
        "sana", lambda d: d.SanaTransformer2DModel(num_layers=1), {"transformer_blocks": 20}
    ),
    "sana-0.6b": Published(
        "sana",
        lambda d: d.SanaTransformer2DModel(
            num_layers=1,
            num_attention_heads=36,
            num_cross_attention_heads=16,
            cross_attention_head_dim=72,
            cross_attention_dim=1152,
        ),
        {"transformer_blocks": 28},
    ),
    "kandinsky5-lite": Published(
        "kandinsky5",
        lambda d: d.Kandinsky5Transformer3DModel(
            num_text_blocks=1, num_visual_blocks=1, model_dim=1792, ff_dim=7168, axes_dims=(16, 24, 24)
        ),
        {"text_transformer_blocks": 2, "visual_transformer_blocks": 32},
    ),
    "cosmos1-7b": Published(
        "cosmos", lambda d: d.CosmosTransformer3DModel(num_layers=1), {"transformer_blocks": 28}
    ),
    "cosmos2-2b": Published(
        "cosmos",
        lambda d: d.CosmosTransformer3DModel(num_layers=1, **COSMOS2, num_attention_heads=16),
        {"transformer_blocks": 28},
    ),
    "cogvideox-2b": Published(
        "cogvideox", lambda d: d.CogVideoXTransformer3DModel(num_layers=1), {"transformer_blocks": 30}
    ),
    "cogvideox-5b": Published(
        "cogvideox",
        lambda d: d.CogVideoXTransformer3DModel(num_layers=1, num_attention_heads=48),
        {"transformer_blocks": 42},
    ),
    "cogview4": Published(
        "cogview4", lambda d: d.CogView4Transformer2DModel(num_layers=1), {"transformer_blocks": 28}
    ),
    "mochi": Published(
        "mochi", lambda d: d.MochiTransformer3DModel(num_layers=2), {"transformer_blocks": 48}
    ),
    "auraflow": Published(
        "auraflow",
        lambda d: d.AuraFlowTransformer2DModel(num_mmdit_layers=1, num_single_dit_layers=1),
        {"joint_transformer_blocks": 4, "single_transformer_blocks": 32},
    ),
    "ltx2.3": Published(
        "ltx2",
        lambda d: d.LTX2VideoTransformer3DModel(
            num_layers=1,
            gated_attn=True,
            cross_attn_mod=True,
            audio_gated_attn=True,
            audio_cross_attn_mod=True,
        ),
        {"transformer_blocks": 48},
    ),
    "krea2": Published(
        "krea2", lambda d: d.Krea2Transformer2DModel(num_layers=1), {"transformer_blocks": 28}
    ),
    "ideogram4": Published(
        "ideogram4", lambda d: d.Ideogram4Transformer2DModel(num_layers=1), {"layers": 34}
    ),
    "hunyuan-video-1.5": Published(
        "hunyuan_video15",
        lambda d: d.HunyuanVideo15Transformer3DModel(num_layers=1, use_meanflow=True),
        {"transformer_blocks": 54},
    ),
}


@cache
def published(name: str) -> tuple[str, Shapes]:
    """The family of a published model, and the shapes of the weights of its first blocks and its last by path."""
    import diffusers

    family, make, blocks = MODELS[name]
    with torch.device("meta"):
        made = {
            key.removesuffix(".weight"): tuple(value.shape)
            for key, value in make(diffusers).state_dict().items()
            if key.endswith(".weight")
        }
    shapes = dict(made)
    for path, shape in made.items():
        name, _, layer = path.partition(".0.")
        last = blocks.get(name, 0) - 1 if layer else 0
        shapes |= {f"{name}.{number}.{layer}": shape for number in {1, 2, last} if number <= last}
    return family, shapes
