"""Sana. Its feed-forward layers are convolutions; ComfyUI has no such model."""

from typing import Final

from sigmascope.lora.families.cross_attention import FUSED_BLOCK, FUSED_RATIOS
from sigmascope.lora.families.family import Family, InDiffusers, Reads

SANA: Final = Family(
    name="sana",
    title="Sana",
    architecture="sana",
    base_version="sana",
    not_called=("sana-video",),
    in_diffusers=InDiffusers(
        "SanaTransformer2DModel",
        "SanaLoraLoaderMixin",
        {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
    ),
    signatures={
        "diffusers": "patch_embed.proj.weight caption_norm.weight transformer_blocks.0.ff.conv_inverted.weight",
        "original": "x_embedder.proj.weight attention_y_norm.weight blocks.0.mlp.inverted_conv.conv.weight",
    },
    ratios=FUSED_RATIOS,
    most_blocks={"blocks": 60, "transformer_blocks": 60},
    widths=(1152, 2240),
    layers=FUSED_BLOCK
    + """
        blocks.#.attn.q_norm = transformer_blocks.#.attn1.norm_q
        blocks.#.attn.k_norm = transformer_blocks.#.attn1.norm_k
        blocks.#.cross_attn.q_norm = transformer_blocks.#.attn2.norm_q
        blocks.#.cross_attn.k_norm = transformer_blocks.#.attn2.norm_k
        blocks.#.mlp.inverted_conv.conv = transformer_blocks.#.ff.conv_inverted
        blocks.#.mlp.depth_conv.conv = transformer_blocks.#.ff.conv_depth
        blocks.#.mlp.point_conv.conv = transformer_blocks.#.ff.conv_point
        blocks.#.scale_shift_table = transformer_blocks.#.scale_shift_table
        x_embedder.proj = patch_embed.proj
        y_embedder.y_proj.fc1 = caption_projection.linear_1
        y_embedder.y_proj.fc2 = caption_projection.linear_2
        attention_y_norm = caption_norm
        t_embedder.mlp.0 = time_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_embed.timestep_embedder.linear_2
        t_embedder.mlp.0 = time_embed.emb.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_embed.emb.timestep_embedder.linear_2
        cfg_embedder.mlp.0 = time_embed.guidance_embedder.linear_1
        cfg_embedder.mlp.2 = time_embed.guidance_embedder.linear_2
        t_block.1 = time_embed.linear
        final_layer.linear = proj_out
        final_layer.scale_shift_table = scale_shift_table
    """,
    sometimes=r".*\.(?:[qk]_norm|norm_[qk])",
    blocks="""
        x_embedder = img_in
        patch_embed.proj = img_in
        y_embedder.y_proj = txt_in
        caption_projection = txt_in
        attention_y_norm = txt_in
        caption_norm = txt_in
        t_embedder = time_text_embed
        cfg_embedder = time_text_embed
        t_block = time_text_embed
        time_embed.emb = time_text_embed
        time_embed.timestep_embedder = time_text_embed
        time_embed.guidance_embedder = time_text_embed
        time_embed.linear = time_text_embed
        blocks.# = transformer_blocks
        transformer_blocks.#
        proj_out
        scale_shift_table = proj_out
        final_layer.linear = proj_out
        final_layer.scale_shift_table = proj_out
    """,
    encoders={"text_encoder": ("gemma2_2b",)},
    reads=(Reads("diffusers", "transformer.", "diffusers", "A"),),
)
