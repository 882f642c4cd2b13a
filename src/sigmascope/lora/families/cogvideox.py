"""CogVideoX. The original names are those of ComfyUI's files; SAT's, in which it was published, no LoRA loader reads."""

from typing import Final

from sigmascope.lora.families.cross_attention import FEED_FORWARD
from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

COGVIDEOX: Final = Family(
    name="cogvideox",
    title="CogVideoX",
    architecture="cogvideox",
    base_version="cogvideox",
    in_diffusers=InDiffusers("CogVideoXTransformer3DModel", "CogVideoXLoraLoaderMixin", {"ofs_embed_dim": 4}),
    signatures={
        "diffusers": "patch_embed.proj.weight time_embedding.linear_1.weight transformer_blocks.0.attn1.to_q.weight",
        "original": "patch_embed.proj.weight patch_embed.text_proj.weight blocks.0.attn_out.weight",
    },
    ratios=(
        *FEED_FORWARD,
        Ratio(r"blocks\.\d+\.ff_proj", 4, 1),
        Ratio(r"blocks\.\d+\.ff_out", 1, 4),
    ),
    most_blocks={"blocks": 42, "transformer_blocks": 42},
    widths=(1920, 3072),
    layers="""
        blocks.#.q = transformer_blocks.#.attn1.to_q
        blocks.#.k = transformer_blocks.#.attn1.to_k
        blocks.#.v = transformer_blocks.#.attn1.to_v
        blocks.#.attn_out = transformer_blocks.#.attn1.to_out.0
        blocks.#.norm_q = transformer_blocks.#.attn1.norm_q
        blocks.#.norm_k = transformer_blocks.#.attn1.norm_k
        blocks.#.ff_proj = transformer_blocks.#.ff.net.0.proj
        blocks.#.ff_out = transformer_blocks.#.ff.net.2
        blocks.#.norm1.linear = transformer_blocks.#.norm1.linear
        blocks.#.norm1.norm = transformer_blocks.#.norm1.norm
        blocks.#.norm2.linear = transformer_blocks.#.norm2.linear
        blocks.#.norm2.norm = transformer_blocks.#.norm2.norm
        patch_embed.proj
        patch_embed.text_proj
        time_embedding_linear_1 = time_embedding.linear_1
        time_embedding_linear_2 = time_embedding.linear_2
        ofs_embedding_linear_1 = ofs_embedding.linear_1
        ofs_embedding_linear_2 = ofs_embedding.linear_2
        norm_final
        norm_out.linear
        norm_out.norm
        proj_out
    """,
    blocks="""
        patch_embed.proj = img_in
        patch_embed.text_proj = txt_in
        time_embedding
        ofs_embedding = time_embedding
        blocks.# = transformer_blocks
        transformer_blocks.#
        norm_final = norm_out
        norm_out
        proj_out
    """,
    attention=r"(?:^|\.)blocks\.\d+\.[qkv]$",
    around=r"(?:^|\.)blocks\.\d+\.ff_(?:proj|out)$",
    encoders={"text_encoder": ("t5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads("diffusers", "transformer.", "diffusers", "A"),
    ),
    in_comfyui_since="0.33",
)
