"""Training data: pairs of pictures from WebDataset shards, in batches of one size.

The stream of an epoch is the same in every run with the same seed. A checkpoint keeps the position that came
with the last batch, as plain numbers; passing it back continues with exactly the batches that follow.

Which samples make a batch follows from the stream and the pictures' headers alone, for all processes together: each
process knows all batches without asking the others, and their number is known before training (`count_batches`).
A batch is cut into as many slices as there are processes, and each decodes its own. A picture that turns out
damaged leaves its place empty.

What cannot be used is counted, and the first few samples are named. Positions of another epoch are refused, and so
are epochs without one good sample.

`prefetch` decodes in background threads and gives the results in the order of the inputs.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.images import Size, scaled_buckets
from sigmascope.lbm.samples import Batch, Crop, Sample, SampleDecoder, collate
from sigmascope.lbm.shards import RawSample, epoch_samples, expand_shards, read_shard

__all__ = ["DataOptions", "DataPosition", "SkippedSample", "SkippedSamples", "TrainingData"]

_log = logging.getLogger(__name__)

In = TypeVar("In")
Out = TypeVar("Out")

MINIMUMS = {"batch_size": 1, "seed": 0, "shuffle_buffer": 0, "workers": 0, "process": 0, "processes": 1}
"""Smallest value of each number among the options."""
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
