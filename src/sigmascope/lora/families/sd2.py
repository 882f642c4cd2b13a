"""Stable Diffusion 2."""

from typing import Final

from sigmascope.lora.families.family import KOHYA_ENCODERS, Family, InDiffusers
from sigmascope.lora.families.unet import BLOCKS, LOST, READS, SD_BLOCKS, SIGNATURES

SD2: Final = Family(
    name="sd2",
    title="Stable Diffusion 2",
    architecture="stable-diffusion-v2",
    base_version="sd_v2",
    also_called=("sd_2.1",),  # AI Toolkit
    component="unet",
    in_diffusers=InDiffusers(
        "UNet2DConditionModel",
        "StableDiffusionLoraLoaderMixin",
        {"cross_attention_dim": 1024, "use_linear_projection": True},
    ),
    signatures=SIGNATURES,
    blocks=BLOCKS,
    encoders={"text_encoder": ("clip_h",)},
    kohya_encoders={**KOHYA_ENCODERS, "text_encoder": "lora_te_"},
    kohya_naming="diffusers",
    lost=LOST,
    reads=READS,
    context_widths=(1024,),
    unet_blocks=SD_BLOCKS,
)
