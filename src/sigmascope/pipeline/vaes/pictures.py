"""Pictures as a VAE takes them: which axis is what, frames on an axis of their own or on the batch's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.pipeline.samples import sample_facts
from sigmascope.pipeline.vaes.gathering import gathered
from sigmascope.pipeline.vaes.values import Values
from sigmascope.records.latents import Layout, SampleFacts, VaeFacts
from sigmascope.stages.latents.layouts import picture_layout

_CHANNELS_FIRST: dict[int, Layout] = {3: "CHW", 4: "BCHW", 5: "BCFHW"}


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is to be encoded.

    Attributes:
        tensor: (batch, channels, height, width), or (batch, channels, frames, height, width) for a VAE of
            videos; the caller's own memory where that is possible, in its dtype, where it lies.
        values: What its numbers mean.
        facts: Of what the caller handed over.
        frames: Frames of each video that lie on the batch axis, for a VAE of pictures; None if none do.
    """

    tensor: Tensor
    values: Values
    facts: SampleFacts
    frames: int | None = None


def pictures(
    frames: object,
    facts: VaeFacts,
    *,
    layout: Layout | None = None,
    values: Values | None = None,
    default_values: Values | None = None,
    one_each: bool = False,
) -> Pictures:
    """Arrange what the caller has for a VAE.

    Args:
        frames: A tensor, array or PIL image, or a list of them.
        facts: Of the VAE.
        layout: What each axis is; None decides by where the VAE's channels are.
        values: What the numbers mean; None: bytes for integers, [0, 1] for floats with channels last (ComfyUI,
            NumPy), [-1, 1] for floats with channels first (diffusers).
        default_values: What floats mean to this VAE, whichever axis the channels are on.
        one_each: Several pictures are as many pictures to this VAE, though it has an axis for frames.

    Raises:
        ConfigError: No pictures, sizes that differ, axes or numbers that are none of these.
    """
    channels = facts.image_channels or 3
    tensor, form = gathered(frames, channels)
    axes = _axes(tensor, facts) if layout is None else layout
    _check_axes(tensor, axes, facts.image_channels)
    meaning = values or _values_of(tensor, axes, default_values)
    arranged, count = _arranged(tensor, axes, facts.is_video, one_each=one_each)
    return Pictures(arranged, meaning, sample_facts(tensor, axes, form), count)


def folded(tensor: Tensor) -> tuple[Tensor, int | None]:
    """A video (batch, channels, frames, …) with its frames on the batch axis, and how many they were."""
    if tensor.ndim != 5:
        return tensor, None
    return tensor.movedim(2, 1).flatten(0, 1), tensor.shape[2]


def unfolded(tensor: Tensor, frames: int | None) -> Tensor:
    """What `folded` folded, with frames on the third axis again."""
    if frames is None or tensor.ndim != 4:
        return tensor
    return tensor.reshape(-1, frames, *tensor.shape[1:]).movedim(1, 2)


def _axes(tensor: Tensor, facts: VaeFacts) -> Layout:
    axes = picture_layout(tensor.shape, facts.image_channels, is_video=bool(facts.is_video))
    if axes is None and facts.image_channels is None:
        axes = _CHANNELS_FIRST.get(tensor.ndim)
    if axes is None:
        raise ConfigError(
            f"frames: no axis of {tuple(tensor.shape)} holds the {facts.image_channels or 3} channels that the "
            "VAE takes.",
            hint="Give pictures as BCHW or BHWC, videos as BCFHW or BFHWC, and say which with layout=.",
        )
    return axes


def _check_axes(tensor: Tensor, axes: Layout, channels: int | None) -> None:
    if axes == "packed" or tensor.ndim != len(axes):
        raise ConfigError(
            f"layout: {axes!r} does not fit frames of shape {tuple(tensor.shape)}.",
            hint="Name each axis once: B for batch, C for channels, F for frames, H for height, W for width.",
        )
    found = tensor.shape[axes.index("C")]
    if channels is not None and found != channels:
        raise ConfigError(
            f"frames: {found} channels in {tuple(tensor.shape)}, the VAE takes {channels}.",
            hint="Convert the pictures, or say which axis is what with layout=.",
        )


def _values_of(tensor: Tensor, axes: str, default: Values | None) -> Values:
    if tensor.is_floating_point():
        return default or ("unit" if axes.endswith("C") else "signed")
    if tensor.dtype is torch.uint8:
        return "bytes"
    raise ConfigError(
        f"frames: {tensor.dtype} has no range that is known.", hint="Give uint8, floats, or values=."
    )


def _arranged(
    tensor: Tensor, layout: Layout, is_video: bool | None, *, one_each: bool
) -> tuple[Tensor, int | None]:
    """Batch and channels first, and how many frames of each video lie on the batch axis."""
    axes: str = layout
    if len(axes) == 3:
        tensor, axes = tensor[None], "B" + axes
    if "B" not in axes:
        apart = axes[0] == "F" and (one_each or not is_video)
        tensor, axes = (tensor, axes.replace("F", "B")) if apart else (tensor[None], "B" + axes)
    wanted = "BCFHW" if "F" in axes else "BCHW"
    tensor = tensor.permute([axes.index(axis) for axis in wanted])
    if is_video and tensor.ndim == 4:
        tensor = tensor.unsqueeze(2)
    return folded(tensor) if is_video is False else (tensor, None)
