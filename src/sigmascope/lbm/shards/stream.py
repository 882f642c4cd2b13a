"""The order of an epoch: the same in every run, and so in every process, with the same seed."""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from sigmascope.lbm.shards.reading import RawSample, read_shard

BUFFER_BYTES = 1 << 30
"""Most that the shuffle buffer holds, whatever the number of samples: 256 large ones may not fit in memory."""


@dataclass(frozen=True)
class Order:
    """How an epoch's samples are ordered.

    Attributes:
        shards: Read one after the other.
        keys: The config's; members that no key means are dropped.
        seed: Of the order.
        shuffle: Permute the shards, and mix samples in a buffer; otherwise they come as they lie.
        buffer: Samples in the buffer.
        buffer_bytes: Memory that they may take.
    """

    shards: Sequence[str]
    keys: Collection[str]
    seed: int = 0
    shuffle: bool = True
    buffer: int = 256
    buffer_bytes: int = BUFFER_BYTES

    def samples(self, epoch: int) -> Iterator[RawSample]:
        """Read an epoch's samples in its order, from the first."""
        if not self.shuffle:
            yield from _read(self.shards, self.keys)
            return
        shards = list(self.shards)
        random.Random(f"{self.seed} {epoch} shards").shuffle(shards)
        draws = random.Random(f"{self.seed} {epoch} samples")
        yield from mixed(_read(shards, self.keys), draws, self.buffer, self.buffer_bytes)


@dataclass
class Share:
    """One process's samples of an epoch; sample i of the stream belongs to process i modulo `processes`.

    Attributes:
        order: Of all samples.
        process: This one, from 0.
        processes: How many share the stream.
        passed: Samples of the stream, of all processes, that have gone by.
    """

    order: Order
    process: int = 0
    processes: int = 1
    passed: int = field(default=0, init=False)

    def samples(
        self, epoch: int, start: int = 0, pending: Collection[int] = ()
    ) -> Iterator[tuple[int, RawSample]]:
        """Give this process's samples with their numbers: the pending ones, then those from `start` on."""
        waiting = frozenset(pending)
        for number, raw in enumerate(self.order.samples(epoch)):
            self.passed = number + 1
            mine = number % self.processes == self.process
            if (mine and number >= start) or number in waiting:
                yield number, raw


def _read(shards: Sequence[str], keys: Collection[str]) -> Iterator[RawSample]:
    for shard in shards:
        yield from read_shard(shard, keys)


def mixed(
    samples: Iterator[RawSample], draws: random.Random, size: int, most_bytes: int
) -> Iterator[RawSample]:
    """Give each sample from a random place of a buffer that is refilled from the stream.

    Args:
        samples: In the order that they are read.
        draws: Gives the places.
        size: Samples in the buffer; with 0 or 1 the order stays.
        most_bytes: Memory that they may take; at least one is held.
    """
    held: list[RawSample] = []
    nbytes = 0
    for sample in samples:
        held.append(sample)
        nbytes += sample.nbytes
        while held and (len(held) >= size or nbytes > most_bytes):
            drawn = _drawn(held, draws)
            nbytes -= drawn.nbytes
            yield drawn
    while held:
        yield _drawn(held, draws)


def _drawn(held: list[RawSample], draws: random.Random) -> RawSample:
    place = draws.randrange(len(held))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()
