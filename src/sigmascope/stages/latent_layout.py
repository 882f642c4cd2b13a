"""Which axis of a tensor is what, how large packed latents are unpacked, and what size a latent should have.

Pictures are told by the number of colours, latents by the VAE's channels.

Some transformers take latents as a list of patches: FLUX, FLUX.2 and Qwen-Image make one token of 2x2 latent
pixels, LTX of one: (batch, tokens, channels·p²).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from sigmascope.records.latents import Layout, VaeFacts

COLOURS_AND_ALPHA = 4
_COLOURS = (3, 1, COLOURS_AND_ALPHA)
_SMALLEST_SIDE = 4
_COLOURS_LAST: dict[int, Layout] = {3: "HWC", 4: "BHWC", 5: "BFHWC"}
_COLOURS_BEFORE: dict[int, tuple[Layout, ...]] = {
    3: ("CHW",),
    4: ("BCHW", "CFHW"),
    5: ("BCFHW", "BFCHW"),
}
_CANDIDATES: dict[int, tuple[Layout, ...]] = {
    5: ("BCFHW", "BFCHW"),
    4: ("BCHW", "CFHW", "BHWC"),
    3: ("CHW",),
}
"""The first is what VAEs give; a 3-D latent that is packed is known before this is asked."""
_PATCHES = (1, 2)  # latent pixels along a side of a token
_USUAL_PATCH = 2


def picture_layout(
    shape: Sequence[int], channels: int | None = None, *, is_video: bool = False
) -> Layout | None:
    """The layout of pictures or videos as pipelines and ComfyUI hand them over; None if no axis can be colours.

    Args:
        shape: Of 3 to 5 axes. The last wins where it and an earlier one could both be colours. A first axis of 1
            is a batch, such as a mask's, and a grey picture's colour only to a VAE that takes such.
        channels: What the VAE takes; otherwise 3, 1 or 4 are colours.
        is_video: Whether the first of 4 axes counts frames and not separate pictures.
    """
    layout = _picture_layout(shape, channels)
    return {"BCHW": "FCHW", "BHWC": "FHWC"}.get(layout or "", layout) if is_video else layout  # type: ignore[return-value]


def _picture_layout(shape: Sequence[int], channels: int | None) -> Layout | None:
    """Colours are on the last axis, wherever that may be; else where the likeliest number of them is."""
    colours = tuple(dict.fromkeys((channels, *_COLOURS) if channels else _COLOURS))
    if shape[-1:] and shape[-1] in colours and min(shape[-3:-1], default=0) > _SMALLEST_SIDE:
        return _COLOURS_LAST.get(len(shape))
    layouts = _COLOURS_BEFORE.get(len(shape), ())
    fitting = (one for count in colours for one in layouts if shape[one.index("C")] == count)
    return next((one for one in fitting if one[0] != "C" or shape[0] != 1 or channels == 1), None)


def without_mask(items: Sequence[object]) -> Sequence[object]:
    """The pictures of a list: ComfyUI's LoadImage gives (batch, height, width, colours) and a mask without colours."""
    if len(items) != 2:
        return items
    picture, mask = (tuple(getattr(item, "shape", ())) for item in items)
    beside = len(picture) == 4 and len(mask) == 3 and picture[0] == mask[0]
    return items[:1] if beside and picture_layout(picture) == "BHWC" else items


class Axes(NamedTuple):
    """A layout, and what it was told by."""

    layout: Layout
    evidence: str


def latent_layout(
    shape: Sequence[int], channels: int | None, frames: int | None, given: Layout | None = None
) -> Axes | None:
    """The layout of a latent; None for a rank that no layout has.

    Args:
        shape: Of 3 to 5 axes.
        channels: The VAE's latent channels, the best evidence.
        frames: How many latent frames are expected, the next best.
        given: What the caller says, which is not questioned unless it cannot be.
    """
    if given is not None and len(given) == len(shape) and given != "packed":
        return Axes(given, "the caller")
    candidates = _CANDIDATES.get(len(shape))
    if candidates is None:
        return None
    by_channels = _only_layout(candidates, shape, "C", channels)
    if by_channels is not None:
        return Axes(by_channels, f"the VAE's {channels} latent channels")
    by_frames = _only_layout(candidates, shape, "F", frames)
    if by_frames is not None:
        return Axes(by_frames, f"{frames} latent frames, as many as expected")
    either = channels is not None and shape[candidates[0].index("C")] == channels
    usual = "the VAE's latent channels fit it" if either else "the usual one: nothing tells its axes apart"
    return Axes(candidates[0], usual)


