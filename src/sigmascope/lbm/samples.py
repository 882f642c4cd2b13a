"""Samples of the training data: their bytes become pictures of one size, and those of one size a batch of tensors.

`SampleDecoder` decodes a sample's bytes to pictures and masks of one size, all cropped alike; `collate` makes a `Batch`.
"""

import io
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from sigmascope.errors import DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import (
    DECODER_ERRORS,
    ByteFile,
    Size,
    mask_levels,
    nearest_bucket,
    open_picture,
    to_rgb,
    upright_size,
    why_not_decoded,
)
from sigmascope.lbm.shards import RawSample, find_member, wanted_members

Out = TypeVar("Out")
Pixels = NDArray[np.uint8]
Crop = Literal["center", "random"]

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
"""Formats that are decoded. Shards may come from anyone, and some of Pillow's formats call other programs."""
FIRST_VALID_GREY = 128
"""Grey levels from here on are valid: a JPEG's white is not quite white."""
_MEMBERS: Final = {"source": ("source", "jpg"), "target": ("target",), "mask": ("mask",)}
"""What stands in for a key that a sample has no member of: LBM's trainings rename these to what the YAML says."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A decoded sample; every picture has `size`.

    Attributes:
        number: Its number in the epoch's stream.
        key: Its key in the shard.
        size: (width, height).
        pictures: (height, width, 3) for each key of the config that means a picture.
        masks: (height, width) for each key that means a mask; the `mask_key` is missing if the sample has no mask.
    """

    number: int
    key: str
    size: Size
    pictures: Mapping[str, Pixels]
    masks: Mapping[str, Pixels]


class SampleDecoder:
    """Decodes samples: chooses members, size and crop.

    Args:
        config: Names the members and the buckets.
        size: (width, height) of every sample; None for each one's nearest bucket.
        crop: Which part to use of a picture that has another shape.
        seed: Random crops depend only on it, the epoch and the sample's number.
    """

    def __init__(
        self, config: LbmConfig, size: Size | None = None, crop: Crop = "center", seed: int = 0
    ) -> None:
        self.config = config
        self.size = size
        self.crop: Crop = crop
        self.seed = seed
        pictures = (config.source_key, config.target_key, *config.conditioning_images_keys)
        masks = (*((config.mask_key,) if config.mask_key else ()), *config.conditioning_masks_keys)
        self.picture_keys = tuple(dict.fromkeys(pictures))
        self.mask_keys = tuple(dict.fromkeys(masks))
        named = {key.lower() for key in (*pictures, *masks)}
        roles = {config.source_key: "source", config.target_key: "target", config.mask_key: "mask"}
        # What stands in where a sample has no member of a key's own name.
        self.roles = {
            key: tuple(name for name in _MEMBERS[role] if name not in named)
            for key, role in roles.items()
            if key is not None and role not in named
        }
        self.keys = tuple(dict.fromkeys((*pictures, *masks, *chain(*self.roles.values()))))

    def measure(self, raw: RawSample) -> Size:
        """The (width, height) that a sample is brought to, from its pictures' headers.

        Raises:
            DataError: As of `decode`, where headers show it.
        """
        if raw.fault is not None or raw.key is None:
            raise DataError(raw.fault or "has no name")
        keys = (*self.picture_keys, *(key for key in self.mask_keys if not self._may_lack(raw, key)))
        return self._brought_to(
            {key: self._read(raw, key, lambda name: picture_size(raw.opened(name))) for key in keys}
        )

    def decode(self, raw: RawSample, epoch: int, number: int, expected: Size | None = None) -> Sample:
        """Decode a sample, with the bytes of its members.

        Args:
            raw: The sample.
            epoch: That it is decoded for.
            number: In that epoch's stream.
            expected: What `measure` gave; None takes any.

        Raises:
            DataError: Says which member is missing, damaged, or of another shape than the source.
        """
        if raw.fault is not None or raw.key is None:
            raise DataError(raw.fault or "has no name")
        pictures = {
            key: self._read(raw, key, lambda name: decode_picture(raw.members[name]))
            for key in self.picture_keys
        }
        masks = {
            key: self._read(raw, key, lambda name: decode_mask(raw.members[name]))
            for key in self.mask_keys
            if not self._may_lack(raw, key)
        }
        shape = pictures[self.config.source_key].size
        size = self._brought_to({key: image.size for key, image in {**pictures, **masks}.items()})
        if expected not in (None, size):
            raise DataError(f"is {size[0]}×{size[1]} once decoded, where its header says another shape")
        draws = random.Random(f"{self.seed} {epoch} {number} crop")
        cut = choose_crop(shape, size, self.crop, draws)
        # Whether a pixel is valid is yes or no; conditioning is resized as inference does.
        yes_or_no = {self.config.mask_key: Image.Resampling.NEAREST}
        smooth = Image.Resampling.BICUBIC
        return Sample(
            number,
            raw.key,
            cut.size,
            {key: apply_crop(image, cut, smooth) for key, image in pictures.items()},
            {key: apply_crop(image, cut, yes_or_no.get(key, smooth)) for key, image in masks.items()},
        )

    def _brought_to(self, shapes: Mapping[str, Size]) -> Size:
        shape = shapes[self.config.source_key]
        for key, other in shapes.items():
            if not same_shape(shape, other):
                raise DataError(
                    f"{key} has another shape ({other[0]}×{other[1]}) "
                    f"than {self.config.source_key} ({shape[0]}×{shape[1]})"
                )
        return self.size or nearest_bucket(
            *shape, resolution=self.config.resolution, factor=self.config.factor
        )

    def _read(self, raw: RawSample, key: str, read: Callable[[str], Out]) -> Out:
        """Read the member that the key names; of a sample without one, that of its role, as LBM's trainings rename it."""
        names = (key, *self.roles.get(key, ()))
        member = find_member(
            next((name for name in names if wanted_members(name, raw.names)), key), raw.names
        )
        try:
            return read(member)
        except DataError as error:
            raise DataError(f"{member} {error.message}") from error

    def _may_lack(self, raw: RawSample, key: str) -> bool:
        """Whether a sample has no mask of what is valid: all of it is, as in LBM."""
        names = (key, *self.roles.get(key, ()))
        is_validity = key == self.config.mask_key and key not in self.config.conditioning_masks_keys
        return is_validity and not any(wanted_members(name, raw.names) for name in names)


