"""What a training would do, found out without loading weights: the table, the data, the memory, what it resumes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import DataError, ModelMismatchError, WriteError
from sigmascope.lbm.loading import compare_keys
from sigmascope.lbm.memory_errors import LESS_FOR_TRAINING, within_memory
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.training.checkpoint_files import read_facts
from sigmascope.lbm.training.checkpointing import find_checkpoints
from sigmascope.lbm.training.identity import identity, require_same
from sigmascope.lbm.training.injection import planned
from sigmascope.lbm.training.memory_estimate import MemoryEstimate, estimate_memory
from sigmascope.lbm.training.optimizers import make_optimizer, make_schedule
from sigmascope.lbm.training.pixel_loss import lpips_package
from sigmascope.lbm.training.plan_length import count_samples, follows_length, planned_steps
from sigmascope.lbm.training.plan_table import PlanRow
from sigmascope.lbm.training.session import open_data
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.trackers import check_tracker
from sigmascope.lbm.training.validation import read_samples

_NAMED = 3


@dataclass(frozen=True)
class DryRun:
    """What would be trained, on what.

    Attributes:
        rows: The table of what is trained and what is frozen.
        trained_parameters: In all.
        frozen_parameters: In all.
        shards: Of training.
        samples: In them; None where they cannot be counted.
        picture_size: (width, height) of the first batch, which was read and decoded.
        validation_samples: That were read.
        total_steps: Optimizer steps; None where nobody knows.
        memory: Of one process.
        resumes: The checkpoint that training would go on from.
    """

    rows: Sequence[PlanRow]
    trained_parameters: int
    frozen_parameters: int
    shards: Sequence[str]
    samples: int | None
    picture_size: tuple[int, int]
    validation_samples: int
    total_steps: int | None
    memory: MemoryEstimate
    resumes: Path | None


def dry_run(settings: TrainSettings, *, resume: bool = True) -> DryRun:
    """Check everything that can go wrong before the first step, and tell what would be trained.

    Args:
        settings: Of the run.
        resume: Whether training would resume.

    Raises:
        SigmascopeError: What `train` would raise before its first step, where loading weights is not needed to see it.
    """
    check_tracker(settings.tracker)
    model = build_lbm(settings.lbm, device="meta")
    _check_base(settings.base_model_path, model)
    plan = planned(model, settings)
    data = open_data(settings)
    with within_memory("the first batch", LESS_FOR_TRAINING):
        first = next(iter(data.batches(0)), None)
    if first is None:
        raise DataError("train_shards hold no sample that can be used.", hint="Check the keys in the YAML.")
    batch = first[0]
    height, width = batch.source.shape[-2:]
    steps = planned_steps(settings, data.shards, 1)
    _check_schedule(settings, steps)
    if settings.pixel_loss_weight > 0 and settings.pixel_loss_type == "lpips":
        lpips_package()
    _check_folder(settings.save_ckpt_path)
    return DryRun(
        rows=plan.rows,
        trained_parameters=plan.trained_parameters,
        frozen_parameters=plan.frozen_parameters,
        shards=data.shards,
        samples=count_samples(data.shards),
        picture_size=(width, height),
        validation_samples=len(read_samples(settings)),
        total_steps=steps,
        memory=estimate_memory(settings, batch),
        resumes=_resumed(settings, data.shards, steps) if resume else None,
    )


def _check_base(path: Path, model: LbmModel) -> None:
    """Compare keys and shapes, which are in the file's header."""
    with open_checkpoint(path) as checkpoint:
        missing, _ = compare_keys(model, checkpoint)
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        wrong = [
            f"{key} is {list(checkpoint.info(key).shape)} and should be {list(shape)}"
            for key, shape in shapes.items()
            if key not in missing and tuple(checkpoint.info(key).shape) != shape
        ]
    if missing or wrong:
        problems = [f"{key} is missing" for key in missing] + wrong
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise ModelMismatchError(
            f"{path}: is no such model as the YAML describes: {'; '.join(problems[:_NAMED])}{more}.",
            hint="Correct base_model_path, or the model's keys in the YAML.",
        )


def _check_schedule(settings: TrainSettings, steps: int | None) -> None:
    """Make it, for an optimizer that changes nothing."""
    nothing = make_optimizer("SGD", [nn.Parameter(torch.zeros(1))], settings.learning_rate, {})
    make_schedule(
        settings.lr_scheduler,
        nothing,
        steps=steps,
        warmup_steps=settings.warmup_steps,
        kwargs=settings.lr_scheduler_kwargs,
    )


def _check_folder(path: Path) -> None:
    """Look whether checkpoints can be written there, without making it."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise WriteError(
            path, f"cannot be made: {there} is no folder.", hint="Choose another save_ckpt_path."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise WriteError(
            path, f"cannot be written to: {there} is read-only.", hint="Choose another save_ckpt_path."
        )


def _resumed(settings: TrainSettings, shards: Sequence[str], steps: int | None) -> Path | None:
    found = find_checkpoints(settings.save_ckpt_path)
    if not found:
        return None
    now = identity(settings, shards, 1, steps if follows_length(settings) else None)
    require_same(read_facts(found[0])["identity"], now, found[0])
    return found[0]
