"""PIL images, arrays and tensors turned into the tensor that a VAE takes.

`pictures` gathers them in whatever form the caller has them, finds out which axis is which and what the numbers
mean, and puts frames on an axis of their own or on the batch's. `rescaled` gives the same picture in another value
range. `sample_facts` notes what goes in and comes out, for the record.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.probes import tensor_facts
from sigmascope.records.latents import Layout, SampleFacts, VaeFacts
from sigmascope.records.run import Finding, TensorFacts
from sigmascope.stages.image_facts import COLOURS_AND_ALPHA, picture_layout, sizes_of, without_mask

_CHANNELS_FIRST: dict[int, Layout] = {3: "CHW", 4: "BCHW", 5: "BCFHW"}
Values = Literal["signed", "unit", "bytes"]
"""[-1, 1] as diffusers' VAEs take it, [0, 1] as ComfyUI has it, or 0 to 255."""
_PIL_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""By the number of channels."""
_LOWEST: dict[Values, float] = {"signed": -1.0, "unit": 0.0, "bytes": 0.0}
_SPAN: dict[Values, float] = {"signed": 2.0, "unit": 1.0, "bytes": 255.0}
"""Where each range of values begins, and how wide it is."""
_MOST_ELEMENTS_FOR_STATISTICS = 1 << 24
"""Of larger tensors `sample_facts` computes the range and no other statistics."""
_TOO_MANY = "not computed: for so many pictures it would take noticeable time"
_ALPHA_DROPPED = Finding(
    "alpha_dropped",
    "info",
    "The pictures have an alpha channel: their colours were encoded, and alpha was dropped.",
    advice="If transparency matters, lay the pictures on a background of your choice first.",
    stage="latent_encoding",
)


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is to be encoded.

    Attributes:
        tensor: (batch, channels, height, width), or (batch, channels, frames, height, width) for a VAE of
            videos; the caller's own memory where that is possible, in its dtype, where it lies.
        values: What its numbers mean.
        facts: Of what the caller handed over.
        frames: Frames of each video that lie on the batch axis, for a VAE of pictures; None if none do.
        findings: What was left out of it.
    """

    tensor: Tensor
    values: Values
    facts: SampleFacts
    frames: int | None = None
    findings: tuple[Finding, ...] = ()


