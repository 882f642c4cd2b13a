"""Which axis of a tensor is what: of pictures by the number of colours, of latents by the VAE's channels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sigmascope.records.latents import Layout

_COLOURS = (3, 1, 4)
_SMALLEST_SIDE = 4
_OTHER_END: dict[int, tuple[Layout, Layout]] = {3: ("CHW", "HWC"), 4: ("BCHW", "BHWC")}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a tensor by what its axes are; None for an axis that it lacks."""

    batch: int | None = None
    frames: int | None = None
    channels: int | None = None
    height: int | None = None
    width: int | None = None


class Axes(NamedTuple):
    """A layout, and what it was told by."""

    layout: Layout
    evidence: str


def sizes_of(shape: Sequence[int], layout: Layout) -> Sizes:
    """The sizes of a shape in a layout that names every axis of it.

    Raises:
        ValueError: The layout has another number of axes.
    """
    by_letter = dict(zip(layout, shape, strict=True))
    return Sizes(*(by_letter.get(letter) for letter in "BFCHW"))


def picture_layout(
    shape: Sequence[int], channels: int | None = None, *, is_video: bool = False
) -> Layout | None:
    """The layout of pictures or videos as pipelines and ComfyUI hand them over; None if no axis can be colours.

    Args:
        shape: Of 3 to 5 axes. The last wins where it and an earlier one could both be colours.
        channels: What the VAE takes; otherwise 3, 1 or 4 are colours.
        is_video: Whether the first of 4 axes counts frames and not separate pictures.
    """
    for colours in dict.fromkeys(((channels,) if channels else (), *((count,) for count in _COLOURS))):
        layout = _picture_layout(shape, colours)
        if layout is not None:
            return {"BCHW": "FCHW", "BHWC": "FHWC"}.get(layout, layout) if is_video else layout  # type: ignore[return-value]
    return None


def _picture_layout(shape: Sequence[int], colours: Sequence[int]) -> Layout | None:
    ends_in_colours = shape[-1:] and shape[-1] in colours and min(shape[-3:-1], default=0) > _SMALLEST_SIDE
    if len(shape) == 5:
        return _five(shape, colours, bool(ends_in_colours))
    if len(shape) not in _OTHER_END:
        return None
    first, last = _OTHER_END[len(shape)]
    if ends_in_colours:
        return last
    if shape[-3] in colours:
        return first
    return "CFHW" if len(shape) == 4 and shape[0] in colours else None


def _five(shape: Sequence[int], colours: Sequence[int], ends_in_colours: bool) -> Layout | None:
    if ends_in_colours:
        return "BFHWC"
    if shape[1] in colours:
        return "BCFHW"
    return "BFCHW" if shape[2] in colours else None


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
    by_channels = _only(candidates, shape, "C", channels)
    if by_channels is not None:
        return Axes(by_channels, f"the VAE's {channels} latent channels")
    by_frames = _only(candidates, shape, "F", frames)
    if by_frames is not None:
        return Axes(by_frames, f"{frames} latent frames, as many as expected")
    either = channels is not None and shape[candidates[0].index("C")] == channels
    usual = "the VAE's latent channels fit it" if either else "the usual one: nothing tells its axes apart"
    return Axes(candidates[0], usual)


_CANDIDATES: dict[int, tuple[Layout, ...]] = {
    5: ("BCFHW", "BFCHW"),
    4: ("BCHW", "CFHW", "BHWC"),
    3: ("CHW",),
}
"""The first is what VAEs give; a 3-D latent that is packed is known before this is asked."""


def _only(candidates: Iterable[Layout], shape: Sequence[int], axis: str, size: int | None) -> Layout | None:
    """The one layout that has `size` on an axis; of several the first where they agree with it equally is none."""
    fitting = [one for one in candidates if axis in one and size == shape[one.index(axis)]]
    return fitting[0] if len(fitting) == 1 else None
