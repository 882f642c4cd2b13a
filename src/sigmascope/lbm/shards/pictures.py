"""Bytes of a picture to pixels, and one cut for all pictures of a sample."""

import io
import random
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sigmascope.errors import DataError
from sigmascope.lbm.buckets import Size
from sigmascope.lbm.images import DECODER_ERRORS, mask_levels, to_rgb

Pixels = NDArray[np.uint8]
Crop = Literal["center", "random"]

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
"""What is decoded. Pillow knows formats that hand their content to other programs; shards may be anybody's."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a picture that is used, as shares of its sides, and the size that it is brought to."""

    left: float
    top: float
    right: float
    bottom: float
    size: Size


def decode_picture(data: bytes) -> Image.Image:
    """Decode a picture to upright 8-bit RGB (see `sigmascope.lbm.images.to_rgb`).

    Runs on any thread: no warning filter is touched.

    Raises:
        DataError: It is empty, no picture, damaged, or larger than Pillow's limit against decompression bombs.
    """
    if not data:
        raise DataError("is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _refuse_bomb(image.size)
            image.load()
            return to_rgb(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"is too large a picture ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"is no picture in a format that is read ({', '.join(FORMATS)})") from error
    except DECODER_ERRORS as error:
        raise DataError(f"cannot be decoded ({error})") from error


def decode_mask(data: bytes) -> Image.Image:
    """Decode a mask to 8-bit grey; values of 0 and 1 alone count as 0 and 255.

    Raises:
        DataError: As `decode_picture`.
    """
    return mask_levels(decode_picture(data).convert("L"))


def choose_cut(image_size: Size, size: Size, crop: Crop, draws: random.Random) -> Cut:
    """Choose the largest part of a picture with the shape of `size`: the middle one, or one drawn.

    Args:
        image_size: (width, height) of the picture.
        size: (width, height) that it is brought to.
        crop: Which part.
        draws: Gives the place of a random part.
    """
    width, height = image_size
    scale = max(size[0] / width, size[1] / height)
    part = (min(size[0] / scale, width), min(size[1] / scale, height))
    left, top = (_place(whole - used, crop, draws) for whole, used in zip(image_size, part, strict=True))
    return Cut(left / width, top / height, (left + part[0]) / width, (top + part[1]) / height, size)


def apply_cut(image: Image.Image, cut: Cut, resample: Image.Resampling) -> Pixels:
    """Cut and resize in one go. A picture that has the size already comes back untouched.

    Returns:
        (height, width, 3) for RGB, (height, width) for grey.
    """
    width, height = image.size
    box = (
        _edge(cut.left, width),
        _edge(cut.top, height),
        _edge(cut.right, width),
        _edge(cut.bottom, height),
    )
    return np.array(image.resize(cut.size, resample, box=box), dtype=np.uint8)


def same_shape(first: Size, second: Size) -> bool:
    """Whether two pictures show the same at different sizes: equal aspect, up to a pixel of rounding."""
    for one, other in ((first, second), (second, first)):
        if abs(one[0] * other[1] / one[1] - other[0]) <= 1 or abs(one[1] * other[0] / one[0] - other[1]) <= 1:
            return True
    return False


def _edge(share: float, side: int) -> float:
    """A share of a side in pixels, inside the picture; rounding must not shift a whole pixel by a hair."""
    pixels = min(max(share * side, 0.0), float(side))
    return float(round(pixels)) if abs(pixels - round(pixels)) < 1e-6 else pixels


def _place(slack: float, crop: Crop, draws: random.Random) -> float:
    """Where the part begins: whole pixels, so that a cut without resizing copies pixels."""
    if crop == "center":
        return float(int(slack / 2))
    return min(float(int(draws.random() * (slack + 1))), slack)


def _refuse_bomb(size: Size) -> None:
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and size[0] * size[1] > limit:
        raise DataError(f"is too large a picture ({size[0]}×{size[1]}, the limit is {limit} pixels)")
