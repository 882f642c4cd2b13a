"""One sample from bytes to pixels of one size, cut alike."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from PIL import Image

from sigmascope.errors import DataError
from sigmascope.lbm.buckets import Size, nearest_bucket
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.shards.members import find_member
from sigmascope.lbm.shards.pictures import (
    Crop,
    Pixels,
    apply_cut,
    choose_cut,
    decode_mask,
    decode_picture,
    same_shape,
)
from sigmascope.lbm.shards.reading import RawSample


@dataclass(frozen=True, slots=True)
class Sample:
    """A decoded sample; every picture has `size`.

    Attributes:
        number: In its epoch's stream.
        key: In its shard.
        size: (width, height).
        pictures: (height, width, 3) for each key of the config that means a picture.
        masks: (height, width) for each key that means a mask.
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

    def __post_init__(self) -> None:
        config = self.config
        pictures = (config.source_key, config.target_key, *config.conditioning_images_keys)
        masks = (*((config.mask_key,) if config.mask_key else ()), *config.conditioning_masks_keys)
        object.__setattr__(self, "picture_keys", tuple(dict.fromkeys(pictures)))
        object.__setattr__(self, "mask_keys", tuple(dict.fromkeys(masks)))

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that a sample must have a member for."""
        return tuple(dict.fromkeys((*self.picture_keys, *self.mask_keys)))

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
        pictures = {key: _decoded(raw, key, mask=False) for key in self.picture_keys}
        masks = {key: _decoded(raw, key, mask=True) for key in self.mask_keys}
        shape = pictures[self.config.source_key].size
        for key, image in (*pictures.items(), *masks.items()):
            if not same_shape(shape, image.size):
                raise DataError(
                    f"{key} has another shape ({image.width}×{image.height}) "
                    f"than {self.config.source_key} ({shape[0]}×{shape[1]})"
                )
        draws = random.Random(f"{self.seed} {epoch} {number} crop")
        cut = choose_cut(shape, self._size(shape), self.crop, draws)
        return Sample(
            number,
            raw.key,
            cut.size,
            {key: apply_cut(image, cut, Image.Resampling.BICUBIC) for key, image in pictures.items()},
            {key: apply_cut(image, cut, self._mask_resampling(key)) for key, image in masks.items()},
        )

    def _mask_resampling(self, key: str) -> Image.Resampling:
        """Whether a pixel is valid is yes or no; conditioning is resized as inference does."""
        validity = key == self.config.mask_key
        return Image.Resampling.NEAREST if validity else Image.Resampling.BICUBIC

    def _size(self, shape: Size) -> Size:
        if self.size is not None:
            return self.size
        return nearest_bucket(*shape, resolution=self.config.resolution, factor=self.config.factor)


def _decoded(raw: RawSample, key: str, *, mask: bool) -> Image.Image:
    member = find_member(key, raw.names)
    try:
        return (decode_mask if mask else decode_picture)(raw.members[member])
    except DataError as error:
        raise DataError(f"{member} {error.message}") from error
