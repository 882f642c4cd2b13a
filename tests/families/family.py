"""The seven families that diffusers' pipelines are tested with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.families import components

NEGATIVE = "blurry, low quality"


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: As `sigmascope.lora.families` calls it, and `wan_vace`.
        pipeline_class: Its name in diffusers.
        denoiser: The pipeline's component: `unet` or `transformer`.
        components: Make the parts.
        call: What the pipeline is called with, besides prompt and generator.
        lora_encoders: Text encoders that diffusers' loader takes LoRA modules for.
    """

    name: str
    pipeline_class: str
    denoiser: str
    components: Callable[[], Mapping[str, Any]]
    call: Mapping[str, Any] = field(default_factory=dict)
    lora_encoders: tuple[str, ...] = ()


_SMALL = {"height": 32, "width": 32, "num_inference_steps": 2}
_VIDEO = _SMALL | {"num_frames": 5, "negative_prompt": NEGATIVE, "max_sequence_length": 32}
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family(
            "sd15",
            "StableDiffusionPipeline",
            "unet",
            components.sd15,
            _SMALL | {"negative_prompt": NEGATIVE},
            ("text_encoder",),
        ),
        Family(
            "sdxl",
            "StableDiffusionXLPipeline",
            "unet",
            components.sdxl,
            _SMALL | {"negative_prompt": NEGATIVE},
            ("text_encoder", "text_encoder_2"),
        ),
        Family(
            "flux",
            "FluxPipeline",
            "transformer",
            components.flux,
            _SMALL | {"max_sequence_length": 32},
            ("text_encoder",),
        ),
        Family(
            "sd3",
            "StableDiffusion3Pipeline",
            "transformer",
            components.sd3,
            _SMALL | {"negative_prompt": NEGATIVE, "max_sequence_length": 32},
            ("text_encoder", "text_encoder_2"),
        ),
        Family(
            "qwen_image",
            "QwenImagePipeline",
            "transformer",
            components.qwen_image,
            _SMALL | {"negative_prompt": NEGATIVE, "true_cfg_scale": 4.0},
        ),
        Family("wan", "WanPipeline", "transformer", components.wan, _VIDEO),
        Family("wan_vace", "WanVACEPipeline", "transformer", lambda: components.wan(vace=True), _VIDEO),
    )
}
