"""Training data: pairs of pictures from WebDataset shards, in batches of one size.

The stream of an epoch is the same in every run with the same seed. A checkpoint keeps the position that came
with the last batch, as plain numbers; passing it back continues with exactly the batches that follow.

What cannot be used is counted, and the first few samples are named. Positions of another epoch or number of
processes are refused, and so are epochs without one good sample.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import Size, scaled_buckets
from sigmascope.lbm.samples import Crop, Sample, SampleDecoder, prefetch
from sigmascope.lbm.shards import EpochOrder, ProcessShare, RawSample, expand_shards

__all__ = ["DataOptions", "DataPosition", "SkippedSample", "SkippedSamples", "TrainingData"]

_log = logging.getLogger(__name__)

FEWEST = {"batch_size": 1, "seed": 0, "shuffle_buffer": 0, "workers": 0, "process": 0, "processes": 1}
"""Smallest value of each number among the options."""
VALID = 128
"""Grey levels from here on are valid: a JPEG's white is not quite white."""
NAMED = 20
"""So many skipped samples are named in the report."""
LOGGED = 5
"""So many are logged when they are met; the rest only count."""


@dataclass(frozen=True)
class DataOptions:
    """What is read and how it is batched.

    Attributes:
        shards: Paths with braces, globs or `~`, folders, or `pipe:` commands when `allow_pipe`.
        batch_size: Samples in a batch of this process.
        seed: Of the order and of random crops.
        shuffle: False gives the shards' own order, for validation.
        shuffle_buffer: Samples that are mixed with each other.
        allow_pipe: Whether `pipe:` commands may be run.
        max_member: As of `sigmascope.lbm.shards.read_shard`.
        crop: The part of a picture whose shape is not the batch's.
        size: (width, height) of all samples; None is each one's nearest aspect bucket.
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


@dataclass(frozen=True)
class Batch:
    """Pairs of pictures to train on; `height` and `width` are multiples of the model's `factor`.

    Attributes:
        source: What the model is given, in [-1, 1].
        target: What it should make of it, in [-1, 1].
        numbers: Of each sample in its epoch's stream. Noise and timesteps are drawn from these, so that a
            sample's draws do not depend on which process or batch it falls into.
        keys: Of each sample in its shard, for messages.
        epoch: That the samples belong to, from 0.
        mask: 1 where a pixel is valid, 0 elsewhere; all 1 of a sample without one; None where the config names none.
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
        samples: How many samples of the epoch's stream (of all processes) have been dealt with.
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
            numbers = [data["epoch"], data["samples"], *data["pending"]]
        except (KeyError, TypeError) as error:
            raise _no_position(data) from error
        if any(type(number) is not int or number < 0 for number in numbers):
            raise _no_position(data)
        epoch, samples, *pending = numbers
        if any(number >= samples for number in pending):
            raise _no_position(data)
        return cls(epoch, samples, tuple(pending))


def _no_position(data: object) -> ConfigError:
    return ConfigError(
        f"data position: expected epoch, samples and pending (numbers below samples), got {data!r:.200}.",
        hint="Take it from a checkpoint of this version, or begin the epoch anew.",
    )


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that was left out, or the rest of a shard that could not be read (`key` is None), and why."""

    shard: str
    key: str | None
    reason: str

    def __str__(self) -> str:
        place = self.shard if self.key is None else f"{self.shard}, sample {self.key}"
        return f"{place}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"shard": self.shard, "key": self.key, "reason": self.reason}


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
        that cannot be used are left out and counted in `skipped`. With several processes, each gets batches
        of its own, and their numbers may differ by what is left over or left out.

        Args:
            epoch: From 0; each has its own order.
            position: That came with a batch of this epoch: those after it follow, and nothing before it is
                decoded. None begins the epoch.

        Raises:
            ConfigError: The position is of another epoch, or of another number of processes.
            DataError: Not one sample of the epoch can be used, or the stream ends before the position.
            FileError: A shard cannot be opened.
        """
        start = position or DataPosition(epoch, 0)
        check_position(start, epoch, self._options)
        return self._batches(start)

    def _batches(self, start: DataPosition) -> Generator[tuple[Batch, DataPosition], None, None]:
        epoch, buckets = start.epoch, SizeBuckets(self._options.batch_size)
        share = ProcessShare(self._order(), self._options.process, self._options.processes)
        good = broken = 0
        seen = start.samples
        with closing(self._decoded(share, start)) as outcomes:
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
        check_epoch(good, broken, share.passed, start, self.skipped, share.processes)
        while rest := buckets.take_rest():
            yield collate(rest, self._config, epoch), DataPosition(epoch, share.passed, buckets.pending)

    def _say_unmasked(self, sample: Sample) -> None:
        """Say once that samples lack the mask: a slip in its name would pass for that."""
        key = self._config.mask_key
        if key is not None and key not in sample.masks and not self._said_unmasked:
            self._said_unmasked = True
            _log.warning(
                "Sample %s has no member for mask_key: %s, so all of it is valid; said once.", sample.key, key
            )

    def _order(self) -> EpochOrder:
        options = self._options
        return EpochOrder(
            self.shards,
            self._decoder.keys,
            options.seed,
            options.shuffle,
            options.shuffle_buffer,
            max_member=options.max_member,
        )

    def _decoded(
        self, share: ProcessShare, start: DataPosition
    ) -> Generator[tuple[int, Sample | SkippedSample], None, None]:
        def decode(item: tuple[int, RawSample]) -> tuple[int, Sample | SkippedSample]:
            number, raw = item
            try:
                return number, self._decoder.decode(raw, start.epoch, number)
            except DataError as error:
                return number, SkippedSample(raw.shard, raw.key, error.message)

        samples = share.samples(start.epoch, start.samples, start.pending)
        workers = self._options.workers
        return prefetch(decode, samples, workers=workers, ahead=self._options.batch_size + workers)


