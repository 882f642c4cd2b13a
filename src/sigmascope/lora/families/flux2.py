"""FLUX.2 [dev] and [klein]. Layers that FLUX.1 has too have the same names, but other widths and numbers of blocks."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Lost, Ratio, Reads
from sigmascope.lora.families.flux import NORMS

_OUTSIDE: Final = r"(?!(?:single_)?transformer_blocks\.).*"
"""Layers outside of blocks, which diffusers converts from their original names alone."""
_AROUND: Final = r"time_guidance_embed\..*|.*_stream_modulation.*"
_SWAPPED: Final = r"final_layer\.adaLN_modulation\.1"

FLUX2: Final = Family(
    name="flux2",
    title="FLUX.2",
    architecture="flux-2",
    base_version="flux2",
    in_diffusers=InDiffusers("Flux2Transformer2DModel", "Flux2LoraLoaderMixin"),
    signatures={
        "diffusers": "x_embedder.weight context_embedder.weight single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",
        "original": "img_in.weight txt_in.weight double_blocks.0.img_attn.qkv.weight single_blocks.0.linear1.weight",
    },
    ratios=(
        Ratio(r"double_blocks\.\d+\.(?:img|txt)_mlp\.0", 6, 1),
        Ratio(r"double_blocks\.\d+\.(?:img|txt)_mlp\.2", 1, 3),
        Ratio(r"single_blocks\.\d+\.linear1", 9, 1),
        Ratio(r"single_blocks\.\d+\.linear2", 1, 4),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.linear_in", 6, 1),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.linear_out", 1, 3),
        Ratio(r"single_transformer_blocks\.\d+\.attn\.to_qkv_mlp_proj", 9, 1),
        Ratio(r"single_transformer_blocks\.\d+\.attn\.to_out", 1, 4),
    ),
    most_blocks={
        "double_blocks": 8,
        "single_blocks": 48,
        "transformer_blocks": 8,
        "single_transformer_blocks": 48,
    },
    widths=(3072, 4096, 6144),
    else_="flux",
    layers="""
        double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
        double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
        double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
        double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
        double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.linear_in
        double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.linear_out
        double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.linear_in
        double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.linear_out
        single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_qkv_mlp_proj
        single_blocks.#.linear2 = single_transformer_blocks.#.attn.to_out
        double_stream_modulation_img.lin = double_stream_modulation_img.linear
        double_stream_modulation_txt.lin = double_stream_modulation_txt.linear
        single_stream_modulation.lin = single_stream_modulation.linear
        img_in = x_embedder
        txt_in = context_embedder
        time_in.in_layer = time_guidance_embed.timestep_embedder.linear_1
        time_in.out_layer = time_guidance_embed.timestep_embedder.linear_2
        guidance_in.in_layer = time_guidance_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_guidance_embed.guidance_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear swapped
        final_layer.linear = proj_out
    """,
    vectors=NORMS,
    blocks="""
        img_in
        x_embedder = img_in
        txt_in
        context_embedder = txt_in
        time_in = time_text_embed
        guidance_in = time_text_embed
        time_guidance_embed = time_text_embed
        double_stream_modulation_img
        double_stream_modulation_txt
        double_blocks.# = transformer_blocks
        transformer_blocks.#
        single_stream_modulation
        single_blocks.# = single_transformer_blocks
        single_transformer_blocks.#
        norm_out
        final_layer.adaLN = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    encoders={"text_encoder": ("mistral3_24b", "qwen3_4b", "qwen3_8b")},
    lost=(Lost("diffusers", "comfyui", down="lora_down"),),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers", leaves_out=_AROUND),
        Reads("comfyui", "lycoris_", "diffusers", leaves_out=_AROUND),
        Reads("comfyui", "lora_transformer_", "diffusers", leaves_out=_AROUND),
        Reads("comfyui", "", "diffusers", leaves_out=_AROUND),
        Reads(
            "diffusers",
            "lora_unet_",
            "original",
            "down down+alpha",
            leaves_out=r".*_stream_modulation_?.*|guidance_in\..*|final_layer\.adaLN_modulation\.1",
        ),
        Reads("diffusers", "diffusion_model.", "original", "A", misreads=_SWAPPED),
        Reads("diffusers", "diffusion_model.", "diffusers", "A", refuses=_OUTSIDE),
        Reads("diffusers", "base_model.model.", "original", "A", misreads=_SWAPPED),
        Reads("diffusers", "base_model.model.", "diffusers", "A", refuses=_OUTSIDE),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
        Reads("diffusers", "lycoris_", "diffusers", "lokr lokr+alpha", refuses=_OUTSIDE),
        Reads("diffusers", "", "diffusers", "lokr lokr+alpha"),
        Reads(
            "diffusers",
            "diffusion_model.",
            "original",
            "lokr lokr+alpha",
            leaves_out=r".*_attn\.qkv",
            misreads=_SWAPPED,
        ),
        Reads("diffusers", "base_model.model.", "original", "lokr lokr+alpha", known=False),
    ),
    in_comfyui_since="0.33",
)
