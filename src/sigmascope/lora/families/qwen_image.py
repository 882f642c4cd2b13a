"""Qwen-Image. Original files and diffusers use the same names."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Family, InDiffusers, Reads

_ALL: Final = "A A+alpha A.default A.default+alpha down down+alpha"

QWEN_IMAGE: Final = Family(
    name="qwen_image",
    title="Qwen-Image",
    architecture="qwen-image",
    base_version="qwen_image",
    in_diffusers=InDiffusers("QwenImageTransformer2DModel", "QwenImageLoraLoaderMixin"),
    signatures={"diffusers": "img_in.weight txt_norm.weight transformer_blocks.0.img_mod.1.weight"},
    widths=(3072,),
    layers="""
        transformer_blocks.#.attn.to_q
        transformer_blocks.#.attn.to_k
        transformer_blocks.#.attn.to_v
        transformer_blocks.#.attn.add_q_proj
        transformer_blocks.#.attn.add_k_proj
        transformer_blocks.#.attn.add_v_proj
        transformer_blocks.#.attn.to_out.0
        transformer_blocks.#.attn.to_add_out
        transformer_blocks.#.img_mlp.net.0.proj
        transformer_blocks.#.img_mlp.net.2
        transformer_blocks.#.txt_mlp.net.0.proj
        transformer_blocks.#.txt_mlp.net.2
        transformer_blocks.#.img_mod.1
        transformer_blocks.#.txt_mod.1
        img_in
        txt_in
        time_text_embed.timestep_embedder.linear_1
        time_text_embed.timestep_embedder.linear_2
        norm_out.linear
        proj_out
    """,
    blocks="""
        img_in
        txt_in
        time_text_embed
        transformer_blocks.#
        norm_out
        proj_out
    """,
    encoders={"text_encoder": ("qwen25_7b",)},
    kohya_naming="diffusers",
    reads=(
        *COMFYUI_READS,
        Reads("comfyui", "transformer.", "diffusers"),
        Reads("comfyui", "lycoris_", "diffusers"),
        Reads("comfyui", "", "diffusers"),
        Reads("diffusers", "lora_unet_", "diffusers", _ALL),
        Reads("diffusers", "diffusion_model.", "diffusers", _ALL),
        Reads("diffusers", "transformer.", "diffusers", "A lora.down"),
        Reads("diffusers", "", "diffusers", "A+alpha down+alpha A.default A.default+alpha"),
    ),
)
