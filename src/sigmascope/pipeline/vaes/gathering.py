"""Pictures in whatever form a caller has them, as one tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sigmascope.errors import ConfigError

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def gathered(frames: object, channels: int) -> tuple[Tensor, str]:
    """One tensor of all pictures, and what they came as. Tensors and arrays are not copied.

    Args:
        frames: A tensor, an array or a PIL image, or a list of these, all of one size.
        channels: Of the pictures, into which PIL images are converted.

    Raises:
        ConfigError: There is none, they differ in size or type, or it is something else.
    """
    if isinstance(frames, Sequence) and not isinstance(frames, str | bytes):
        return _stacked(frames, channels)
    tensor, form = _one(frames, channels)
    if tensor.numel() == 0:
        raise ConfigError(
            f"frames: a {form} of shape {tuple(tensor.shape)} holds no picture.", hint="Give one at least."
        )
    return tensor, form


def _stacked(frames: Sequence[object], channels: int) -> tuple[Tensor, str]:
    if not frames:
        raise ConfigError("frames: the list is empty.", hint="Give one picture at least.")
    parts = [_one(frame, channels) for frame in frames]
    form = f"list of {parts[0][1]}s"
    _check_alike([part for part, _ in parts])
    if parts[0][0].numel() == 0:
        raise ConfigError(f"frames: a {form} of no pixels.", hint="Give one picture at least.")
    return torch.stack([part for part, _ in parts]), form


def _check_alike(parts: list[Tensor]) -> None:
    first = parts[0]
    for index, part in enumerate(parts):
        if part.shape != first.shape:
            raise ConfigError(
                f"frames: picture {index} is {_size(part)}, picture 0 is {_size(first)}.",
                hint="Give pictures of one size, or encode those of each size by themselves.",
            )
        if (part.dtype, part.device) != (first.dtype, first.device):
            raise ConfigError(
                f"frames: picture {index} is {part.dtype} on {part.device}, picture 0 is {first.dtype} on "
                f"{first.device}.",
                hint="Give pictures of one dtype on one device.",
            )


def _size(part: Tensor) -> str:
    return "×".join(map(str, part.shape))


def _one(frame: object, channels: int) -> tuple[Tensor, str]:
    if isinstance(frame, Tensor):
        return frame, "tensor"
    if isinstance(frame, np.ndarray):
        return _from_array(frame), "array"
    if hasattr(frame, "convert") and hasattr(frame, "getbands"):
        return _from_image(frame, channels), "PIL image"
    raise ConfigError(
        f"frames: {type(frame).__name__} is nothing that holds pixels.",
        hint="Give a tensor, a NumPy array, a PIL image, or a list of these.",
    )


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
    pixels = np.array(image.convert(_MODES.get(channels, "RGB")))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None])
