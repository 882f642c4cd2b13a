"""Training data: pairs of pictures from WebDataset shards, in batches of one size.

The stream of an epoch is the same in every run with the same seed. A checkpoint keeps the position that came
with the last batch, as plain numbers; passing it back continues with exactly the batches that follow.

Samples that cannot be used are counted, and the first few are named. Positions from another epoch or number of
processes are refused, and so is an epoch without a single good sample.

`SampleDecoder` decodes a sample's bytes to pictures and masks of one size, all cropped alike. `prefetch` does such work
in background threads and gives the results in the order of the inputs.
"""

import io
import logging
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import (
    DECODER_ERRORS,
    Size,
    mask_levels,
    nearest_bucket,
    open_picture,
    scaled_buckets,
    to_rgb,
)
from sigmascope.lbm.shards import (
    RawSample,
    epoch_samples,
    expand_shards,
    find_member,
    wanted_members,
)

__all__ = ["DataOptions", "DataPosition", "SkippedSample", "SkippedSamples", "TrainingData"]

_log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
Crop = Literal["center", "random"]
In = TypeVar("In")
Out = TypeVar("Out")

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM")
"""Formats that are decoded. Shards may come from anyone, and some of Pillow's formats call other programs."""
MINIMUMS = {"batch_size": 1, "seed": 0, "shuffle_buffer": 0, "workers": 0, "process": 0, "processes": 1}
"""Smallest value of each number among the options."""
FIRST_VALID_GREY = 128
"""Grey levels from here on are valid: a JPEG's white is not quite white."""
MAX_NAMED = 20
"""The most skipped samples that a report names."""
MAX_LOGGED = 5
"""The most skipped samples that are logged; the rest are only counted."""


@dataclass(frozen=True)
class DataOptions:
    """What is read and how it is batched.

    Attributes:
        shards: Paths with braces, globs or `~`, folders, or `pipe:` commands when `allow_pipe`.
        batch_size: Samples in a batch of this process.
        seed: Seed of the order and of random crops.
        shuffle: False for the shards' own order, for validation.
        shuffle_buffer: Number of samples that are mixed with each other.
        allow_pipe: Whether `pipe:` commands may be run.
        max_member: As in `sigmascope.lbm.shards.read_shard`.
        crop: Which part to use of a picture whose shape is not the batch's.
        size: (width, height) of all samples; None for each one's nearest aspect bucket.
        process: This process's number. Sample i of the stream belongs to process i modulo `processes`.
        processes: How many processes share the stream.
        workers: Threads that decode ahead; 0 decodes when a batch is asked for.
    """

    shards: tuple[str, ...]
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer: int = 256
    allow_pipe: bool = False
    max_member: str | int | None = None
    crop: Crop = "center"
    size: Size | None = None
    process: int = 0
    processes: int = 1
    workers: int = 2


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
    """

    source: Float[Tensor, "batch 3 height width"]
    target: Float[Tensor, "batch 3 height width"]
    numbers: tuple[int, ...]
    keys: tuple[str, ...]
    epoch: int = 0
    mask: Float[Tensor, "batch 1 height width"] | None = None
    conditioning_images: Mapping[str, Float[Tensor, "batch 3 height width"]] = field(default_factory=dict)
    conditioning_masks: Mapping[str, Float[Tensor, "batch 1 height width"]] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many samples."""
        return len(self.numbers)


