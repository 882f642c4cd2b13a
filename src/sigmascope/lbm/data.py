"""Training data: pairs of pictures from WebDataset shards, in batches of one size.

The stream of an epoch is the same in every run with the same seed. A checkpoint keeps the position that came
with the last batch, as plain numbers; passing it back continues with exactly the batches that follow.

Which samples make a batch follows from the stream and the pictures' headers alone, for all processes together: each
process knows all batches without asking the others, and their number is known before training (`count_batches`).
A batch is cut into as many slices as there are processes, and each decodes its own. A picture that turns out
damaged leaves its place empty.

What cannot be used is counted, and the first few samples are named. Positions of another epoch are refused, and so
are epochs without one good sample.

`SampleDecoder` decodes a sample's bytes to pictures and masks of one size, all cropped alike. `prefetch` does such work
in background threads and gives the results in the order of the inputs.
"""

import io
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
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
    ByteFile,
    Size,
    mask_levels,
    nearest_bucket,
    open_picture,
    scaled_buckets,
    to_rgb,
    upright_size,
)
from sigmascope.lbm.shards import (
    RawSample,
    epoch_samples,
    expand_shards,
    find_member,
    read_shard,
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
        process: This process's number. Sample i of a size belongs to process i modulo `processes`.
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


@dataclass(frozen=True)
class DataPosition:
    """How far all processes have come in one epoch; any number of processes can go on from it.

    Attributes:
        epoch: From 0.
        samples: How many samples of the epoch's stream have been processed.
        pending: Numbers of those among them that still wait for their batch to fill.
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

        Every batch has `batch_size` samples of one size; what is left of each size comes at the end. Samples
        that cannot be used are left out and counted in `skipped`; where only decoding shows it, their batch is
        smaller. All processes get as many batches, the n-th of the same size in all. Where there is no sample for
        this process, it is a `blank` one.

        Args:
            epoch: From 0; each has its own order.
            position: The position that came with a batch of this epoch: the batches after it follow, and nothing
                before it is decoded. None starts the epoch.

        Raises:
            ConfigError: The position is from another epoch.
            DataError: No sample of the epoch can be used, or the stream ends before the position.
            FileError: A shard cannot be opened.
        """
        start = position or DataPosition(epoch, 0)
        if start.epoch != epoch:
            raise ConfigError(
                f"data position: it is of epoch {start.epoch}, not {epoch}.",
                hint="Continue that epoch first.",
            )
        return self._batches(start)

    def count_sizes(self) -> Counter[Size] | None:
        """Count the samples of an epoch by the size that they are brought to, from the pictures' headers.

        Returns:
            None where only reading all of the data would tell: commands, compressed shards.
        """
        sizes: Counter[Size] = Counter()
        for shard in self.shards:
            if not Path(shard).is_file():
                return None
            samples = read_shard(shard, self._decoder.keys, self._options.max_member, unread=True)
            for place, raw in enumerate(samples):
                if raw.key is None and place == 0:  # compressed, or no tar file
                    return None
                with suppress(DataError):
                    sizes[self._decoder.measure(raw)] += 1
        return sizes

    def _batches(self, start: DataPosition) -> Generator[tuple[Batch, DataPosition], None, None]:
        epoch, options, counts = start.epoch, self._options, EpochCounts()

        def slices() -> Iterator[WaitingSample | PlannedBatch]:
            """This process's samples of each batch, and then the batch."""
            for batch in self._planned(start, counts):
                yield from (sample for sample in batch.samples if sample.raw is not None)
                yield batch

        def decode(item: WaitingSample | PlannedBatch) -> Sample | SkippedSample | PlannedBatch:
            if isinstance(item, PlannedBatch):
                return item
            assert item.raw is not None  # `slices` gives no others
            try:
                return self._decoder.decode(item.raw, epoch, item.number, item.size)
            except DataError as error:
                return SkippedSample(item.raw.shard, item.raw.key, error.message)

        ahead = options.batch_size + 1 + options.workers
        samples: list[Sample] = []
        with closing(prefetch(decode, slices(), workers=options.workers, ahead=ahead)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, Sample):
                    self._say_unmasked(outcome)
                    samples.append(outcome)
                elif isinstance(outcome, SkippedSample):
                    self.skipped.add(outcome)
                    counts.found_broken()
                else:
                    first = outcome.samples[0]
                    batch = (
                        collate(samples, self._config, epoch)
                        if samples
                        else blank_batch(first, self._config, epoch)
                    )
                    yield batch, outcome.position
                    samples = []
        if start.samples == 0:
            counts.check(self.skipped)

    def _planned(self, start: DataPosition, counts: "EpochCounts") -> Iterator["PlannedBatch"]:
        """The batches of all processes from `start` on, as the pictures' headers tell: the same in every process."""
        epoch, options = start.epoch, self._options
        buckets = SizeBuckets(options.batch_size, options.process, options.processes)
        samples = epoch_samples(
            self.shards,
            self._decoder.keys,
            epoch,
            seed=options.seed,
            shuffle=options.shuffle,
            buffer=options.shuffle_buffer,
            max_member=options.max_member,
        )
        passed, waiting = 0, set(start.pending)
        for number, raw in enumerate(samples):
            passed = number + 1
            if number < start.samples and number not in waiting:
                continue
            waiting.discard(number)
            try:
                size = self._decoder.measure(raw)
            except DataError as error:
                # All processes see it, so one of them says it.
                self.skipped.add(SkippedSample(raw.shard, raw.key, error.message), log=options.process == 0)
                counts.broken += 1
                continue
            counts.good += 1
            if full := buckets.add(number, size, raw):
                pending = sorted({*buckets.pending, *waiting})
                yield PlannedBatch(full, DataPosition(epoch, max(passed, start.samples), tuple(pending)))
        if passed < start.samples:
            raise DataError(
                f"the data ends after {passed} samples, before the position of the checkpoint ({start.samples}).",
                hint="Continue with the shards that the checkpoint was trained on, or start the epoch again.",
            )
        if passed == 0:
            raise DataError("the shards hold no samples.", hint="Make some with: sigmascope lbm make-shards.")
        while rest := buckets.take_rest():
            yield PlannedBatch(rest, DataPosition(epoch, passed, buckets.pending))

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

    def add(self, sample: SkippedSample, *, log: bool = True) -> None:
        """Count a sample unless it is known, and log it while there are few."""
        if (sample.shard, sample.key) in self._known:
            return
        self._known.add((sample.shard, sample.key))
        if len(self.first) < MAX_NAMED:
            self.first.append(sample)
        if log and self.count <= MAX_LOGGED:
            _log.warning("Skipped %s", sample)
        if log and self.count == MAX_LOGGED:
            _log.warning("Further samples that cannot be used are counted, not named.")


@dataclass(frozen=True, slots=True)
class WaitingSample:
    """A sample that is not decoded yet.

    Attributes:
        number: In its epoch's stream.
        size: (width, height) that it is brought to.
        raw: None in the processes that do not decode it.
    """

    number: int
    size: Size
    raw: RawSample | None


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch of all processes together, and the position after it; `samples` are of one size, at least one."""

    samples: list[WaitingSample]
    position: DataPosition


class SizeBuckets:
    """Samples that wait for others of their size, until there are enough for a batch in each process.

    Process p takes every `processes`-th sample of a size, from the p-th on.
    """

    def __init__(self, batch_size: int, process: int = 0, processes: int = 1) -> None:
        self._enough = batch_size * processes
        self._process, self._processes = process, processes
        self._waiting: dict[Size, list[WaitingSample]] = {}

    def add(self, number: int, size: Size, raw: RawSample) -> list[WaitingSample] | None:
        """Take a sample in, and give the samples of its size when they are enough."""
        bucket = self._waiting.setdefault(size, [])
        is_own = len(bucket) % self._processes == self._process
        bucket.append(WaitingSample(number, size, raw if is_own else None))
        return self._waiting.pop(size) if len(bucket) == self._enough else None

    def take_rest(self) -> list[WaitingSample] | None:
        """Give the unfinished batch whose first sample is the oldest, or None."""
        if not self._waiting:
            return None
        return self._waiting.pop(min(self._waiting, key=lambda size: self._waiting[size][0].number))

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the samples that wait."""
        return tuple(sorted(sample.number for bucket in self._waiting.values() for sample in bucket))


def count_batches(sizes: Mapping[Size, int], samples: int) -> int:
    """How many batches an epoch has: of each size as many as it fills, and one for what is left.

    Args:
        sizes: Samples of each size.
        samples: In a batch of all processes together.
    """
    return sum(-(-count // samples) for count in sizes.values())


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


def blank_batch(like: WaitingSample, config: LbmConfig, epoch: int) -> Batch:
    """A batch without a sample: one grey picture of another process's size, all of it valid."""
    width, height = like.size
    picture, mask = torch.zeros(1, 3, height, width), torch.ones(1, 1, height, width)
    return Batch(
        source=picture,
        target=picture,
        numbers=(like.number,),
        keys=(),
        epoch=epoch,
        mask=mask if config.mask_key else None,
        conditioning_images=dict.fromkeys(config.conditioning_images_keys, picture),
        conditioning_masks=dict.fromkeys(config.conditioning_masks_keys, mask),
        blank=True,
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


@dataclass
class EpochCounts:
    """What an epoch's samples turned out to be, as far as this process knows: others may find more broken ones."""

    good: int = 0
    broken: int = 0

    def found_broken(self) -> None:
        """One that seemed good is broken."""
        self.good -= 1
        self.broken += 1

    def check(self, skipped: SkippedSamples) -> None:
        """Refuse an epoch without one good sample, and warn of one that is mostly broken.

        Args:
            skipped: Names the first of them.

        Raises:
            DataError: Says what was wrong with the first sample.
        """
        if self.good == 0:
            raise DataError(
                f"none of {self.broken} samples can be used. The first: {skipped.first[0]}.",
                hint="Check the data, and that source_key, target_key and mask_key name its members. A sample's name "
                "ends at its first dot, and its members follow one another in the tar file.",
            )
        if self.broken > self.good:
            _log.warning(
                "Most of the data cannot be used: %d of %d samples of this epoch were skipped. The first: %s",
                self.broken,
                self.good + self.broken,
                skipped.first[0],
            )


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
