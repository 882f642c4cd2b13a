"""Which positions and which epochs are refused."""

import logging

from sigmascope.errors import ConfigError, DataError
from sigmascope.lbm.shards.options import DataOptions
from sigmascope.lbm.shards.position import DataPosition
from sigmascope.lbm.shards.skipped import SkippedSamples

_log = logging.getLogger(__name__)


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


def judge_epoch(
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
        raise _nothing(broken, passed, skipped, processes)
    if broken > good and start.samples == 0:
        _log.warning(
            "Most of the data cannot be used: %d of %d samples of this epoch were skipped. The first: %s",
            broken,
            good + broken,
            skipped.first[0],
        )


def _nothing(broken: int, passed: int, skipped: SkippedSamples, processes: int) -> DataError:
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
