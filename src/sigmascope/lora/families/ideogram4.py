"""Ideogram 4. Its blocks are called as Z-Image's are; its modulation and its layers outside of blocks are not."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

_OUTSIDE: Final = r"(?!layers[._]).*"

IDEOGRAM4: Final = Family(
    name="ideogram4",
    title="Ideogram 4",
    architecture="ideogram-4",
    base_version="ideogram4",
    in_diffusers=InDiffusers("Ideogram4Transformer2DModel", "Ideogram4LoraLoaderMixin"),
    signatures={
        "diffusers": "llm_cond_proj.weight adaln_proj.weight layers.0.attention.to_q.weight",
        "original": "llm_cond_proj.weight adaln_proj.weight layers.0.attention.qkv.weight",
    },
    ratios=(Ratio(r"layers\.\d+\.attention\.qkv", 3, 1),),
    most_blocks={"layers": 34},
    widths=(4608,),
    layers="""
        layers.#.attention.qkv = layers.#.attention.to_q, layers.#.attention.to_k, layers.#.attention.to_v
        layers.#.attention.o = layers.#.attention.to_out.0
        layers.#.feed_forward.w1
        layers.#.feed_forward.w2
        layers.#.feed_forward.w3
        layers.#.adaln_modulation
        input_proj
        llm_cond_proj
        adaln_proj
        t_embedding.mlp_in
        t_embedding.mlp_out
        final_layer.linear
        final_layer.adaln_modulation
    """,
    blocks="""
        input_proj = img_in
        llm_cond_proj = txt_in
        t_embedding = time_text_embed
        adaln_proj = time_text_embed
        layers.#
        final_layer.adaln = norm_out
        final_layer.linear = proj_out
    """,
    attention=r"layers\.\d+\.attention\.",
    around=r"\.feed_forward\.",
    encoders={"text_encoder": ("qwen3vl_8b",)},
    reads=(
        *COMFYUI_READS,
        Reads("diffusers", "diffusion_model.", "original", "A A+alpha down down+alpha", refuses=_OUTSIDE),
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
    in_comfyui_since="0.33",
)
