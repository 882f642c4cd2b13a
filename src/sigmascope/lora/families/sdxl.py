"""SDXL and its refiner, which reads 1280 features and has only the second text encoder."""

from typing import Final

from sigmascope.lora.families.family import Family, Reads
from sigmascope.lora.families.unet import BLOCKS, LOST, READS, SDXL_BLOCKS, SIGNATURES

SDXL: Final = Family(
    name="sdxl",
    title="SDXL",
    architecture="stable-diffusion-xl-v1-base",
    base_version="sdxl_base_v1-0",
    also_called=("sdxl_1.0", "stable-diffusion-xl"),  # AI Toolkit
    component="unet",
    signatures=SIGNATURES,
    blocks=BLOCKS,
    encoders={"text_encoder": ("clip_l",), "text_encoder_2": ("clip_g",)},
    lost=LOST,
    reads=(*READS, Reads("diffusers", "lora_unet_", "original", "down down+alpha")),
    context_widths=(2048, 1280),
    unet_blocks=SDXL_BLOCKS,
)
