"""FLUX.1. Others share names of its layers: FLUX.2 has other widths, Hunyuan's video models more blocks, Chroma no `vector_in`."""

from typing import Final

from sigmascope.lora.families.family import (
    COMFYUI_READS,
    KOHYA_ENCODERS,
    Family,
    InDiffusers,
    Lost,
    Ratio,
    Reads,
)

BLOCK_LAYERS: Final = """
    double_blocks.#.img_attn.qkv = transformer_blocks.#.attn.to_q, transformer_blocks.#.attn.to_k, transformer_blocks.#.attn.to_v
    double_blocks.#.txt_attn.qkv = transformer_blocks.#.attn.add_q_proj, transformer_blocks.#.attn.add_k_proj, transformer_blocks.#.attn.add_v_proj
    double_blocks.#.img_attn.proj = transformer_blocks.#.attn.to_out.0
    double_blocks.#.txt_attn.proj = transformer_blocks.#.attn.to_add_out
    double_blocks.#.img_mlp.0 = transformer_blocks.#.ff.net.0.proj
    double_blocks.#.img_mlp.2 = transformer_blocks.#.ff.net.2
    double_blocks.#.txt_mlp.0 = transformer_blocks.#.ff_context.net.0.proj
    double_blocks.#.txt_mlp.2 = transformer_blocks.#.ff_context.net.2
    single_blocks.#.linear1 = single_transformer_blocks.#.attn.to_q, single_transformer_blocks.#.attn.to_k, single_transformer_blocks.#.attn.to_v, single_transformer_blocks.#.proj_mlp
    single_blocks.#.linear2 = single_transformer_blocks.#.proj_out
"""
"""Attention and feed-forward layers, which Chroma and HunyuanVideo have as well."""
MODULATION: Final = """
    double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
    double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
    single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
"""
"""Modulation in the blocks, as HunyuanVideo has it."""
POOLED_TEXT: Final = """
    vector_in.in_layer = time_text_embed.text_embedder.linear_1
    vector_in.out_layer = time_text_embed.text_embedder.linear_2
"""
"""How the pooled text comes in, at HunyuanVideo too."""
LAST: Final = """
    final_layer.adaLN_modulation.1 = norm_out.linear swapped
    final_layer.linear = proj_out
"""
"""After the blocks, at HunyuanVideo too."""
NORMS: Final = """
    double_blocks.#.img_attn.norm.query_norm = transformer_blocks.#.attn.norm_q
    double_blocks.#.img_attn.norm.key_norm = transformer_blocks.#.attn.norm_k
    double_blocks.#.txt_attn.norm.query_norm = transformer_blocks.#.attn.norm_added_q
    double_blocks.#.txt_attn.norm.key_norm = transformer_blocks.#.attn.norm_added_k
    single_blocks.#.norm.query_norm = single_transformer_blocks.#.attn.norm_q
    single_blocks.#.norm.key_norm = single_transformer_blocks.#.attn.norm_k
"""
"""Norms of queries and keys, at FLUX.2, Chroma and HunyuanVideo too."""
KOHYA_READS: Final = tuple(
    Reads(
        "diffusers",
        start,
        "original",
        "down down+alpha",
        width=3072,
        leaves_out=r"(?!double_blocks|single_blocks).*",
        refuses=r"distilled_guidance_layer.*",
    )
    for start in ("lora_unet_", "diffusion_model.")
)
"""What diffusers' converter reads of kohya's names, at Chroma too."""

FLUX: Final = Family(
    name="flux",
    title="FLUX",
    architecture="flux-1",
    base_version="flux1",
    also_called=("Flux.1", "flux_kontext"),  # OneTrainer, musubi-tuner
    in_diffusers=InDiffusers("FluxTransformer2DModel", "FluxLoraLoaderMixin", {"guidance_embeds": True}),
    signatures={
        "diffusers": "x_embedder.weight time_text_embed.text_embedder.linear_1.weight single_transformer_blocks.0.proj_mlp.weight",
        "original": "img_in.weight vector_in.in_layer.weight double_blocks.0.img_attn.qkv.weight single_blocks.0.linear1.weight",
    },
    ratios=(
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.0\.proj", 4, 1),
        Ratio(r"transformer_blocks\.\d+\.ff(?:_context)?\.net\.2", 1, 4),
        Ratio(r"double_blocks\.\d+\.(?:img|txt)_mlp\.0", 4, 1),
        Ratio(r"double_blocks\.\d+\.(?:img|txt)_mlp\.2", 1, 4),
        Ratio(r"single_transformer_blocks\.\d+\.proj_mlp", 4, 1),
        Ratio(r"single_transformer_blocks\.\d+\.proj_out", 1, 5),
        Ratio(r"single_blocks\.\d+\.linear1", 7, 1),
        Ratio(r"single_blocks\.\d+\.linear2", 1, 5),
    ),
    most_blocks={
        "double_blocks": 19,
        "single_blocks": 38,
        "transformer_blocks": 19,
        "single_transformer_blocks": 38,
    },
    widest=3072,
    widths=(3072,),
    layers=BLOCK_LAYERS
    + MODULATION
    + POOLED_TEXT
    + LAST
    + """
        img_in = x_embedder
        txt_in = context_embedder
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        time_in.out_layer = time_text_embed.timestep_embedder.linear_2
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
    """,
    vectors=NORMS,
    blocks="""
        img_in
        x_embedder = img_in
        txt_in
        context_embedder = txt_in
        time_text_embed
        time_in = time_text_embed
        vector_in = time_text_embed
        guidance_in = time_text_embed
        double_blocks.# = transformer_blocks
        transformer_blocks.#
        single_blocks.# = single_transformer_blocks
        single_transformer_blocks.#
        norm_out
        final_layer.adaLN = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    attention=r"single_blocks\.\d+\.linear1$",
    around=r"single_blocks\.\d+\.linear2$",
    encoders={"text_encoder": ("clip_l",), "text_encoder_2": ("t5xxl",)},
    decides=("clip_l", "t5xxl"),
    kohya_encoders={**KOHYA_ENCODERS, "text_encoder_2": "lora_te3_"},
    lost=(Lost("diffusers", "comfyui", down="lora_A"),),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("comfyui", "lora_transformer_", "diffusers"),
        Reads("comfyui", "", "diffusers", since="0.33"),
        *KOHYA_READS,
        Reads("diffusers", "transformer.", "diffusers", "A A+alpha lora.down lora.down+alpha"),
        Reads("diffusers", "transformer.", "diffusers", "down down+alpha", folds_alpha=False),
        Reads("diffusers", "lora_transformer_", "diffusers", "down down+alpha", known=False),
        Reads("diffusers", "base_model.model.", "diffusers", known=False),
        Reads("diffusers", "base_model.model.", "original", known=False),
    ),
)
