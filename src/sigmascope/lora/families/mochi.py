"""Mochi 1. Each stream's own width; the gate and what it gates are in another order in its original files."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

MOCHI: Final = Family(
    name="mochi",
    title="Mochi",
    architecture="mochi-1",
    base_version="mochi_1",
    also_called=("mochi",),
    in_diffusers=InDiffusers("MochiTransformer3DModel", "Mochi1LoraLoaderMixin"),
    signatures={
        "diffusers": "patch_embed.proj.weight time_embed.pooler.to_kv.weight transformer_blocks.0.attn1.add_q_proj.weight",
        "original": "x_embedder.proj.weight t5_yproj.weight blocks.0.attn.qkv_x.weight",
    },
    ratios=(
        Ratio(r"blocks\.\d+\.attn\.qkv_x", 3, 1),
        Ratio(r"blocks\.\d+\.mod_x", 4, 1),
        Ratio(r"blocks\.\d+\.attn\.qkv_y", 6, 1),
        Ratio(r"blocks\.\d+\.mlp_[xy]\.w1", 16, 3),
        Ratio(r"blocks\.\d+\.mlp_[xy]\.w2", 3, 8),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.0\.proj", 16, 3),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.2", 3, 8),
        Ratio(r"transformer_blocks\.\d+\.norm1\.linear", 4, 1),
        Ratio(r"transformer_blocks\.\d+\.attn1\.add_[qkv]_proj", 2, 1),
    ),
    most_blocks={"blocks": 48, "transformer_blocks": 48},
    widths=(3072,),
    else_="cogvideox",
    layers="""
        blocks.47.mod_y = transformer_blocks.47.norm1_context.linear_1
        blocks.#.attn.qkv_x = transformer_blocks.#.attn1.to_q, transformer_blocks.#.attn1.to_k, transformer_blocks.#.attn1.to_v
        blocks.#.attn.qkv_y = transformer_blocks.#.attn1.add_q_proj, transformer_blocks.#.attn1.add_k_proj, transformer_blocks.#.attn1.add_v_proj
        blocks.#.attn.proj_x = transformer_blocks.#.attn1.to_out.0
        blocks.#.attn.proj_y = transformer_blocks.#.attn1.to_add_out
        blocks.#.attn.q_norm_x = transformer_blocks.#.attn1.norm_q
        blocks.#.attn.k_norm_x = transformer_blocks.#.attn1.norm_k
        blocks.#.attn.q_norm_y = transformer_blocks.#.attn1.norm_added_q
        blocks.#.attn.k_norm_y = transformer_blocks.#.attn1.norm_added_k
        blocks.#.mlp_x.w1 = transformer_blocks.#.ff.net.0.proj gated
        blocks.#.mlp_x.w2 = transformer_blocks.#.ff.net.2
        blocks.#.mlp_y.w1 = transformer_blocks.#.ff_context.net.0.proj gated
        blocks.#.mlp_y.w2 = transformer_blocks.#.ff_context.net.2
        blocks.#.mod_x = transformer_blocks.#.norm1.linear
        blocks.#.mod_y = transformer_blocks.#.norm1_context.linear
        x_embedder.proj = patch_embed.proj
        t_embedder.mlp.0 = time_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_embed.timestep_embedder.linear_2
        t5_y_embedder.to_kv = time_embed.pooler.to_kv
        t5_y_embedder.to_q = time_embed.pooler.to_q
        t5_y_embedder.to_out = time_embed.pooler.to_out
        t5_yproj = time_embed.caption_proj
        final_layer.mod = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    blocks="""
        x_embedder = img_in
        patch_embed.proj = img_in
        t5_yproj = txt_in
        time_embed.caption_proj = txt_in
        t_embedder = time_text_embed
        t5_y_embedder = time_text_embed
        time_embed.timestep_embedder = time_text_embed
        time_embed.pooler = time_text_embed
        blocks.# = transformer_blocks
        transformer_blocks.#
        norm_out
        final_layer.mod = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    around=r"\.mlp_[xy]\.",
    encoders={"text_encoder": ("t5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "", "original"),
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
)
