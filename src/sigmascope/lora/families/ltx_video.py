"""LTX-Video: diffusers' names, except for three and the norms of attention."""

from typing import Final

from sigmascope.lora.families.cross_attention import BLOCK, FEED_FORWARD, TEXT_AS_WIDE
from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads

LTX_VIDEO: Final = Family(
    name="ltx_video",
    title="LTX-Video",
    architecture="ltx-video",
    base_version="ltx_video",
    in_diffusers=InDiffusers("LTXVideoTransformer3DModel", "LTXVideoLoraLoaderMixin"),
    signatures={
        "diffusers": "proj_in.weight time_embed.linear.weight transformer_blocks.0.attn1.to_q.weight",
        "original": "patchify_proj.weight adaln_single.linear.weight transformer_blocks.0.attn1.to_q.weight",
    },
    ratios=(*FEED_FORWARD, TEXT_AS_WIDE),
    widths=(2048, 4096),
    layers=BLOCK
    + """
        transformer_blocks.#.attn1.q_norm = transformer_blocks.#.attn1.norm_q
        transformer_blocks.#.attn1.k_norm = transformer_blocks.#.attn1.norm_k
        transformer_blocks.#.attn2.q_norm = transformer_blocks.#.attn2.norm_q
        transformer_blocks.#.attn2.k_norm = transformer_blocks.#.attn2.norm_k
        patchify_proj = proj_in
        adaln_single.emb.timestep_embedder.linear_1 = time_embed.emb.timestep_embedder.linear_1
        adaln_single.emb.timestep_embedder.linear_2 = time_embed.emb.timestep_embedder.linear_2
        adaln_single.linear = time_embed.linear
        caption_projection.linear_1
        caption_projection.linear_2
        proj_out
    """,
    blocks="""
        patchify_proj = img_in
        proj_in = img_in
        caption_projection = txt_in
        adaln_single = time_text_embed
        time_embed.emb = time_text_embed
        time_embed.linear = time_text_embed
        transformer_blocks.#
        proj_out
    """,
    encoders={"text_encoder": ("t5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "", "original", since="0.33"),
        *(
            read
            for start in ("diffusion_model.", "transformer.")
            for read in (
                Reads("diffusers", start, "diffusers", "A lora.down"),
                Reads(
                    "diffusers",
                    start,
                    "original",
                    "A lora.down",
                    leaves_out=r"patchify_proj|adaln_single\..*",
                ),
            )
        ),
    ),
)
