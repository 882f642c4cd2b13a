"""What decoding takes of a device's memory, from the layers that a VAE's configuration describes."""

from typing import Final

from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.subject import config_value, spatial_factor
from sigmascope.pipeline.prediction import Planned, Prediction, predict_peak
from sigmascope.probes.reading import attempt

TEMPORAL_FACTOR: Final = 4
"""Frames of a video for each frame of its latent, after the first."""


def vae_peak(
    found: Circumstances, *, batch_at_once: int | None = None, largest_side: int | None = None
) -> Prediction:
    """The peak of decoding the call's latents at once.

    Args:
        found: What is planned.
        batch_at_once: Images decoded together; None: all of them.
        largest_side: Pixels that are decoded together at most, as of a tile; None: the whole image.
    """
    name, vae = next(iter(found.subject.of_role("vae").items()), ("", None))
    if vae is None:
        return Prediction(unavailable={"bytes": "the pipeline has no VAE"})
    channels = config_value(vae, "latent_channels") or config_value(vae, "z_dim")
    if not isinstance(channels, int):
        return Prediction(unavailable={"bytes": "the VAE's configuration does not tell its latent channels"})
    is_video = config_value(vae, "z_dim") is not None
    planned = Planned(
        _latent_shape(found, channels, largest_side, is_video=is_video),
        "decoding",
        dtype=found.dtypes.get(name),
        device_type=found.hardware.kind,
        batch_at_once=batch_at_once,
    )
    read = attempt(lambda: predict_peak(vae, planned))
    return read.value or Prediction(unavailable={"bytes": read.reason or "it failed"})


def tile_side(vae: nn.Module) -> int | None:
    """Side of a VAE's tiles in pixels, by any of the names that diffusers has for it; None: it has no tiles.

    Args:
        vae: The VAE.
    """
    names = ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width")
    sides = [getattr(vae, name, None) for name in names]
    return next((side for side in sides if isinstance(side, int)), None)


def least_vae_bytes(found: Circumstances) -> int | None:
    """The peak of decoding with whatever the VAE offers to need less, as far as the configuration allows it.

    Args:
        found: What is planned.
    """
    config = found.config
    vae = next(iter(found.subject.of_role("vae").values()), None)
    sliced = 1 if config.vae_slicing is not False and hasattr(vae, "use_slicing") else None
    side = None if vae is None or config.vae_tiling is False else tile_side(vae)
    return vae_peak(found, batch_at_once=sliced, largest_side=side).bytes


def _latent_shape(
    found: Circumstances, channels: int, largest_side: int | None, *, is_video: bool
) -> tuple[int, ...]:
    factor, call = spatial_factor(found.subject), found.call
    frames = (1 + (call.num_frames - 1) // TEMPORAL_FACTOR,) if is_video else ()
    sides = (min(side, largest_side or side) // factor for side in (call.height, call.width))
    return (call.batch_size, channels, *frames, *sides)
