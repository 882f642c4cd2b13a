"""HunyuanVideo: FLUX.1's blocks, more of them; its own files say `img_attn_qkv` and `fc1`, ComfyUI's FLUX' names."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads
from sigmascope.lora.families.flux import BLOCK_LAYERS, FLUX, LAST, MODULATION, NORMS, POOLED_TEXT

_EMBEDDERS: Final = r"(?:time_in|guidance_in|txt_in\.t_embedder)\.mlp\..*|txt_in\.c_embedder\.linear_.*"

TEXT: Final = """
    txt_in.input_embedder = context_embedder.proj_in
    txt_in.t_embedder.in_layer = context_embedder.time_text_embed.timestep_embedder.linear_1
    txt_in.t_embedder.out_layer = context_embedder.time_text_embed.timestep_embedder.linear_2
    txt_in.c_embedder.in_layer = context_embedder.time_text_embed.text_embedder.linear_1
    txt_in.c_embedder.out_layer = context_embedder.time_text_embed.text_embedder.linear_2
    txt_in.individual_token_refiner.blocks.#.self_attn.qkv = context_embedder.token_refiner.refiner_blocks.#.attn.to_q, context_embedder.token_refiner.refiner_blocks.#.attn.to_k, context_embedder.token_refiner.refiner_blocks.#.attn.to_v
    txt_in.individual_token_refiner.blocks.#.self_attn.proj = context_embedder.token_refiner.refiner_blocks.#.attn.to_out.0
    txt_in.individual_token_refiner.blocks.#.mlp.0 = context_embedder.token_refiner.refiner_blocks.#.ff.net.0.proj
    txt_in.individual_token_refiner.blocks.#.mlp.2 = context_embedder.token_refiner.refiner_blocks.#.ff.net.2
    txt_in.individual_token_refiner.blocks.#.adaLN_modulation.1 = context_embedder.token_refiner.refiner_blocks.#.norm_out.linear
"""
"""How the text comes in, at HunyuanVideo 1.5 too."""

VECTORS: Final = f"""
    {NORMS}
    double_blocks.#.img_attn_q_norm = transformer_blocks.#.attn.norm_q
    double_blocks.#.img_attn_k_norm = transformer_blocks.#.attn.norm_k
    double_blocks.#.txt_attn_q_norm = transformer_blocks.#.attn.norm_added_q
    double_blocks.#.txt_attn_k_norm = transformer_blocks.#.attn.norm_added_k
    single_blocks.#.q_norm = single_transformer_blocks.#.attn.norm_q
    single_blocks.#.k_norm = single_transformer_blocks.#.attn.norm_k
    txt_in.individual_token_refiner.blocks.#.norm1 = context_embedder.token_refiner.refiner_blocks.#.norm1
    txt_in.individual_token_refiner.blocks.#.norm2 = context_embedder.token_refiner.refiner_blocks.#.norm2
"""
"""Norms by ComfyUI's names and the original ones, at HunyuanVideo 1.5 too."""
HUNYUAN_VIDEO: Final = Family(
    name="hunyuan_video",
    title="HunyuanVideo",
    architecture="hunyuan-video",
    base_version="hunyuan_video",
    also_called=("framepack",),  # it has the same blocks
    in_diffusers=InDiffusers(
        "HunyuanVideoTransformer3DModel", "HunyuanVideoLoraLoaderMixin", {"guidance_embeds": True}
    ),
    signatures={
        "diffusers": "x_embedder.proj.weight context_embedder.proj_in.weight single_transformer_blocks.0.proj_mlp.weight",
        "original": "img_in.proj.weight txt_in.input_embedder.weight vector_in.in_layer.weight",
    },
    widest=FLUX.widest,
    widths=(3072,),
    ratios=FLUX.ratios,
    most_blocks={
        "double_blocks": 20,
        "single_blocks": 40,
        "transformer_blocks": 20,
        "single_transformer_blocks": 40,
    },
    else_="flux",
    layers=BLOCK_LAYERS
    + MODULATION
    + POOLED_TEXT
    + LAST
    + TEXT
    + """
        img_in.proj = x_embedder.proj
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        time_in.out_layer = time_text_embed.timestep_embedder.linear_2
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
    """,
    vectors=VECTORS,
    aliases={
        "_attn.qkv": "_attn_qkv",
        "_attn.proj": "_attn_proj",
        "mlp.0": "mlp.fc1",
        "mlp.2": "mlp.fc2",
        "_mod.lin": "_mod.linear",
        "modulation.lin": "modulation.linear",
        "time_in.in_layer": "time_in.mlp.0",
        "time_in.out_layer": "time_in.mlp.2",
        "guidance_in.in_layer": "guidance_in.mlp.0",
        "guidance_in.out_layer": "guidance_in.mlp.2",
        "t_embedder.in_layer": "t_embedder.mlp.0",
        "t_embedder.out_layer": "t_embedder.mlp.2",
        "c_embedder.in_layer": "c_embedder.linear_1",
        "c_embedder.out_layer": "c_embedder.linear_2",
    },
    blocks=FLUX.blocks,
    attention=FLUX.attention,
    around=FLUX.around,
    encoders={"text_encoder": ("llama",), "text_encoder_2": ("clip_l",)},
    decides=("llama",),
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "diffusion_model.", "also", leaves_out=_EMBEDDERS),
        Reads("comfyui", "transformer.", "also", leaves_out=_EMBEDDERS),
        Reads("comfyui", "transformer.", "original", leaves_out=r"(?!time_in|guidance_in).*"),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
        *(
            Reads(
                "diffusers",
                start,
                "also",
                "A",
                leaves_out=r"txt_in\.[tc]_embedder\.(?:in|out)_layer",
                misreads=r"final_layer\.adaLN_modulation\.1",
                refuses=r"txt_in\.individual_token_refiner\..*qkv",
                requires=r"(?s).*\.img_attn_qkv",
            )
            for start in ("diffusion_model.", "transformer.", "")
        ),
        Reads("diffusers", "lora_unet_", "original", known=False),
        Reads("diffusers", "lora_unet_", "also", known=False),
        Reads("diffusers", "diffusion_model.", "original", known=False),
        Reads("diffusers", "diffusion_model.", "also", known=False),
        Reads("diffusers", "transformer.", "original", known=False),
        Reads("diffusers", "transformer.", "also", known=False),
    ),
)