def pictures(
    frames: object,
    facts: VaeFacts,
    *,
    layout: Layout | None = None,
    values: Values | None = None,
    default_values: Values | None = None,
    one_each: bool = False,
    host_has_masks: bool = False,
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
        host_has_masks: What has three axes and no colours last is a mask (ComfyUI's: batch, height, width), however
            many there are.

    Raises:
        ConfigError: There are no pictures, their sizes differ, or their axes or numbers cannot be understood.
    """
    channels = facts.image_channels or 3
    tensor, form = gathered(frames, channels)
    axes = layout or _axes(tensor, facts, host_has_masks=host_has_masks)
    seen = sample_facts(tensor, axes, form)
    has_alpha = _is_colours_and_alpha(tensor, axes, facts.image_channels)
    if has_alpha:
        tensor = tensor[..., :-1]  # as ComfyUI's VAEEncode does
    _check_axes(tensor, axes, facts.image_channels)
    meaning = values or _values_of(tensor, axes, default_values)
    arranged, count = _arranged(tensor, axes, facts.is_video, one_each=one_each)
    dropped = has_alpha or _converts_alpha(frames, channels)
    return Pictures(arranged, meaning, seen, count, (_ALPHA_DROPPED,) if dropped else ())


def _is_colours_and_alpha(tensor: Tensor, axes: Layout, wanted: int | None) -> bool:
    """Whether these are 4 channels, last, for a VAE of 3. Elsewhere 4 channels may be a latent."""
    last = axes.endswith("C") and tensor.ndim == len(axes)
    return wanted == COLOURS_AND_ALPHA - 1 and last and tensor.shape[-1] == COLOURS_AND_ALPHA


def _converts_alpha(frames: object, channels: int) -> bool:
    """Whether a PIL image among them lost its alpha when it was converted."""
    images: Sequence[Any] = frames if isinstance(frames, list | tuple) else [frames]
    return channels != COLOURS_AND_ALPHA and any(
        _has_bands(image) and "A" in image.getbands() for image in images
    )


def _axes(tensor: Tensor, facts: VaeFacts, *, host_has_masks: bool) -> Layout:
    axes = picture_layout(tensor.shape, facts.image_channels, is_video=bool(facts.is_video))
    if axes is None and facts.image_channels is None:
        axes = _CHANNELS_FIRST.get(tensor.ndim)
    if axes == "CHW" and host_has_masks:
        raise ConfigError(
            f"frames: {tuple(tensor.shape)} is a mask (batch, height, width), not a picture.",
            hint="Give the image, or layout='CHW' if it is one with its channels first.",
        )
    if axes is None:
        raise ConfigError(
            f"frames: no axis of {tuple(tensor.shape)} holds the {facts.image_channels or 3} channels that the "
            "VAE takes.",
            hint="Give pictures as BCHW or BHWC, videos as BCFHW or BFHWC, and say which with layout=. A mask is not "
            "a picture.",
        )
    return axes


def _check_axes(tensor: Tensor, axes: Layout, channels: int | None) -> None:
    if axes == "packed" or tensor.ndim != len(axes):
        raise ConfigError(
            f"layout: {axes!r} does not fit frames of shape {tuple(tensor.shape)}.",
            hint="Name each axis once: B for batch, C for channels, F for frames, H for height, W for width.",
        )
    size = tensor.shape[axes.index("C")]
    if channels is not None and size != channels:
        raise ConfigError(
            f"frames: {size} channels in {tuple(tensor.shape)}, the VAE takes {channels}.",
            hint="Convert the pictures, or say which axis is what with layout=.",
        )


def _values_of(tensor: Tensor, axes: str, default: Values | None) -> Values:
    if tensor.is_floating_point():
        return default or ("unit" if axes.endswith("C") else "signed")
    if tensor.dtype is torch.uint8:
        return "bytes"
    raise ConfigError(f"frames: {tensor.dtype} has no known range.", hint="Give uint8, floats, or values=.")


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


def gathered(frames: object, channels: int) -> tuple[Tensor, str]:
    """One tensor of all pictures, and what they came as. Tensors and arrays are not copied.

    Args:
        frames: A tensor, an array or a PIL image, or a list of these, all of one size.
        channels: Of the pictures, into which PIL images are converted.

    Raises:
        ConfigError: There are no pictures, they differ in size or type, or they are something else.
    """
    if isinstance(frames, Sequence) and not isinstance(frames, str | bytes):
        apart = without_mask(frames)
        return _stacked(frames, channels) if apart is frames else gathered(apart[0], channels)
    tensor, form = _one_picture(frames, channels)
    if tensor.numel() == 0:
        raise ConfigError(
            f"frames: a {form} of shape {tuple(tensor.shape)} holds no picture.", hint="Give at least one."
        )
    return tensor, form


def _stacked(frames: Sequence[object], channels: int) -> tuple[Tensor, str]:
    if not frames:
        raise ConfigError("frames: the list is empty.", hint="Give at least one picture.")
    parts = [_one_picture(frame, channels) for frame in frames]
    form = f"list of {parts[0][1]}s"
    _check_alike([part for part, _ in parts])
    if parts[0][0].numel() == 0:
        raise ConfigError(f"frames: a {form} without pixels.", hint="Give at least one picture.")
    return torch.stack([part for part, _ in parts]), form


def _one_picture(frame: object, channels: int) -> tuple[Tensor, str]:
    if isinstance(frame, Tensor):
        return frame, "tensor"
    if isinstance(frame, np.ndarray):
        return _from_array(frame), "array"
    if _has_bands(frame):
        return _from_image(frame, channels), "PIL image"
    raise ConfigError(
        f"frames: {type(frame).__name__} holds no pixels.",
        hint="Give a tensor, a NumPy array, a PIL image, or a list of these.",
    )


def _has_bands(frame: Any) -> bool:
    return hasattr(frame, "convert") and hasattr(frame, "getbands")


def _from_array(array: npt.NDArray[Any]) -> Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()  # torch shares neither
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(
            f"frames: arrays of {array.dtype} are not pixels.", hint="Give uint8 or floats."
        ) from error


def _from_image(image: Any, channels: int) -> Tensor:
    """(height, width, channels), 0 to 255."""
    pixels = np.array(image.convert(_PIL_MODES.get(channels, "RGB")))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None])


def _check_alike(parts: list[Tensor]) -> None:
    first = parts[0]
    for index, part in enumerate(parts):
        if part.shape != first.shape:
            raise ConfigError(
                f"frames: picture {index} is {_size(part)}, picture 0 is {_size(first)}.",
                hint="Give pictures of one size, or encode each size separately.",
            )
        if (part.dtype, part.device) != (first.dtype, first.device):
            raise ConfigError(
                f"frames: picture {index} is {part.dtype} on {part.device}, picture 0 is {first.dtype} on "
                f"{first.device}.",
                hint="Give pictures of one dtype on one device.",
            )


def _size(part: Tensor) -> str:
    return "×".join(map(str, part.shape))


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


def rescaled(pixels: Tensor, values: Values, wanted: Values) -> Tensor:
    """The same pixels in another range, in float32 or wider; unchanged if they have it already."""
    if not pixels.is_floating_point():
        pixels = pixels.float()
    if values == wanted:
        return pixels
    scale = _SPAN[wanted] / _SPAN[values]
    wide = pixels.float() if pixels.itemsize < 4 else pixels
    return wide.mul(scale).add_(_LOWEST[wanted] - _LOWEST[values] * scale)


def sample_facts(tensor: Tensor, layout: Layout | None, form: str = "tensor") -> SampleFacts:
    """Shape, axes and range of a tensor. An accelerator's tensor is not read: that would wait for it."""
    facts = _tensor_facts(tensor)
    if layout is None or len(layout) != tensor.ndim:
        return SampleFacts(
            facts, form=form, unavailable={"layout": "which axis is which cannot be told from its shape"}
        )
    sizes = sizes_of(tensor.shape, layout)
    batch = 1 if sizes.batch is None else sizes.batch
    return SampleFacts(facts, layout, batch, sizes.frames, sizes.channels, sizes.height, sizes.width, form)


def _tensor_facts(tensor: Tensor) -> TensorFacts:
    """All statistics of a small tensor; of a large one the range, which also tells whether NaN is in it."""
    if tensor.numel() <= _MOST_ELEMENTS_FOR_STATISTICS or tensor.device.type != "cpu":
        return tensor_facts(tensor)
    facts = tensor_facts(tensor, statistics=False)
    low, high = torch.aminmax(tensor.detach())
    if not (torch.isfinite(low) and torch.isfinite(high)):
        return tensor_facts(tensor)
    reasons = dict.fromkeys(("mean", "std"), _TOO_MANY)
    return replace(facts, min=float(low), max=float(high), nan_count=0, inf_count=0, unavailable=reasons)
