"""CogView 4. Its blocks are called as CogVideoX's are, and diffusers' names are its only ones: ComfyUI has no such model."""

from typing import Final

from sigmascope.lora.families.cross_attention import FEED_FORWARD
from sigmascope.lora.families.family import Family, InDiffusers, Reads

COGVIEW4: Final = Family(
    name="cogview4",
    title="CogView 4",
    architecture="cogview4",
    base_version="cogview4",
    in_diffusers=InDiffusers("CogView4Transformer2DModel", "CogView4LoraLoaderMixin"),
    signatures={
        "diffusers": "patch_embed.proj.weight time_condition_embed.condition_embedder.linear_1.weight transformer_blocks.0.attn1.to_q.weight"
    },
    ratios=FEED_FORWARD,
    widths=(2560,),
    layers="""
        transformer_blocks.#.attn1.to_q
        transformer_blocks.#.attn1.to_k
        transformer_blocks.#.attn1.to_v
        transformer_blocks.#.attn1.to_out.0
        transformer_blocks.#.ff.net.0.proj
        transformer_blocks.#.ff.net.2
        transformer_blocks.#.norm1.linear
        patch_embed.proj
        patch_embed.text_proj
        time_condition_embed.timestep_embedder.linear_1
        time_condition_embed.timestep_embedder.linear_2
        time_condition_embed.condition_embedder.linear_1
        time_condition_embed.condition_embedder.linear_2
        norm_out.linear
        proj_out
    """,
    blocks="""
        patch_embed.proj = img_in
        patch_embed.text_proj = txt_in
        time_condition_embed = time_text_embed
        transformer_blocks.#
        norm_out
        proj_out
    """,
    kohya_naming="diffusers",
    reads=(Reads("diffusers", "transformer.", "diffusers", "A"),),
)
