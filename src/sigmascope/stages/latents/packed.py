"""Latents that transformers take as a list of patches: how large they are unpacked, and unpacking them.

FLUX, FLUX.2 and Qwen-Image make one token of 2x2 latent pixels, LTX of one: (batch, tokens, channels·p²).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sigmascope.records.latents import VaeFacts

_PATCHES = (1, 2)
_USUAL_PATCH = 2


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The latent that tokens stand for. `frames` is None for pictures; `patch` is latent pixels along a side."""

    batch: int
    channels: int
    frames: int | None
    height: int
    width: int
    patch: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, channels, height, width), with frames after the channels if there are some."""
        frames = () if self.frames is None else (self.frames,)
        return (self.batch, self.channels, *frames, self.height, self.width)


def unpacked(
    shape: Sequence[int], vae: VaeFacts | None, length: int | None, height: int | None, width: int | None
) -> Unpacked | None:
    """What (batch, tokens, values) are unpacked; None if they fit no latent of pictures of that size.

    Args:
        shape: Of the packed latent.
        vae: Its channels and factors; without them FLUX's 2x2 patches are tried.
        length: Frames of the video.
        height: Of the pictures, in pixels.
        width: Likewise.
    """
    if len(shape) != 3 or height is None or width is None:
        return None
    batch, tokens, values = shape
    for patch in _PATCHES:
        channels = values // patch**2
        factor = _factor(tokens, patch, vae, height, width)
        if factor is None or channels * patch**2 != values or not _fits(channels, patch, vae):
            continue
        high, wide = height // (factor * patch), width // (factor * patch)
        frames = _frames(vae, length)
        if high * wide * (frames or 1) == tokens and tokens:
            return Unpacked(batch, channels, frames, high * patch, wide * patch, patch)
    return None


def _fits(channels: int, patch: int, vae: VaeFacts | None) -> bool:
    known = None if vae is None else vae.latent_channels
    return patch == _USUAL_PATCH if known is None else channels == known


def _factor(tokens: int, patch: int, vae: VaeFacts | None, height: int, width: int) -> int | None:
    """Picture pixels along a latent pixel: the VAE's, else what the number of tokens says."""
    if vae is not None and vae.spatial_factor is not None:
        return vae.spatial_factor
    if tokens < 1:
        return None
    factor = math.isqrt(height * width // (tokens * patch**2))
    return factor or None


def _frames(vae: VaeFacts | None, length: int | None) -> int | None:
    """Latent frames of a VAE whose latents have an axis of them."""
    if vae is None or not vae.is_video or vae.temporal_factor == 1:
        return None
    return None if length is None else vae.latent_frames(length)


def unpack(latent: Tensor, sizes: Unpacked) -> Tensor:
    """The latent in the shape `sizes.shape`, from (batch, tokens, channels·p²).

    A token's values are ordered channel, row, column; tokens frame, row, column. Checked against the
    packing of diffusers' FLUX, FLUX.2, Qwen-Image and LTX pipelines.
    """
    p, frames = sizes.patch, sizes.frames or 1
    high, wide = sizes.height // p, sizes.width // p
    grid = latent.reshape(sizes.batch, frames, high, wide, sizes.channels, p, p)
    return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(sizes.shape)
