"""What all Stable Diffusion U-Nets share. Their layers are translated by rule (`lora.layer_names`)."""

from typing import Final

from sigmascope.lora.families.family import COMFYUI_READS, Lost, Reads, UnetBlocks

SIGNATURES: Final = {
    "diffusers": "conv_in.weight conv_out.weight time_embedding.linear_1.weight",
    "sgm": "input_blocks.0.0.weight out.2.weight time_embed.0.weight",
}
BLOCKS: Final = """
    conv_in
    time_embedding
    time_embed = time_embedding
    add_embedding
    label_emb = add_embedding
    down_blocks.#
    input_blocks.# = down_blocks
    mid_block
    middle_block = mid_block
    up_blocks.#
    output_blocks.# = up_blocks
    conv_norm_out
    out.0 = conv_norm_out
    conv_out
    out.2 = conv_out
    out
"""
LOST: Final = (Lost("diffusers", "comfyui", or_refused=True), Lost("comfyui", "peft", r".*\.attn.*\.to_.*"))
"""ComfyUI finds 234 of SDXL's 794 layers by PEFT's names; those of attention are lost."""
READS: Final = (
    *COMFYUI_READS,
    *(Reads("comfyui", start, "diffusers") for start in ("lora_unet_", "lycoris_", "unet.", "")),
    Reads("diffusers", "lora_unet_", "diffusers", "down down+alpha", leaves_out=r"add_embedding\..*"),
    Reads("diffusers", "lora_unet_", "original", "down down+alpha", known=False),
    Reads("diffusers", "unet.", "diffusers", "A lora.down"),
)
SD_BLOCKS: Final = UnetBlocks(attention=frozenset({1, 2, 3}))
"""SD 1 and SD 2."""
SDXL_BLOCKS: Final = UnetBlocks()
"""SDXL and LBM."""
