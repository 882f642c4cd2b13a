"""Chroma: FLUX.1 with one network that computes the modulation of all blocks."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads
from sigmascope.lora.families.flux import BLOCK_LAYERS, FLUX, KOHYA_READS, NORMS

_GUIDANCE: Final = r"distilled_guidance_layer.*"

CHROMA: Final = Family(
    name="chroma",
    title="Chroma",
    architecture="chroma",
    base_version="chroma",
    also_called=("Chroma1",),
    in_diffusers=InDiffusers("ChromaTransformer2DModel", "FluxLoraLoaderMixin"),
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
    vectors=NORMS,
    blocks="distilled_guidance_layer\n" + FLUX.blocks,
    encoders={"text_encoder": ("t5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers", leaves_out=_GUIDANCE),
        Reads("comfyui", "lycoris_", "diffusers", leaves_out=_GUIDANCE),
        Reads("comfyui", "lora_transformer_", "diffusers", leaves_out=_GUIDANCE),
        Reads("comfyui", "", "diffusers", since="0.33", leaves_out=_GUIDANCE),
        *KOHYA_READS,
        Reads("diffusers", "transformer.", "diffusers", "A A+alpha lora.down lora.down+alpha"),
        Reads("diffusers", "transformer.", "diffusers", "down down+alpha", folds_alpha=False),
        Reads("diffusers", "lora_transformer_", "diffusers", "down down+alpha", known=False),
    ),
)