@dataclass(frozen=True)
class DataPosition:
    """How far one process has come in one epoch.

    Attributes:
        epoch: From 0.
        samples: How many samples of the epoch's stream (of all processes) have been processed.
        pending: Numbers of those that still wait for their batch to fill.
    """

    epoch: int
    samples: int
    pending: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"epoch": self.epoch, "samples": self.samples, "pending": list(self.pending)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DataPosition":
        """Read what `to_dict` gave.

        Raises:
            ConfigError: It is something else.
        """
        try:
            epoch, samples, *pending = numbers = [data["epoch"], data["samples"], *data["pending"]]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("no counts")
            if any(number >= samples for number in pending):
                raise ValueError("samples that were not dealt with")
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data position: expected epoch, samples and pending (numbers below samples), got {data!r:.200}.",
                hint="Take it from a checkpoint of this version, or start the epoch again.",
            ) from error
        return cls(epoch, samples, tuple(pending))


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that was left out, or the unreadable rest of a shard (`key` is None), and why."""

    shard: str
    key: str | None
    reason: str

    def __str__(self) -> str:
        place = self.shard if self.key is None else f"{self.shard}, sample {self.key}"
        return f"{place}: {self.reason}"


class TrainingData:
    """Batches of the samples in shards.

    Attributes:
        shards: What the options' patterns stand for.
        skipped: Samples that could not be used so far, and why.

    Raises:
        ConfigError: An option makes no sense, or a pattern matches nothing.
        FileError: A shard does not exist.
    """

    def __init__(self, config: LbmConfig, options: DataOptions) -> None:
        check_options(options, config)
        self.shards = expand_shards(options.shards, allow_pipe=options.allow_pipe)
        self.skipped = SkippedSamples()
        self._config = config
        self._options = options
        self._said_unmasked = False
        self._decoder = SampleDecoder(config, options.size, options.crop, options.seed)

    def batches(
        self, epoch: int, position: DataPosition | None = None
    ) -> Generator[tuple[Batch, DataPosition], None, None]:
        """Give the epoch's batches, each with the position after it.

        Every batch has `batch_size` samples of one size; the remaining ones of each size come at the end. Samples that
        cannot be used are left out and counted in `skipped`. Several processes each get their own batches, whose number
        may differ by the samples left over or left out.

        Args:
            epoch: From 0; each has its own order.
            position: The position that came with a batch of this epoch: the batches after it follow, and nothing
                before it is decoded. None starts the epoch.

        Raises:
            ConfigError: The position is from another epoch or another number of processes.
            DataError: No sample of the epoch can be used, or the stream ends before the position.
            FileError: A shard cannot be opened.
        """
        start, options = position or DataPosition(epoch, 0), self._options
        if start.epoch != epoch:
            raise ConfigError(
                f"data position: it is of epoch {start.epoch}, not {epoch}.",
                hint="Continue that epoch first.",
            )
        if any(number % options.processes != options.process for number in start.pending):
            raise ConfigError(
                f"data position: it is not of process {options.process} of {options.processes}.",
                hint="Continue with as many processes as before, or start the epoch again.",
            )
        return self._batches(start)

    def _batches(self, start: DataPosition) -> Generator[tuple[Batch, DataPosition], None, None]:
        epoch, options = start.epoch, self._options
        buckets = SizeBuckets(options.batch_size)
        samples = epoch_samples(
            self.shards,
            self._decoder.keys,
            epoch,
            seed=options.seed,
            shuffle=options.shuffle,
            buffer=options.shuffle_buffer,
            max_member=options.max_member,
        )
        good = broken = passed = 0
        waiting = frozenset(start.pending)

        def of_this_process() -> Iterator[tuple[int, RawSample]]:
            """The pending samples with their numbers, then those from the start on."""
            nonlocal passed
            for number, raw in enumerate(samples):
                passed = number + 1
                mine = number % options.processes == options.process
                if (mine and number >= start.samples) or number in waiting:
                    yield number, raw

        def decode(item: tuple[int, RawSample]) -> tuple[int, Sample | SkippedSample]:
            number, raw = item
            try:
                return number, self._decoder.decode(raw, epoch, number)
            except DataError as error:
                return number, SkippedSample(raw.shard, raw.key, error.message)

        seen, ahead = start.samples, options.batch_size + options.workers
        with closing(prefetch(decode, of_this_process(), workers=options.workers, ahead=ahead)) as outcomes:
            for number, outcome in outcomes:
                seen = max(seen, number + 1)
                if isinstance(outcome, SkippedSample):
                    self.skipped.add(outcome)
                    broken += 1
                    continue
                good += 1
                self._say_unmasked(outcome)
                if full := buckets.add(outcome):
                    yield collate(full, self._config, epoch), DataPosition(epoch, seen, buckets.pending)
        check_epoch(good, broken, passed, start, self.skipped, options.processes)
        while rest := buckets.take_rest():
            yield collate(rest, self._config, epoch), DataPosition(epoch, passed, buckets.pending)

    def _say_unmasked(self, sample: Sample) -> None:
        """Say once that samples lack the mask: a slip in its name would pass for that."""
        key = self._config.mask_key
        if key is not None and key not in sample.masks and not self._said_unmasked:
            self._said_unmasked = True
            _log.warning(
                "Sample %s has no member for mask_key: %s, so all its pixels count as valid. This is logged only once.",
                sample.key,
                key,
            )


def check_options(options: DataOptions, config: LbmConfig) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: Names the option.
    """
    for name, fewest in MINIMUMS.items():
        value = getattr(options, name)
        if value < fewest:
            raise ConfigError(f"{name}: expected {fewest} or more, got {value}.", hint="Correct it.")
    if options.process >= options.processes:
        raise ConfigError(
            f"process: expected 0 to {options.processes - 1}, got {options.process}.", hint="Count from 0."
        )
    if options.crop not in ("center", "random"):
        raise ConfigError(f"crop: expected center or random, got {options.crop!r}.", hint="Use center.")
    size = options.size
    if size is None:
        scaled_buckets(config.resolution, config.factor)  # refuses a resolution that is too small
    elif min(size) < 1 or any(side % config.factor for side in size):
        raise ConfigError(
            f"image_size: expected multiples of {config.factor}, got {size[0]}x{size[1]}.",
            hint="Leave it out for the nearest aspect bucket.",
        )


