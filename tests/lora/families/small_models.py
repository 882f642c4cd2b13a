"""A small model of each family, of diffusers' own class, on the meta device; with what its variants add.

As wide as the published ones where diffusers' conversion counts on that width.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import nn

MAKERS: Final[dict[str, Callable[[Any], nn.Module]]] = {
    "auraflow": lambda d: d.AuraFlowTransformer2DModel(
        num_mmdit_layers=2, num_single_dit_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=24, caption_projection_dim=16, pos_embed_max_size=4,
    ),
    "chroma": lambda d: d.ChromaTransformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, joint_attention_dim=24, approximator_hidden_dim=32, approximator_layers=2,
    ),
    "cogvideox": lambda d: d.CogVideoXTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=8, text_embed_dim=24, time_embed_dim=4, ofs_embed_dim=4,
        sample_width=8, sample_height=8, sample_frames=9,
    ),
    "cogview4": lambda d: d.CogView4Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, text_embed_dim=24,
        time_embed_dim=12, condition_dim=8, rope_axes_dim=(16, 16),
    ),
    "cosmos": lambda d: d.CosmosTransformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=16, text_embed_dim=8, adaln_lora_dim=4, max_size=(2, 4, 4),
        use_crossattn_projection=True, crossattn_proj_in_channels=24, img_context_dim_in=24, extra_pos_embed_type=None,
    ),
    "flux": lambda d: d.FluxTransformer2DModel(
        in_channels=8, num_layers=2, num_single_layers=2, joint_attention_dim=24, pooled_projection_dim=20,
        guidance_embeds=True,
    ),
    "flux2": lambda d: d.Flux2Transformer2DModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=40, timestep_guidance_channels=32, axes_dims_rope=[4, 4, 4, 4],
    ),
    "flux3": lambda d: d.Flux3Transformer2DModel(
        in_channels=16, cond_in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=40, timestep_channels=32, axes_dims_rope=(4, 4, 4, 4), flow_map=True,
    ),
    "hidream": lambda d: d.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_channels=[32, 16], text_emb_dim=64, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32),
        llama_layers=(0, 1),
    ),
    "hunyuan_video": lambda d: d.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=2, num_single_layers=2, text_embed_dim=16, pooled_projection_dim=8,
        guidance_embeds=True,
    ),
    "hunyuan_video15": lambda d: d.HunyuanVideo15Transformer3DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=8, text_embed_dim=24, text_embed_2_dim=20,
        image_embed_dim=12, rope_axes_dim=(4, 2, 2), use_meanflow=True,
    ),
    "ideogram4": lambda d: d.Ideogram4Transformer2DModel(
        in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2, intermediate_size=40, adaln_dim=12,
        llm_features_dim=24, mrope_section=(2, 1, 1),
    ),
    "kandinsky5": lambda d: d.Kandinsky5Transformer3DModel(
        in_text_dim=24, in_text_dim2=20, time_dim=8, model_dim=16, ff_dim=40, num_text_blocks=2, num_visual_blocks=2,
        axes_dims=(2, 2, 4),
    ),
    "krea2": lambda d: d.Krea2Transformer2DModel(
        in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, timestep_embed_dim=8, text_hidden_dim=24, num_text_layers=3, text_num_attention_heads=3,
        text_num_key_value_heads=3, text_intermediate_size=40, axes_dims_rope=(4, 2, 2),
    ),
    "ltx2": lambda d: d.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=8,
        audio_cross_attention_dim=16, caption_channels=24, gated_attn=True, cross_attn_mod=True, audio_gated_attn=True,
        audio_cross_attn_mod=True,
    ),
    "ltx_video": lambda d: d.LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        caption_channels=24,
    ),
    "lumina2": lambda d: d.Lumina2Transformer2DModel(
        sample_size=16, in_channels=4, num_layers=2, num_refiner_layers=2, axes_lens=[32, 32, 32], cap_feat_dim=32,
    ),
    "mochi": lambda d: d.MochiTransformer3DModel(
        num_layers=2, num_attention_heads=3, attention_head_dim=8, pooled_projection_dim=12, in_channels=4,
        text_embed_dim=24, time_embed_dim=8,
    ),
    "pixart": lambda d: d.PixArtTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16, caption_channels=24,
        sample_size=8, use_additional_conditions=True,
    ),
    "qwen_image": lambda d: d.QwenImageTransformer2DModel(
        in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=24,
        axes_dims_rope=(2, 2, 4),
    ),
    "sana": lambda d: d.SanaTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=8, num_cross_attention_heads=2, cross_attention_head_dim=8,
        cross_attention_dim=16, caption_channels=24,
    ),
    "sana-sprint": lambda d: d.SanaTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=8, num_cross_attention_heads=2, cross_attention_head_dim=8,
        cross_attention_dim=16, caption_channels=24, guidance_embeds=True, qk_norm="rms_norm_across_heads",
    ),
    "sd3": lambda d: d.SD3Transformer2DModel(
        sample_size=8, num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=24,
        caption_projection_dim=16, pooled_projection_dim=20, pos_embed_max_size=4, dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    "wan": lambda d: d.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=20, freq_dim=8, ffn_dim=64,
        num_layers=2, image_dim=28, added_kv_proj_dim=24,
    ),
    "z_image": lambda d: d.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=4, dim=48, n_layers=2, n_refiner_layers=2, n_heads=3,
        n_kv_heads=3, cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[64, 32, 32],
    ),
}  # fmt: skip


@cache
def small(name: str) -> nn.Module:
    """A small model of a family, made once."""
    import diffusers

    with torch.device("meta"):
        return MAKERS[name](diffusers)


def family_of(name: str) -> str:
    """The family of one of `MAKERS`."""
    return name.removesuffix("-sprint")
