"""How many optimizer steps a run will have, as far as its settings and shards tell."""

import tarfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from webdataset.tariterators import base_plus_ext

from sigmascope.lbm.shards.names import PIPE
from sigmascope.lbm.training.settings import TrainSettings

COUNTED_BYTES: Final = 64 * 2**30
"""Shards of more bytes together are not counted unless a schedule needs it: it would hold up the start."""
_STEADY: Final = ("constant", "constant_with_warmup", "piecewise_constant")


def follows_length(settings: TrainSettings) -> bool:
    """Whether the learning rate of a step depends on how many there will be."""
    return settings.lr_scheduler not in _STEADY


def epoch_limit(settings: TrainSettings) -> int | None:
    """Epochs to train at most; None where `max_steps` alone was given, which then decides."""
    if settings.max_steps is not None and "max_epochs" not in settings.model_fields_set:
        return None
    return settings.max_epochs


def planned_steps(settings: TrainSettings, shards: Sequence[str], processes: int) -> int | None:
    """Optimizer steps of the whole run, or None where they cannot be known beforehand.

    From the samples in the shards it is an upper bound: some may turn out to be unusable. Pictures of several
    shapes make a few more small batches than are counted.

    Args:
        settings: Of the run.
        shards: What `train_shards` stands for.
        processes: That share the samples.
    """
    epochs = epoch_limit(settings)
    if epochs is None:
        return settings.max_steps
    samples = _samples(shards, at_any_cost=follows_length(settings) and settings.max_steps is None)
    if samples is None:
        return settings.max_steps
    batches = -(-(samples // processes) // settings.batch_size)
    steps = epochs * -(-batches // settings.gradient_accumulation_steps)
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def count_samples(shards: Sequence[str]) -> int | None:
    """Count the samples of local shards by the names in them; None where one cannot be looked into.

    Only the members' headers are read.
    """
    total = 0
    for shard in shards:
        try:
            with tarfile.open(shard, "r:") as tar:
                keys = (base_plus_ext(member.name)[0] for member in tar if member.isfile())
                total += sum(1 for key, _ in groupby(keys) if key is not None)
        except (OSError, tarfile.TarError):
            return None
    return total


def _samples(shards: Sequence[str], *, at_any_cost: bool) -> int | None:
    if any(shard.startswith(PIPE) for shard in shards):
        return None
    if not at_any_cost and sum(Path(shard).stat().st_size for shard in shards) > COUNTED_BYTES:
        return None
    return count_samples(shards)