@dataclass
class SkippedSamples:
    """Every sample that was left out, counted once however many epochs met it.

    Attributes:
        first: The first few, as they were met.
    """

    first: list[SkippedSample] = field(default_factory=list)
    _known: set[tuple[str, str | None]] = field(default_factory=set, repr=False)

    @property
    def count(self) -> int:
        """How many different samples were left out."""
        return len(self._known)

    def add(self, sample: SkippedSample) -> None:
        """Count a sample unless it is known, and log it while there are few."""
        if (sample.shard, sample.key) in self._known:
            return
        self._known.add((sample.shard, sample.key))
        if len(self.first) < MAX_NAMED:
            self.first.append(sample)
        if self.count <= MAX_LOGGED:
            _log.warning("Skipped %s", sample)
        if self.count == MAX_LOGGED:
            _log.warning("Further samples that cannot be used are counted, not named.")


class SizeBuckets:
    """Samples that wait for others of their size."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: dict[Size, list[Sample]] = {}

    def add(self, sample: Sample) -> list[Sample] | None:
        """Add a sample, and return the samples of its size if they fill a batch."""
        bucket = self._waiting.setdefault(sample.size, [])
        bucket.append(sample)
        return self._waiting.pop(sample.size) if len(bucket) == self._batch_size else None

    def take_rest(self) -> list[Sample] | None:
        """Return the unfinished batch whose first sample is the oldest, or None."""
        if not self._waiting:
            return None
        return self._waiting.pop(min(self._waiting, key=lambda size: self._waiting[size][0].number))

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the samples that wait."""
        return tuple(sorted(sample.number for bucket in self._waiting.values() for sample in bucket))


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


