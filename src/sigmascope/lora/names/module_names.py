"""What the name of a LoRA's module says: the part of the model, and the layer's path inside that part."""

from dataclasses import dataclass
from typing import Final

from sigmascope.lora.models.layout import Part

_TEXT_3: Final[tuple[Part, ...]] = (
    "text_encoder_3",
    "text_encoder_2",
)  # T5 is FLUX' second encoder, SD 3's third

_FLAT: Final[tuple[tuple[str, tuple[Part, ...]], ...]] = (
    ("lora_unet_", ("denoiser",)),
    ("lora_transformer_", ("denoiser",)),
    ("lycoris_", ("denoiser",)),
    ("lora_te1_", ("text_encoder",)),
    ("lora_te2_", ("text_encoder_2", "text_encoder")),
    ("lora_te3_", _TEXT_3),
    ("lora_te_", ("text_encoder", "text_encoder_2")),
)
_DOTTED: Final[tuple[tuple[str, tuple[Part, ...]], ...]] = (
    ("model.diffusion_model.", ("denoiser",)),
    ("diffusion_model.", ("denoiser",)),
    ("denoiser.", ("denoiser",)),
    ("unet.", ("denoiser",)),
    ("transformer_2.", ("denoiser_2",)),
    ("text_encoder.", ("text_encoder",)),
    ("text_encoder_2.", ("text_encoder_2",)),
    ("text_encoder_3.", ("text_encoder_3",)),
    ("text_encoders.clip_l.transformer.", ("text_encoder",)),
    ("text_encoders.clip_h.transformer.", ("text_encoder",)),
    ("text_encoders.clip_g.transformer.", ("text_encoder_2", "text_encoder")),
    ("text_encoders.t5xxl.transformer.", _TEXT_3),
    ("text_encoders.umt5xxl.transformer.", ("text_encoder",)),
    ("text_encoders.qwen25_7b.transformer.", ("text_encoder",)),
    ("cond_stage_model.transformer.", ("text_encoder",)),
    ("cond_stage_model.model.", ("text_encoder",)),
    ("conditioner.embedders.0.transformer.", ("text_encoder",)),
    ("conditioner.embedders.0.model.", ("text_encoder_2",)),
    ("conditioner.embedders.1.model.", ("text_encoder_2",)),
    ("vae.vae_model.", ("vae",)),
    ("vae.", ("vae",)),
    ("first_stage_model.", ("vae",)),
)
_TRANSFORMER: Final = "transformer."  # also the start of a path in some text encoders


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module's name, taken apart.

    Attributes:
        parts: The parts of the model that it may be of, the likeliest first; none where the name does not say.
        path: The layer's path inside the part.
        is_flat: Whether the path has underscores where it had dots.
    """

    parts: tuple[Part, ...]
    path: str
    is_flat: bool = False


def parse_name(name: str) -> ModuleName:
    """Take the name of a LoRA's module apart, in any format."""
    if "." not in name:
        for prefix, parts in _FLAT:
            if name.startswith(prefix):
                return ModuleName(parts, name.removeprefix(prefix), is_flat=True)
    for prefix, parts in _DOTTED:
        if name.startswith(prefix):
            return ModuleName(parts, name.removeprefix(prefix))
    if name.startswith(_TRANSFORMER) and not name.startswith(f"{_TRANSFORMER}resblocks."):
        return ModuleName(("denoiser",), name.removeprefix(_TRANSFORMER))
    return ModuleName((), name)
