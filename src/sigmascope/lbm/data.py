"""Training data: pairs of pictures from WebDataset shards, in batches of one size.

The stream of an epoch is the same in every run with the same seed. A checkpoint keeps the position that came
with the last batch; passing it back continues with exactly the batches that follow.
"""

from collections.abc import Generator, Iterator
from contextlib import closing

from sigmascope.errors import DataError
from sigmascope.lbm.batches import Batch
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.shards.batching import Buckets, collate
from sigmascope.lbm.shards.checks import check_position, judge_epoch
from sigmascope.lbm.shards.names import expand_shards
from sigmascope.lbm.shards.options import DataOptions, check_options
from sigmascope.lbm.shards.parallel import map_ahead
from sigmascope.lbm.shards.position import DataPosition
from sigmascope.lbm.shards.reading import RawSample
from sigmascope.lbm.shards.samples import Sample, SampleDecoder
from sigmascope.lbm.shards.skipped import SkippedSample, SkippedSamples
from sigmascope.lbm.shards.stream import Order, Share

__all__ = ["DataOptions", "DataPosition", "SkippedSample", "SkippedSamples", "TrainingData"]


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
        self._decoder = SampleDecoder(config, options.size, options.crop, options.seed)

    def batches(
        self, epoch: int, position: DataPosition | None = None
    ) -> Iterator[tuple[Batch, DataPosition]]:
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

    def _batches(self, start: DataPosition) -> Iterator[tuple[Batch, DataPosition]]:
        epoch, buckets = start.epoch, Buckets(self._options.batch_size)
        share = Share(self._order(), self._options.process, self._options.processes)
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
                if full := buckets.add(outcome):
                    yield collate(full, self._config, epoch), DataPosition(epoch, seen, buckets.pending)
        judge_epoch(good, broken, share.passed, start, self.skipped, share.processes)
        while rest := buckets.take_rest():
            yield collate(rest, self._config, epoch), DataPosition(epoch, share.passed, buckets.pending)

    def _order(self) -> Order:
        options = self._options
        return Order(self.shards, self._decoder.keys, options.seed, options.shuffle, options.shuffle_buffer)

    def _decoded(
        self, share: Share, start: DataPosition
    ) -> Generator[tuple[int, Sample | SkippedSample], None, None]:
        def decode(item: tuple[int, RawSample]) -> tuple[int, Sample | SkippedSample]:
            number, raw = item
            try:
                return number, self._decoder.decode(raw, start.epoch, number)
            except DataError as error:
                return number, SkippedSample(raw.shard, raw.key, error.message)

        samples = share.samples(start.epoch, start.samples, start.pending)
        workers = self._options.workers
        return map_ahead(decode, samples, workers=workers, ahead=self._options.batch_size + workers)
