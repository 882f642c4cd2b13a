"""Stable Diffusion 1."""

from typing import Final

from sigmascope.lora.families.family import KOHYA_ENCODERS, Family, InDiffusers
from sigmascope.lora.families.unet import BLOCKS, LOST, READS, SD_BLOCKS, SIGNATURES

SD15: Final = Family(
    name="sd15",
    title="Stable Diffusion 1.5",
    architecture="stable-diffusion-v1",
    base_version="sd_v1",
    also_called=("sd_1.5",),  # AI Toolkit
    component="unet",
    in_diffusers=InDiffusers(
        "UNet2DConditionModel", "StableDiffusionLoraLoaderMixin", {"cross_attention_dim": 768}
    ),
    signatures=SIGNATURES,
    blocks=BLOCKS,
    encoders={"text_encoder": ("clip_l",)},
    kohya_encoders={**KOHYA_ENCODERS, "text_encoder": "lora_te_"},
    kohya_naming="diffusers",
    lost=LOST,
    reads=READS,
    context_widths=(768,),
    unet_blocks=SD_BLOCKS,
    projects_by_convolution=True,
)
