"""HunyuanVideo 1.5: HunyuanVideo without single blocks. Its own files have query, key and value apart, ComfyUI's fused."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads
from sigmascope.lora.families.flux import BLOCK_LAYERS, FLUX, LAST, MODULATION
from sigmascope.lora.families.hunyuan_video import HUNYUAN_VIDEO, TEXT, VECTORS

_APART: Final = "".join(
    f"double_blocks.#.{stream}_attn_{letter} = transformer_blocks.#.attn.{name.replace('*', letter)} read-only\n"
    for stream, name in (("img", "to_*"), ("txt", "add_*_proj"))
    for letter in "qkv"
)
"""As in the files that it was published in, and in musubi-tuner's LoRAs."""
_DOUBLE: Final = "\n".join(
    line for line in (BLOCK_LAYERS + MODULATION).splitlines() if "single_blocks" not in line
)

HUNYUAN_VIDEO15: Final = Family(
    name="hunyuan_video15",
    title="HunyuanVideo 1.5",
    architecture="hunyuan-video-1.5",
    base_version="hunyuan_video_1_5",
    also_called=("hv15",),
    in_diffusers=InDiffusers("HunyuanVideo15Transformer3DModel", None, {"use_meanflow": True}),
    signatures={
        "diffusers": "x_embedder.proj.weight context_embedder_2.linear_1.weight transformer_blocks.0.attn.add_q_proj.weight",
        "original": "img_in.proj.weight byt5_in.fc1.weight vision_in.proj.1.weight",
    },
    ratios=FLUX.ratios,
    most_blocks={"double_blocks": 54, "transformer_blocks": 54},
    widths=(2048,),
    else_="flux",
    layers=_APART
    + _DOUBLE
    + LAST
    + TEXT
    + """
        img_in.proj = x_embedder.proj
        byt5_in.layernorm = context_embedder_2.norm
        byt5_in.fc1 = context_embedder_2.linear_1
        byt5_in.fc2 = context_embedder_2.linear_2
        byt5_in.fc3 = context_embedder_2.linear_3
        vision_in.proj.0 = image_embedder.norm_in
        vision_in.proj.1 = image_embedder.linear_1
        vision_in.proj.3 = image_embedder.linear_2
        vision_in.proj.4 = image_embedder.norm_out
        time_in.in_layer = time_embed.timestep_embedder.linear_1
        time_in.out_layer = time_embed.timestep_embedder.linear_2
        time_r_in.in_layer = time_embed.timestep_embedder_r.linear_1
        time_r_in.out_layer = time_embed.timestep_embedder_r.linear_2
    """,
    vectors=f"{VECTORS}\ncond_type_embedding = cond_type_embed",
    aliases={
        **HUNYUAN_VIDEO.aliases,
        "time_r_in.in_layer": "time_r_in.mlp.0",
        "time_r_in.out_layer": "time_r_in.mlp.2",
    },
    blocks="""
        img_in
        x_embedder = img_in
        txt_in
        context_embedder = txt_in
        byt5_in = txt_in
        context_embedder_2 = txt_in
        vision_in = img_emb
        image_embedder = img_emb
        time_in = time_text_embed
        time_r_in = time_text_embed
        time_embed.timestep_embedder = time_text_embed
        time_embed.timestep_embedder_r = time_text_embed
        double_blocks.# = transformer_blocks
        transformer_blocks.#
        norm_out
        final_layer.adaLN = norm_out
        proj_out
        final_layer.linear = proj_out
    """,
    attention=r"double_blocks\.\d+\.(?:img|txt)_attn_",
    encoders={"text_encoder": ("qwen25_7b",), "text_encoder_2": ("byt5_small",)},
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "diffusion_model.", "also"),
        Reads("comfyui", "transformer.", "also"),
    ),
    in_comfyui_since="0.33",
)
