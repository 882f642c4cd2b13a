"""LBM: SDXL's U-Net with cross attention that reads the hidden states; recognised by that or by `denoiser.`."""

from typing import Final

from sigmascope.lora.families.family import Family, Lost
from sigmascope.lora.families.unet import BLOCKS, LOST, SDXL_BLOCKS, SIGNATURES

LBM: Final = Family(
    name="lbm",
    title="LBM",
    architecture="lbm",
    base_version="lbm",
    component="unet",
    signatures=SIGNATURES,
    blocks=BLOCKS,
    kohya_naming="diffusers",
    lost=(*LOST, Lost("diffusers", "kohya")),
    unet_blocks=SDXL_BLOCKS,
    steps=1,
)
