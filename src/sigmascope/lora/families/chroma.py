"""Chroma: FLUX.1 with one network that computes the modulation of all blocks."""

from typing import Final

from sigmascope.lora.families.family import Family
from sigmascope.lora.families.flux import BLOCK_LAYERS, FLUX

CHROMA: Final = Family(
    name="chroma",
    title="Chroma",
    architecture="chroma",
    base_version="chroma",
    also_called=("Chroma1",),
    signatures={
        "diffusers": "x_embedder.weight distilled_guidance_layer.in_proj.weight single_transformer_blocks.0.proj_mlp.weight",
        "original": "img_in.weight distilled_guidance_layer.in_proj.weight double_blocks.0.img_attn.qkv.weight",
    },
    ratios=FLUX.ratios,
    most_blocks=FLUX.most_blocks,
    widest=FLUX.widest,
    widths=FLUX.widths,
    else_="flux",
    layers=BLOCK_LAYERS
    + """
        img_in = x_embedder
        txt_in = context_embedder
        final_layer.linear = proj_out
        distilled_guidance_layer.in_proj
        distilled_guidance_layer.out_proj
        distilled_guidance_layer.layers.#.in_layer = distilled_guidance_layer.layers.#.linear_1
        distilled_guidance_layer.layers.#.out_layer = distilled_guidance_layer.layers.#.linear_2
    """,
    blocks="distilled_guidance_layer\n" + FLUX.blocks,
    encoders={"text_encoder": ("t5xxl",)},
)
