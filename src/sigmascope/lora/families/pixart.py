"""PixArt-α and PixArt-Σ. Its pipelines in diffusers have no LoRA loader; PEFT's own does."""

from typing import Final

from sigmascope.lora.families.cross_attention import FEED_FORWARD, FUSED_BLOCK, FUSED_RATIOS
from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Ratio, Reads

PIXART: Final = Family(
    name="pixart",
    title="PixArt",
    architecture="pixart-sigma",
    base_version="pixart_sigma",
    also_called=("pixart",),
    in_diffusers=InDiffusers("PixArtTransformer2DModel", None, {"use_additional_conditions": True}),
    signatures={
        "diffusers": "pos_embed.proj.weight adaln_single.linear.weight caption_projection.linear_1.weight transformer_blocks.0.attn2.to_k.weight",
        "original": "x_embedder.proj.weight t_block.1.weight blocks.0.cross_attn.kv_linear.weight blocks.0.mlp.fc1.weight",
    },
    ratios=(
        *FEED_FORWARD,
        *FUSED_RATIOS,
        Ratio(r"blocks\.\d+\.mlp\.fc1", 4, 1),
        Ratio(r"blocks\.\d+\.mlp\.fc2", 1, 4),
    ),
    most_blocks={"blocks": 28, "transformer_blocks": 28},
    widths=(1152,),
    layers=FUSED_BLOCK
    + """
        blocks.#.mlp.fc1 = transformer_blocks.#.ff.net.0.proj
        blocks.#.mlp.fc2 = transformer_blocks.#.ff.net.2
        blocks.#.scale_shift_table = transformer_blocks.#.scale_shift_table
        x_embedder.proj = pos_embed.proj
        y_embedder.y_proj.fc1 = caption_projection.linear_1
        y_embedder.y_proj.fc2 = caption_projection.linear_2
        t_embedder.mlp.0 = adaln_single.emb.timestep_embedder.linear_1
        t_embedder.mlp.2 = adaln_single.emb.timestep_embedder.linear_2
        csize_embedder.mlp.0 = adaln_single.emb.resolution_embedder.linear_1
        csize_embedder.mlp.2 = adaln_single.emb.resolution_embedder.linear_2
        ar_embedder.mlp.0 = adaln_single.emb.aspect_ratio_embedder.linear_1
        ar_embedder.mlp.2 = adaln_single.emb.aspect_ratio_embedder.linear_2
        t_block.1 = adaln_single.linear
        final_layer.linear = proj_out
        final_layer.scale_shift_table = scale_shift_table
    """,
    blocks="""
        x_embedder = img_in
        pos_embed = img_in
        y_embedder.y_proj = txt_in
        caption_projection = txt_in
        t_embedder = time_text_embed
        csize_embedder = time_text_embed
        ar_embedder = time_text_embed
        t_block = time_text_embed
        adaln_single = time_text_embed
        blocks.# = transformer_blocks
        transformer_blocks.#
        proj_out
        scale_shift_table = proj_out
        final_layer.linear = proj_out
        final_layer.scale_shift_table = proj_out
    """,
    encoders={"text_encoder": ("t5xxl",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "base_model.model.", "diffusers"),
    ),
)
