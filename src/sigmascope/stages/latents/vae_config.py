"""What the config and the layers of a diffusers VAE say of its latents."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from sigmascope.probes.walking import modules_in

_VIDEO = frozenset(
    {"temperal_downsample", "temporal_compression_ratio", "temporal_expansions", "scale_factor_temporal"}
)
_LATENT_CHANNELS = ("latent_channels", "z_dim", "vq_embed_dim", "encoder_hidden_size")
_PICTURE_CHANNELS = ("in_channels", "input_channels", "out_channels")
_WIDTHS = ("down_block_out_channels", "encoder_block_out_channels", "block_out_channels")


def config_facts(vae: object, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `VaeFacts` that say something of latents, None where nothing tells."""
    is_video = _is_video(vae, config)
    return {
        "latent_channels": _first(config, _LATENT_CHANNELS),
        "image_channels": _picture_channels(config),
        "spatial_factor": _spatial(vae, config),
        "temporal_factor": _temporal(vae, config) if is_video else 1,
        "first_frame_apart": is_video and _is_causal(vae, config),
        "is_video": is_video,
    }


def whole(number: object) -> int | None:
    """A positive whole number, of whatever type; None for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float) or number < 1:
        return None
    integer = int(number)
    return integer if integer == number else None


def _picture_channels(config: Mapping[str, Any]) -> int | None:
    """Where `in_channels` counts what patches or Fourier features make of them, a picture still has 3."""
    if whole(config.get("patch_size")) is not None or "temporal_expansions" in config:
        return 3
    return _first(config, _PICTURE_CHANNELS)


def _is_video(vae: object, config: Mapping[str, Any]) -> bool:
    """Whether frames have an axis of their own: a factor of time in the config, or 3-D layers to encode."""
    return bool(_VIDEO & config.keys()) or any(isinstance(part, nn.Conv3d) for part in _encoder_parts(vae))


def _is_causal(vae: object, config: Mapping[str, Any]) -> bool:
    told = next((config[name] for name in ("encoder_causal", "is_causal") if name in config), None)
    if told is not None:
        return bool(told)
    return any("Causal" in type(part).__name__ for part in _encoder_parts(vae))


def _encoder_parts(vae: object) -> Iterator[nn.Module]:
    encoder = getattr(vae, "encoder", vae)
    return modules_in(encoder) if isinstance(encoder, nn.Module) else iter(())


def _spatial(vae: object, config: Mapping[str, Any]) -> int | None:
    stages = config.get("temperal_downsample")
    if isinstance(stages, list | tuple):  # WAN and Qwen-Image: the layers, whatever the config claims
        return (1 << len(stages)) * (whole(config.get("patch_size")) or 1)
    told = _own(vae, "spatial_compression_ratio")
    told = told or _first(config, ("spatial_compression_ratio", "scale_factor_spatial"))
    widths = next((config[name] for name in _WIDTHS if isinstance(config.get(name), list | tuple)), None)
    return told or (None if widths is None else 1 << (len(widths) - 1))


def _temporal(vae: object, config: Mapping[str, Any]) -> int | None:
    stages = config.get("temperal_downsample")
    if isinstance(stages, list | tuple):
        return 1 << sum(map(bool, stages))
    expansions = config.get("temporal_expansions")
    if isinstance(expansions, list | tuple):
        return int(math.prod(expansions))
    told = _own(vae, "temporal_compression_ratio")
    return told or _first(config, ("temporal_compression_ratio", "scale_factor_temporal"))


def _own(vae: object, name: str) -> int | None:
    """An attribute of the object itself: asking diffusers for one that only its config has makes it warn."""
    return whole(vars(vae).get(name))


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = (whole(config.get(name)) for name in names)
    return next((number for number in found if number is not None), None)