def check_epoch(
    good: int, broken: int, passed: int, start: DataPosition, skipped: SkippedSamples, processes: int
) -> None:
    """Refuse an epoch without a good sample, and warn if most of its samples are broken.

    Args:
        good: Samples of this process that could be used since `start`.
        broken: Those that could not.
        passed: Samples in the whole stream, of all processes.
        start: Where this process began; samples before it were judged when they were used.
        skipped: Names the first of them.
        processes: How many share the stream.

    Raises:
        DataError: Says what was wrong with the first sample.
    """
    if passed < start.samples:
        raise DataError(
            f"the data ends after {passed} samples, before the position of the checkpoint ({start.samples}).",
            hint="Continue with the shards that the checkpoint was trained on, or start the epoch again.",
        )
    if passed == 0:
        raise DataError("the shards hold no samples.", hint="Make some with: sigmascope lbm make-shards.")
    if good == 0 and start.samples == 0 and broken == 0:
        raise DataError(
            f"there are {passed} samples for {processes} processes, so at least one process has none.",
            hint="Use fewer processes or more data.",
        )
    if good == 0 and start.samples == 0:
        raise DataError(
            f"none of {broken} samples can be used. The first: {skipped.first[0]}.",
            hint="Check the data, and that source_key, target_key and mask_key name its members. A sample's name "
            "ends at its first dot, and its members follow one another in the tar file.",
        )
    if broken > good and start.samples == 0:
        _log.warning(
            "Most of the data cannot be used: %d of %d samples of this epoch were skipped. The first: %s",
            broken,
            good + broken,
            skipped.first[0],
        )


def redistribute(positions: Sequence[DataPosition], process: int, processes: int) -> DataPosition:
    """Where one process starts if an epoch continues with another number of processes than it was started with.

    Every unused sample goes to exactly one process, and no used one comes again.

    Args:
        positions: Positions of the earlier processes, in order, at the same step.
        process: The process, from 0.
        processes: How many processes share the rest.
    """
    shared, reached = len(positions), max(position.samples for position in positions)
    behind = range(min(position.samples for position in positions), reached)
    left = {number for number in behind if number >= positions[number % shared].samples}
    left.update(number for position in positions for number in position.pending)
    mine = sorted(number for number in left if number % processes == process)
    return DataPosition(positions[0].epoch, reached, tuple(mine))


_MEMBERS: Final = {"source": ("source", "jpg"), "target": ("target",), "mask": ("mask",)}
"""What stands in for a key that a sample has no member of: LBM's trainings rename these to what the YAML says."""


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

    def decode(self, raw: RawSample, epoch: int, number: int) -> Sample:
        """Decode a sample.

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
        size = self.size or nearest_bucket(
            *shape, resolution=self.config.resolution, factor=self.config.factor
        )
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

    def _decoded(self, raw: RawSample, key: str, *, mask: bool) -> Image.Image:
        """Of the member that the key names; of a sample without one, that of its role, as LBM's trainings rename it."""
        names = (key, *self.roles.get(key, ()))
        member = find_member(
            next((name for name in names if wanted_members(name, raw.names)), key), raw.names
        )
        try:
            return (decode_mask if mask else decode_picture)(raw.members[member])
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
    if not data:
        raise DataError("is empty")
    try:
        with open_picture(io.BytesIO(data), FORMATS) as image:
            image.load()
            return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise DataError(f"is too large ({error})") from error
    except UnidentifiedImageError as error:
        raise DataError(f"is not a picture in a supported format ({', '.join(FORMATS)})") from error
    except DECODER_ERRORS as error:
        raise DataError(f"cannot be decoded ({error})") from error


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


def prefetch(
    work: Callable[[In], Out], items: Iterator[In], *, workers: int, ahead: int
) -> Generator[Out, None, None]:
    """Map `work` over `items`, with up to `ahead` results computed before they are asked for.

    If the caller stops early and closes the iterator, no thread is left running.

    Args:
        work: Runs on a worker thread; its exceptions are raised here in place of the result.
        items: Taken on the caller's thread.
        workers: Number of threads; 0 works on the caller's.
        ahead: The most results to compute ahead, which bounds their memory.
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
