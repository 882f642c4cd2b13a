"""The denoisers of the seven families: the blocks and names of the full models, narrow and few."""

from typing import Any

from tests.families.encoders import QWEN_WIDTH, T5_WIDTH
from tests.families.weights import built, copied
from torch import nn


@copied
def sd15_unet() -> nn.Module:
    """All four levels of SD1.5."""
    return _unet(
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        cross_attention_dim=16,
    )


@copied
def sdxl_unet() -> nn.Module:
    """SDXL's three levels, the first without attention, with its added embedding of pooled text and sizes."""
    return _unet(
        block_out_channels=(8, 16, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=[1, 1, 2],
        use_linear_projection=True,
        cross_attention_dim=16 + 20,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=24 + 6 * 4,
    )


@copied
def flux_transformer() -> nn.Module:
    """FLUX.1-dev's: two blocks of either kind, with guidance embedded."""
    from diffusers import FluxTransformer2DModel

    return built(
        lambda: FluxTransformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 2, 2),
        )
    )


@copied
def sd3_transformer() -> nn.Module:
    """SD3's: the last block has no feed-forward for the text."""
    from diffusers import SD3Transformer2DModel

    return built(
        lambda: SD3Transformer2DModel(
            sample_size=16,
            in_channels=16,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=48,
            caption_projection_dim=16,
            pooled_projection_dim=16 + 20,
            out_channels=16,
            pos_embed_max_size=16,
        )
    )


@copied
def qwen_transformer() -> nn.Module:
    """Qwen-Image's two-stream blocks."""
    from diffusers import QwenImageTransformer2DModel

    return built(
        lambda: QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=QWEN_WIDTH,
            axes_dims_rope=(4, 2, 2),
        )
    )


@copied
def wan_transformer(*, vace: bool = False) -> nn.Module:
    """WAN's text-to-video model, or the one with VACE's conditioning beside it."""
    from diffusers import WanTransformer3DModel, WanVACETransformer3DModel

    sizes: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "text_dim": T5_WIDTH,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    if vace:
        return built(lambda: WanVACETransformer3DModel(**sizes, vace_layers=[0], vace_in_channels=96))
    return built(lambda: WanTransformer3DModel(**sizes))


def _unet(**config: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return built(
        lambda: UNet2DConditionModel(sample_size=16, attention_head_dim=4, norm_num_groups=4, **config)
    )
