"""Decode one sample of a shard: from bytes to pictures and masks of one size, all cut alike.

`prefetch` does such work on background threads and gives the results in the order of the inputs.
"""

import io
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sigmascope.errors import DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import DECODER_ERRORS, Size, mask_levels, nearest_bucket, open_picture, to_rgb
from sigmascope.lbm.shards import RawSample, find_member, wanted_members

Pixels = NDArray[np.uint8]
Crop = Literal["center", "random"]
In = TypeVar("In")
Out = TypeVar("Out")

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
"""What is decoded. Pillow knows formats that hand their content to other programs; shards may be anybody's."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A decoded sample; every picture has `size`.

    Attributes:
        number: In its epoch's stream.
        key: In its shard.
        size: (width, height).
        pictures: (height, width, 3) for each key of the config that means a picture.
        masks: (height, width) for each key that means a mask; without the `mask_key` of a sample that has none.
    """

    number: int
    key: str
    size: Size
    pictures: Mapping[str, Pixels]
    masks: Mapping[str, Pixels]


@dataclass(frozen=True)
class SampleDecoder:
    """How samples become pixels: which members, which size, which part.

    Attributes:
        config: Names the members, and the buckets.
        size: (width, height) of every sample; None is each one's nearest bucket.
        crop: Which part of a picture that has another shape.
        seed: Random parts follow from it, the epoch and the sample's number alone.
    """

    config: LbmConfig
    size: Size | None = None
    crop: Crop = "center"
    seed: int = 0
    picture_keys: tuple[str, ...] = field(init=False)
    mask_keys: tuple[str, ...] = field(init=False)
    roles: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        pictures = (config.source_key, config.target_key, *config.conditioning_images_keys)
        masks = (*((config.mask_key,) if config.mask_key else ()), *config.conditioning_masks_keys)
        object.__setattr__(self, "picture_keys", tuple(dict.fromkeys(pictures)))
        object.__setattr__(self, "mask_keys", tuple(dict.fromkeys(masks)))
        named = {key.lower() for key in (*pictures, *masks)}
        roles = {config.source_key: "source", config.target_key: "target", config.mask_key: "mask"}
        of_others = {key: role for key, role in roles.items() if key is not None and role not in named}
        object.__setattr__(self, "roles", of_others)

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that means a member of a sample, and what stands in where a sample has none of that name."""
        return tuple(dict.fromkeys((*self.picture_keys, *self.mask_keys, *self.roles.values())))

    def decode(self, raw: RawSample, epoch: int, number: int) -> Sample:
        """Decode a sample.

        Args:
            raw: As read.
            epoch: Of the stream, from 0.
            number: In the epoch's stream.

        Raises:
            DataError: Says which member is missing, damaged, or of another shape than the source.
        """
        if raw.fault is not None or raw.key is None:
            raise DataError(raw.fault or "has no name")
        pictures = {key: self._decoded(raw, key, mask=False) for key in self.picture_keys}
        masks = {
            key: self._decoded(raw, key, mask=True) for key in self.mask_keys if not self._may_lack(raw, key)
        }
        shape = pictures[self.config.source_key].size
        for key, image in (*pictures.items(), *masks.items()):
            if not same_shape(shape, image.size):
                raise DataError(
                    f"{key} has another shape ({image.width}×{image.height}) "
                    f"than {self.config.source_key} ({shape[0]}×{shape[1]})"
                )
        draws = random.Random(f"{self.seed} {epoch} {number} crop")
        cut = choose_crop(shape, self._size(shape), self.crop, draws)
        return Sample(
            number,
            raw.key,
            cut.size,
            {key: apply_crop(image, cut, Image.Resampling.BICUBIC) for key, image in pictures.items()},
            {key: apply_crop(image, cut, self._mask_resampling(key)) for key, image in masks.items()},
        )

    def _decoded(self, raw: RawSample, key: str, *, mask: bool) -> Image.Image:
        """Of the member that the key names; of a sample without one, that of its role, as LBM's trainings rename it."""
        role = self.roles.get(key)
        named = role is None or wanted_members(key, raw.names) or not wanted_members(role, raw.names)
        member = find_member(key if named or role is None else role, raw.names)
        try:
            return (decode_mask if mask else decode_picture)(raw.members[member])
        except DataError as error:
            raise DataError(f"{member} {error.message}") from error

    def _may_lack(self, raw: RawSample, key: str) -> bool:
        """Whether a sample has no mask of what is valid: all of it is, as in LBM."""
        names = (key, self.roles.get(key, key))
        is_validity = key == self.config.mask_key and key not in self.config.conditioning_masks_keys
        return is_validity and not any(wanted_members(name, raw.names) for name in names)

    def _mask_resampling(self, key: str) -> Image.Resampling:
        """Whether a pixel is valid is yes or no; conditioning is resized as inference does."""
        validity = key == self.config.mask_key
        return Image.Resampling.NEAREST if validity else Image.Resampling.BICUBIC

    def _size(self, shape: Size) -> Size:
        if self.size is not None:
            return self.size
        return nearest_bucket(*shape, resolution=self.config.resolution, factor=self.config.factor)


def decode_picture(data: bytes) -> Image.Image:
    """Decode a picture to upright 8-bit RGB (see `sigmascope.lbm.images.to_rgb`).

    Runs on any thread: no warning filter is touched.

    Raises:
        DataError: It is empty, no picture, damaged, or of more pixels than `SIGMASCOPE_MAX_PIXELS`.
    """
    if not data:
        raise DataError("is empty")
    try:
        with open_picture(io.BytesIO(data), FORMATS) as image:
            image.load()
            return to_rgb(image)
    except Image.DecompressionBombError as error:
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


@dataclass(frozen=True, slots=True)
class CropBox:
    """The part of a picture that is used, as shares of its sides, and the size that it is brought to."""

    left: float
    top: float
    right: float
    bottom: float
    size: Size


def choose_crop(image_size: Size, size: Size, crop: Crop, draws: random.Random) -> CropBox:
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
    left, top = (_crop_start(whole - used, crop, draws) for whole, used in zip(image_size, part, strict=True))
    return CropBox(left / width, top / height, (left + part[0]) / width, (top + part[1]) / height, size)


def _crop_start(slack: float, crop: Crop, draws: random.Random) -> float:
    """Where the part begins: whole pixels, so that a cut without resizing copies pixels."""
    if crop == "center":
        return float(int(slack / 2))
    return min(float(int(draws.random() * (slack + 1))), slack)


def apply_crop(image: Image.Image, cut: CropBox, resample: Image.Resampling) -> Pixels:
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


def prefetch(
    work: Callable[[In], Out], items: Iterator[In], *, workers: int, ahead: int
) -> Generator[Out, None, None]:
    """Map `work` over `items`, with up to `ahead` results computed before they are asked for.

    When the caller stops early and closes the iterator, no thread stays behind.

    Args:
        work: Runs on a worker; what it raises is raised here, in its place.
        items: Taken on the caller's thread.
        workers: Threads; 0 works on the caller's.
        ahead: Bounds the memory that results take.
    """
    if workers == 0:
        for item in items:
            yield work(item)
        return
    waiting: deque[Future[Out]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="sigmascope-data")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
