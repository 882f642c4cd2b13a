"""SDXL and its refiner, which reads 1280 features and has only the second text encoder."""

from typing import Final

from sigmascope.lora.families.family import Family, InDiffusers, Reads
from sigmascope.lora.families.unet import BLOCKS, LOST, READS, SDXL_BLOCKS, SIGNATURES

SDXL: Final = Family(
    name="sdxl",
    title="SDXL",
    architecture="stable-diffusion-xl-v1-base",
    base_version="sdxl_base_v1-0",
    also_called=("sdxl_1.0", "stable-diffusion-xl"),  # AI Toolkit
    component="unet",
    in_diffusers=InDiffusers(
        "UNet2DConditionModel",
        "StableDiffusionXLLoraLoaderMixin",
        {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (320, 640, 1280),
            "cross_attention_dim": 2048,
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    signatures=SIGNATURES,
    blocks=BLOCKS,
    encoders={"text_encoder": ("clip_l",), "text_encoder_2": ("clip_g",)},
    lost=LOST,
    reads=(*READS, Reads("diffusers", "lora_unet_", "original", "down down+alpha")),
    context_widths=(2048, 1280),
    unet_blocks=SDXL_BLOCKS,
)