def _only_layout(
    candidates: Iterable[Layout], shape: Sequence[int], axis: str, size: int | None
) -> Layout | None:
    """The one layout that has `size` on an axis; of several the first where they agree with it equally is none."""
    fitting = [one for one in candidates if axis in one and size == shape[one.index(axis)]]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a tensor by what its axes are; None for an axis that it lacks."""

    batch: int | None = None
    frames: int | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None


def sizes_of(shape: Sequence[int], layout: Layout) -> Sizes:
    """The sizes of a shape in a layout that names every axis of it.

    Raises:
        ValueError: The layout has another number of axes.
    """
    by_letter = dict(zip(layout, shape, strict=True))
    return Sizes(*(by_letter.get(letter) for letter in "BFCHW"))


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
        factor = _packed_factor(tokens, patch, vae, height, width)
        if factor is None or channels * patch**2 != values or not _channels_fit(channels, patch, vae):
            continue
        high, wide = height // (factor * patch), width // (factor * patch)
        frames = _packed_frames(vae, length)
        if high * wide * (frames or 1) == tokens and tokens:
            return Unpacked(batch, channels, frames, high * patch, wide * patch, patch)
    return None


def _packed_factor(tokens: int, patch: int, vae: VaeFacts | None, height: int, width: int) -> int | None:
    """Picture pixels along a latent pixel: the VAE's, else what the number of tokens says."""
    if vae is not None and vae.spatial_factor is not None:
        return vae.spatial_factor
    if tokens < 1:
        return None
    factor = math.isqrt(height * width // (tokens * patch**2))
    return factor or None


def _channels_fit(channels: int, patch: int, vae: VaeFacts | None) -> bool:
    known = None if vae is None else vae.latent_channels
    return patch == _USUAL_PATCH if known is None else channels == known


def _packed_frames(vae: VaeFacts | None, length: int | None) -> int | None:
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


@dataclass(frozen=True, slots=True)
class Video:
    """Frames, height and width of the pictures, in pixels; None where it is unknown or makes no sense."""

    length: int | None = None
    height: int | None = None
    width: int | None = None

    def or_else(self, other: "Video") -> "Video":
        """The same with what is unknown taken from another."""
        return Video(
            other.length if self.length is None else self.length,
            other.height if self.height is None else self.height,
            other.width if self.width is None else self.width,
        )


@dataclass(frozen=True, slots=True)
class ExpectedLatent:
    """What a VAE should give for a video. `frames` is None for pictures, all else where it is unknown."""

    channels: int | None
    frames: int | None
    height: int | None
    width: int | None

    @property
    def shape(self) -> list[int] | None:
        """[channels, frames, height, width] without the frames of pictures; None unless all is known."""
        if self.channels is None or self.height is None or self.width is None:
            return None
        return [self.channels, *([] if self.frames is None else [self.frames]), self.height, self.width]


def expected_latent(vae: VaeFacts | None, video: Video) -> ExpectedLatent:
    """From the VAE's channels and factors; a side that the factor does not divide is cut off."""
    if vae is None:
        return ExpectedLatent(None, None, None, None)
    factor = vae.spatial_factor
    frames = vae.latent_frames(video.length) if vae.is_video and video.length is not None else None
    return ExpectedLatent(
        vae.latent_channels, frames, _divided(video.height, factor), _divided(video.width, factor)
    )


def _divided(side: int | None, factor: int | None) -> int | None:
    return None if side is None or factor is None else side // factor


def video_of(length: object, height: object, width: object) -> Video:
    """The dimensions that a caller names, without those that are none."""
    return Video(_size_or_none(length, least=0), _size_or_none(height), _size_or_none(width))


def _size_or_none(size: object, least: int = 1) -> int | None:
    if (
        isinstance(size, bool)
        or not isinstance(size, int | float)
        or size != size
        or abs(size) == float("inf")
    ):
        return None
    return int(size) if size == int(size) and size >= least else None
