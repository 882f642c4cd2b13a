"""Emergency dummy latents: zeros of the shape that the real ones would have had. They encode nothing."""

import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.pipeline.prediction_twin import NoTwinError, dry_run
from sigmascope.pipeline.vaes.adapter import Vae
from sigmascope.pipeline.vaes.comfyui_vae import ComfyuiVae
from sigmascope.pipeline.vaes.pictures import Pictures, unfolded
from sigmascope.records.finding import Finding
from sigmascope.records.latents import VaeFacts

FINDING = Finding(
    id="dummy_latents",
    severity="critical",
    message="The latents are zeros that stand in for an encoding: no picture was encoded.",
    advice="Make room for the encoding: smaller tiles, fewer frames, a lower resolution, or another device.",
    stage="latent_encoding",
)

_ROUND_UP = ("AutoencoderTiny", "AutoencoderKLHunyuanVideo", "AutoencoderKLLTXVideo")
"""They make one latent element more of a side that is no multiple of their factor; others drop the rest."""


def why_no_dummy(facts: VaeFacts) -> str | None:
    """What would have to be known for a dummy of the right shape, or None."""
    known = {
        "latent_channels": facts.latent_channels,
        "spatial_factor": facts.spatial_factor,
        "temporal_factor": facts.temporal_factor if facts.is_video else 1,
    }
    missing = [name for name, value in known.items() if value is None]
    return f"the VAE does not tell its {', '.join(missing)}" if missing else None


def dummy_latents(vae: Vae, pictures: Pictures, device: torch.device) -> Tensor:
    """Zeros shaped as the latents of these pictures would be.

    A run of the VAE without weights tells the shape, where that can be had; else its factors do.

    Args:
        vae: That did not encode them.
        pictures: What was to be encoded.
        device: Where the latents would be.

    Raises:
        ConfigError: Neither tells enough for the shape.
    """
    shape = _shape_seen(vae, pictures.tensor) or _shape_told(vae.facts, pictures.tensor)
    return unfolded(torch.zeros(shape, dtype=vae.latent_dtype, device=device), pictures.frames)


def _shape_seen(vae: Vae, pixels: Tensor) -> tuple[int, ...] | None:
    """Of one picture or video, so that slicing and the size of the batch do not matter."""
    if isinstance(vae, ComfyuiVae) or not hasattr(vae.vae, "config"):
        return None
    try:
        found = dry_run(vae.vae, (1, *pixels.shape[1:]), "encoding")
    except NoTwinError:
        return None
    return (pixels.shape[0], *found.result_shape[1:])


def _shape_told(facts: VaeFacts, pixels: Tensor) -> tuple[int, ...]:
    reason = why_no_dummy(facts)
    if reason is not None or facts.latent_channels is None or facts.spatial_factor is None:
        raise ConfigError(f"dummy: {reason}.", hint="Leave dummy latents out.")
    batch, _, *frames, height, width = pixels.shape
    sides = [_latent_length(length, facts.spatial_factor, facts.class_name) for length in (height, width)]
    times = [facts.latent_frames(count) or 1 for count in frames]
    return (batch, facts.latent_channels, *times, *sides)


def _latent_length(length: int, factor: int, class_name: str) -> int:
    return -(-length // factor) if class_name in _ROUND_UP else length // factor