def check_options(options: DataOptions, config: LbmConfig) -> None:
    """Refuse options that make no sense.

    Raises:
        ConfigError: Names the option.
    """
    for name, fewest in FEWEST.items():
        value = getattr(options, name)
        if value < fewest:
            raise ConfigError(f"{name}: expected {fewest} or more, got {value}.", hint="Correct it.")
    if options.process >= options.processes:
        raise ConfigError(
            f"process: expected 0 to {options.processes - 1}, got {options.process}.", hint="Count from 0."
        )
    if options.crop not in ("center", "random"):
        raise ConfigError(f"crop: expected center or random, got {options.crop!r}.", hint="Use center.")
    _check_size(options.size, config)


def _check_size(size: Size | None, config: LbmConfig) -> None:
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
        if len(self.first) < NAMED:
            self.first.append(sample)
        if self.count <= LOGGED:
            _log.warning("Skipped %s", sample)
        if self.count == LOGGED:
            _log.warning("Further samples that cannot be used are counted, not named.")

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"count": self.count, "first": [sample.as_dict() for sample in self.first]}


def check_position(position: DataPosition, epoch: int, options: DataOptions) -> None:
    """Refuse a position that another epoch or another process reached.

    Raises:
        ConfigError: Says which.
    """
    if position.epoch != epoch:
        raise ConfigError(
            f"data position: it is of epoch {position.epoch}, not {epoch}.", hint="Continue that epoch first."
        )
    if any(number % options.processes != options.process for number in position.pending):
        raise ConfigError(
            f"data position: it is not of process {options.process} of {options.processes}.",
            hint="Continue with as many processes as before, or begin the epoch anew.",
        )


class SizeBuckets:
    """Samples that wait for others of their size."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: dict[Size, list[Sample]] = {}

    def add(self, sample: Sample) -> list[Sample] | None:
        """Take a sample in, and give the samples of its size when they are enough for a batch."""
        bucket = self._waiting.setdefault(sample.size, [])
        bucket.append(sample)
        return self._waiting.pop(sample.size) if len(bucket) == self._batch_size else None

    def take_rest(self) -> list[Sample] | None:
        """Give the unfinished batch whose first sample is the oldest, or None."""
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
        np.ones(pictures.size[::-1]) if mask is None else mask >= VALID
        for pictures, mask in zip(samples, masks, strict=True)
    ]
    return torch.from_numpy(np.stack(valid, dtype=np.float32)[:, None])


def _masks(samples: list[Sample], key: str) -> Float[Tensor, "batch 1 height width"]:
    return torch.from_numpy(np.stack([sample.masks[key][None] for sample in samples], dtype=np.float32))


def check_epoch(
    good: int, broken: int, passed: int, start: DataPosition, skipped: SkippedSamples, processes: int
) -> None:
    """Refuse an epoch without one good sample, and warn of one that is mostly broken.

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
            hint="Continue with the shards that the checkpoint was trained on, or begin the epoch anew.",
        )
    if passed == 0:
        raise DataError("the shards hold no samples.", hint="Make some with: sigmascope lbm make-shards.")
    if good == 0 and start.samples == 0:
        raise _no_usable_sample(broken, passed, skipped, processes)
    if broken > good and start.samples == 0:
        _log.warning(
            "Most of the data cannot be used: %d of %d samples of this epoch were skipped. The first: %s",
            broken,
            good + broken,
            skipped.first[0],
        )


def _no_usable_sample(broken: int, passed: int, skipped: SkippedSamples, processes: int) -> DataError:
    if broken == 0:
        return DataError(
            f"there are {passed} samples for {processes} processes, so that one has none.",
            hint="Use fewer processes or more data.",
        )
    return DataError(
        f"none of {broken} samples can be used. The first: {skipped.first[0]}.",
        hint="Check the data, and that source_key, target_key and mask_key name its members. A sample's name ends "
        "at its first dot, and its members follow one another in the tar file.",
    )


def redistribute(positions: Sequence[DataPosition], process: int, processes: int) -> DataPosition:
    """Where one process begins when an epoch that some processes have begun goes on with another number of them.

    Every sample that none of them has used comes to one process, and none that has been used comes again.

    Args:
        positions: Of the processes before, in order, at the same step.
        process: The one that asks, from 0.
        processes: How many share the rest.
    """
    shared, reached = len(positions), max(position.samples for position in positions)
    behind = range(min(position.samples for position in positions), reached)
    left = {number for number in behind if number >= positions[number % shared].samples}
    left.update(number for position in positions for number in position.pending)
    mine = sorted(number for number in left if number % processes == process)
    return DataPosition(positions[0].epoch, reached, tuple(mine))