def decode_picture(data: bytes) -> Image.Image:
    """Decode a picture to upright 8-bit RGB (see `sigmascope.lbm.images.to_rgb`).

    Runs on any thread: no warning filter is touched.

    Raises:
        DataError: It is empty, not a picture, damaged, or has more pixels than `SIGMASCOPE_MAX_PIXELS`.
    """
    with _opened(io.BytesIO(data)) as image:
        image.load()
        return to_rgb(image)


def picture_size(stream: ByteFile) -> Size:
    """The size that `decode_picture` will give, from the header.

    Raises:
        DataError: As of `decode_picture`, where the header shows it.
    """
    with _opened(stream) as image:
        return upright_size(image, stream)


@contextmanager
def _opened(stream: ByteFile) -> Iterator[Image.Image]:
    """A picture before it is decoded; says what is wrong with it."""
    if not stream.read(1):
        raise DataError("is empty")
    stream.seek(0)
    try:
        with open_picture(stream, FORMATS) as image:
            yield image
    except Image.DecompressionBombError as error:
        raise DataError(f"is too large ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"is not a picture in a supported format ({', '.join(FORMATS)})") from error
    except DECODER_ERRORS as error:
        raise DataError(f"cannot be decoded ({why_not_decoded(error)})") from error


def decode_mask(data: bytes) -> Image.Image:
    """Decode a mask to 8-bit grey; if all values are 0 or 1, they become 0 and 255.

    Raises:
        DataError: As `decode_picture`.
    """
    return mask_levels(decode_picture(data).convert("L"))


@dataclass(frozen=True, slots=True)
class CropBox:
    """The part of a picture that is used, as shares of its sides, and the size that it is resized to."""

    left: float
    top: float
    right: float
    bottom: float
    size: Size


def choose_crop(image_size: Size, size: Size, crop: Crop, draws: random.Random) -> CropBox:
    """Choose the largest part of a picture with the shape of `size`: the middle one, or one drawn."""
    width, height = image_size
    scale = max(size[0] / width, size[1] / height)
    part = (min(size[0] / scale, width), min(size[1] / scale, height))
    left, top = (_crop_start(whole - used, crop, draws) for whole, used in zip(image_size, part, strict=True))
    return CropBox(left / width, top / height, (left + part[0]) / width, (top + part[1]) / height, size)


def _crop_start(slack: float, crop: Crop, draws: random.Random) -> float:
    """Where the part begins: whole pixels, so that a cut without resizing copies pixels."""
    if crop == "center":
        return float(int(slack / 2))
    return min(float(int(draws.random() * (slack + 1))), slack)


def apply_crop(image: Image.Image, cut: CropBox, resample: Image.Resampling) -> Pixels:
    """Crop and resize in one step. A picture of that size already is returned unchanged.

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


def _edge(share: float, side: int) -> float:
    """A share of a side in pixels, inside the picture; rounding must not shift a whole pixel by a hair."""
    pixels = min(max(share * side, 0.0), float(side))
    return float(round(pixels)) if abs(pixels - round(pixels)) < 1e-6 else pixels


def same_shape(first: Size, second: Size) -> bool:
    """Whether two pictures show the same at different sizes: equal aspect, up to a pixel of rounding."""
    for earlier, other in ((first, second), (second, first)):
        if (
            abs(earlier[0] * other[1] / earlier[1] - other[0]) <= 1
            or abs(earlier[1] * other[0] / earlier[0] - other[1]) <= 1
        ):
            return True
    return False


@dataclass(frozen=True)
class Batch:
    """Pairs of pictures to train on; `height` and `width` are multiples of the model's `factor`.

    Attributes:
        source: What the model is given, in [-1, 1].
        target: What it should make of it, in [-1, 1].
        numbers: Each sample's number in the epoch's stream. Noise and timesteps are seeded with these, so that a
            sample's draws do not depend on its process or batch.
        keys: Each sample's key in its shard, for messages.
        epoch: The samples' epoch, from 0.
        mask: 1 where a pixel is valid, 0 elsewhere; all 1 for a sample without a mask; None if the config names none.
        conditioning_images: In [-1, 1], by the config's `conditioning_images_keys`.
        conditioning_masks: In [0, 1], by the config's `conditioning_masks_keys`.
        blank: It has no sample, and one grey picture, so that this process can keep step with the others.
    """

    source: Float[Tensor, "batch 3 height width"]
    target: Float[Tensor, "batch 3 height width"]
    numbers: tuple[int, ...]
    keys: tuple[str, ...]
    epoch: int = 0
    mask: Float[Tensor, "batch 1 height width"] | None = None
    conditioning_images: Mapping[str, Float[Tensor, "batch 3 height width"]] = field(default_factory=dict)
    conditioning_masks: Mapping[str, Float[Tensor, "batch 1 height width"]] = field(default_factory=dict)
    blank: bool = False

    def __len__(self) -> int:
        """How many samples."""
        return 0 if self.blank else len(self.numbers)


def collate(samples: list[Sample], config: LbmConfig, epoch: int) -> Batch:
    """Make a batch of samples of one size."""
    return Batch(
        source=_pictures(samples, config.source_key),
        target=_pictures(samples, config.target_key),
        numbers=tuple(sample.number for sample in samples),
        keys=tuple(sample.key for sample in samples),
        epoch=epoch,
        mask=_validity(samples, config.mask_key) if config.mask_key else None,
        conditioning_images={key: _pictures(samples, key) for key in config.conditioning_images_keys},
        conditioning_masks={key: _masks(samples, key) / 255.0 for key in config.conditioning_masks_keys},
    )


# In NumPy: these are too small to wake torch's threads for, which are the training step's.
def _pictures(samples: list[Sample], key: str) -> Float[Tensor, "batch 3 height width"]:
    stacked = np.stack([sample.pictures[key].transpose(2, 0, 1) for sample in samples], dtype=np.float32)
    return torch.from_numpy(stacked / np.float32(127.5) - np.float32(1))


def _validity(samples: list[Sample], key: str) -> Float[Tensor, "batch 1 height width"]:
    masks = [sample.masks.get(key) for sample in samples]
    valid = [
        np.ones(pictures.size[::-1]) if mask is None else mask >= FIRST_VALID_GREY
        for pictures, mask in zip(samples, masks, strict=True)
    ]
    return torch.from_numpy(np.stack(valid, dtype=np.float32)[:, None])


def _masks(samples: list[Sample], key: str) -> Float[Tensor, "batch 1 height width"]:
    return torch.from_numpy(np.stack([sample.masks[key][None] for sample in samples], dtype=np.float32))
