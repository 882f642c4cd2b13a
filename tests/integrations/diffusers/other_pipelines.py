"""Pipelines of diffusers beyond the seven families, small and offline: each with what it is called with."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.families import encoders, make_pipeline, tokenizers, vaes
from tests.families.weights import built
from torch import Tensor

SIZE = {"num_inference_steps": 4, "height": 32, "width": 32, "output_type": "pt"}
Made = tuple[Any, dict[str, Any]]


def picture() -> Image.Image:
    return Image.fromarray((np.arange(32 * 32 * 3) % 255).reshape(32, 32, 3).astype("uint8"))


def _sd15() -> dict[str, Any]:
    return dict(make_pipeline("sd15").components) | {"requires_safety_checker": False}


def image_to_image() -> Made:
    from diffusers import StableDiffusionImg2ImgPipeline

    call = {"prompt": "a fox", "image": picture(), "strength": 0.5, "num_inference_steps": 4}
    return StableDiffusionImg2ImgPipeline(**_sd15()), call | {"output_type": "pt"}


def controlnet() -> Made:
    """Its VAE has four levels, since a ControlNet takes pictures of eight times the latent's size."""
    from diffusers import AutoencoderKL, ControlNetModel, StableDiffusionControlNetPipeline

    parts = _sd15()
    parts["controlnet"] = built(lambda: ControlNetModel.from_unet(parts["unet"]))
    parts["vae"] = built(
        lambda: AutoencoderKL(
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
        )
    )
    call = {"prompt": "a fox", "image": picture(), **SIZE, "height": 64, "width": 64}
    return StableDiffusionControlNetPipeline(**parts), call


def pixart() -> Made:
    from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    transformer = built(
        lambda: PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            cross_attention_dim=16,
            sample_size=16,
            caption_channels=encoders.T5_WIDTH,
        )
    )
    pipeline = PixArtAlphaPipeline(
        tokenizer=tokenizers.t5_tokenizer(),
        text_encoder=encoders.t5(),
        vae=vaes.image_vae(),
        transformer=transformer,
        scheduler=DPMSolverMultistepScheduler(),
    )
    more = {"use_resolution_binning": False, "max_sequence_length": 32, "clean_caption": False}
    return pipeline, {"prompt": "a fox", **more, **SIZE}


def ltx_video() -> Made:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    transformer = built(
        lambda: LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=encoders.T5_WIDTH,
        )
    )
    scaling = (True, True, False, False)
    vae = built(
        lambda: AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8,) * 4,
            decoder_block_out_channels=(8,) * 4,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
            spatio_temporal_scaling=scaling,
            decoder_spatio_temporal_scaling=scaling,
            patch_size=1,
            patch_size_t=1,
        )
    )
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=encoders.t5(),
        tokenizer=tokenizers.t5_tokenizer(),
        transformer=transformer,
    )
    return pipeline, {"prompt": "a fox", "num_frames": 9, "max_sequence_length": 32, **SIZE}


def pixels() -> Made:
    """DDPM: no text, no VAE."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

    unet = built(
        lambda: UNet2DModel(
            sample_size=16,
            layers_per_block=1,
            block_out_channels=(8, 16),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
    )
    return DDPMPipeline(unet, DDPMScheduler()), {"num_inference_steps": 4, "output_type": "np"}


def made_by(pipeline: Any, call: dict[str, Any]) -> Tensor:
    """What the pipeline makes with seed 0."""
    output = pipeline(**call, generator=torch.Generator().manual_seed(0))[0]
    while isinstance(output, list | tuple):
        output = output[0]
    return torch.as_tensor(output)
