"""All that one training run works with, made from its settings and brought to where a checkpoint left off.

`resume_identity` says which settings the result follows from: to resume under other ones would mix two trainings.
`planned_steps` says how many optimizer steps a run will have, as far as its settings and shards tell.
"""

import hashlib
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from webdataset.tariterators import base_plus_ext

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData, redistribute
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.shards import PIPE
from sigmascope.lbm.training.accelerate import Stepper, prepare_step
from sigmascope.lbm.training.checkpoints import TrainingState, random_state, restore_random_state
from sigmascope.lbm.training.distributed import Processes, gather_state, shard_like, shard_optimizer_state
from sigmascope.lbm.training.lora_layers import Trainable, make_trainable
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.optimizers import MovingAverage, make_optimizer, make_schedule
from sigmascope.lbm.training.settings import TrainSettings

_NUMPY_SEEDS: Final = 2**32
"""NumPy takes seeds below this."""

FREE: Final = frozenset(
    {
        "backbone_signature",
        "save_ckpt_path",
        "resume_from_checkpoint",
        "device",
        "gradient_checkpointing",
        "allow_pipe",
        "max_member",
        "log_interval",
        "save_interval",
        "keep_checkpoints",
        "validation_shards",
        "validation_interval",
        "validation_samples",
        "num_steps",
        "wandb_project",
        "report_to",
        "output_formats",
        "save_precision",
        "max_epochs",
        "max_steps",
    }
)
"""Settings that may change between a checkpoint and the run that resumes it; all others must agree."""
_NAMES_OF_FILES: Final = frozenset({"train_shards", "base_model_path", "lora_weights_path"})
"""Settings whose files count, wherever they lie."""
_OF_A_STEP: Final = ("batch_size", "gradient_accumulation_steps", "processes")
"""Their product is the number of samples in an optimizer step."""
_SAMPLED_BYTES: Final = 2**20
"""Of a file's head and of its tail, by which it is known again."""

COUNTED_BYTES: Final = 64 * 2**30
"""Shards of more bytes together are not counted unless a schedule needs it: it would hold up the start."""
_STEADY: Final = ("constant", "constant_with_warmup", "piecewise_constant")
"""Schedules that do not depend on the length of the run."""


@dataclass
class Session:
    """A training run in one process.

    Attributes:
        settings: Of the run.
        accelerator: Of the run.
        team: All its processes.
        model: As it is outside of what Accelerate wraps around it. Under FSDP it has a part of the denoiser.
        trainable: What is trained in it.
        parameters: That the optimizer changes, by name, in its order.
        data: Of this process.
        objective: Its loss.
        stepper: Makes the steps.
        average: Of the trained weights, when asked for.
        identity: What the result follows from.
        total_steps: That the run will have; None where nobody knows.
        step: Optimizer steps done.
        epoch: That the next batch belongs to.
        position: Where this process's data stands; None at an epoch's beginning.
    """

    settings: TrainSettings
    accelerator: Accelerator
    team: Processes
    model: LbmModel
    trainable: Trainable
    parameters: Mapping[str, nn.Parameter]
    data: TrainingData
    objective: Objective
    stepper: Stepper
    average: MovingAverage | None
    identity: Mapping[str, Any]
    total_steps: int | None
    step: int = 0
    epoch: int = 0
    position: DataPosition | None = None


def make_session(settings: TrainSettings, accelerator: Accelerator, model: LbmModel) -> Session:
    """Put together what a run needs; nothing is trained yet.

    Args:
        settings: Of the run.
        accelerator: Of `accelerated`.
        model: Loaded, on the CPU or the accelerator's device. It is changed in place.

    Raises:
        SigmascopeError: Whatever is wrong with the settings, the data or the LoRA to go on with.
        OtherProcessError: It was so in another process.
    """
    team = Processes(accelerator)
    with team.together():
        data = open_data(settings, accelerator.process_index, team.size)
        # For libraries that draw; training's own draws have their generators.
        set_seed(settings.seed % _NUMPY_SEEDS)
        trainable = make_trainable(model, settings)
        model.denoiser.train()
        if settings.gradient_checkpointing:
            model.denoiser.enable_gradient_checkpointing()
        length = planned_steps(settings, data.shards, team.size)
        parameters = [parameter for _, parameter in trainable.parameters()]
        optimizer = make_optimizer(
            settings.optimizer, parameters, settings.learning_rate, settings.optimizer_kwargs
        )
        schedule = make_schedule(
            settings.lr_scheduler,
            optimizer,
            steps=length,
            warmup_steps=settings.warmup_steps,
            kwargs=settings.lr_scheduler_kwargs,
        )
        objective = Objective(settings)
        identity = resume_identity(settings, data.shards, team.size, length)
    prepared = prepare_step(accelerator, model, objective, optimizer, settings.mixed_precision)
    named = dict(trainable.parameters())
    average = None if settings.ema_decay is None else MovingAverage(list(named.values()), settings.ema_decay)
    return Session(
        settings=settings,
        accelerator=accelerator,
        team=team,
        model=model,
        trainable=trainable,
        parameters=named,
        data=data,
        objective=objective,
        stepper=Stepper(accelerator, prepared, schedule, settings.max_grad_norm, team),
        average=average,
        identity=identity,
        total_steps=length,
    )


def follows_length(settings: TrainSettings) -> bool:
    """Whether the learning rate of a step depends on how many there will be."""
    return settings.lr_scheduler not in _STEADY


def open_data(settings: TrainSettings, process: int = 0, processes: int = 1) -> TrainingData:
    """The training data of one process.

    Raises:
        ConfigError: A pattern matches nothing.
        FileError: A shard does not exist.
    """
    return TrainingData(
        settings.lbm,
        DataOptions(
            shards=settings.train_shards,
            batch_size=settings.batch_size,
            seed=settings.seed,
            shuffle_buffer=settings.shuffle_buffer,
            allow_pipe=settings.allow_pipe,
            max_member=settings.max_member,
            crop=settings.crop,
            size=settings.image_size,
            process=process,
            processes=processes,
        ),
    )


def capture_state(session: Session) -> TrainingState:
    """All that is needed to go on from here. Every process calls this; each knows its own part.

    Where FSDP spreads the weights, the main process's state has them whole, and the others' hold nothing in their
    place: the files are those of a training in one process.
    """
    scaler, average = session.accelerator.scaler, session.average
    keep = session.accelerator.is_main_process
    here = {
        "position": None if session.position is None else session.position.to_dict(),
        "random": random_state(session.accelerator.device),
    }
    progress = {
        "optimizer": gather_state(session.stepper.optimizer.state_dict(), keep=keep),
        "schedule": session.stepper.schedule.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "average": None if average is None else average.numbers(),
    }
    return TrainingState(
        step=session.step,
        epoch=session.epoch,
        identity=session.identity,
        weights=gather_state(session.parameters, keep=keep),
        average=None
        if average is None
        else gather_state(average.weights(list(session.parameters)), keep=keep),
        progress=progress,
        processes=tuple(session.team.objects(here)),
    )


def trained_weights(session: Session) -> dict[str, Tensor]:
    """The trained weights as they are given away, by name: their average where one is kept.

    Every process calls this; the main one's are whole.
    """
    weights: Mapping[str, Tensor] = session.parameters
    if session.average is not None:
        weights = session.average.weights(list(session.parameters))
    return gather_state(weights, keep=session.accelerator.is_main_process)


def restore(session: Session, state: TrainingState, checkpoint: Path) -> None:
    """Go on from a checkpoint of this same training.

    Raises:
        CheckpointError: It does not hold what this training needs.
    """
    weights = state.weights
    different = [
        name
        for name in session.parameters.keys() | weights.keys()
        if name not in session.parameters
        or name not in weights
        or session.parameters[name].shape != weights[name].shape
    ]
    if different:
        raise CheckpointError(
            checkpoint,
            f"holds other weights than are trained here, first {min(different)}.",
            hint="Start anew with --no_resume.",
        )
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            parameter.copy_(shard_like(weights[name], parameter))
    progress, scaler = state.progress, session.accelerator.scaler
    parameters = list(session.parameters.values())
    session.stepper.optimizer.load_state_dict(shard_optimizer_state(progress["optimizer"], parameters))
    session.stepper.schedule.load_state_dict(progress["schedule"])
    if scaler is not None and progress["scaler"] is not None:
        scaler.load_state_dict(progress["scaler"])
    if session.average is not None and state.average is not None:
        shadows = [shard_like(state.average[name], like) for name, like in session.parameters.items()]
        session.average.restore(progress["average"], shadows)
    session.step, session.epoch = state.step, state.epoch
    index, size = session.accelerator.process_index, session.team.size
    positions = [
        DataPosition.from_dict(process["position"])
        for process in state.processes
        if process["position"] is not None  # in all of them, at an epoch's beginning
    ]
    if positions:
        same = len(positions) == size
        session.position = positions[index] if same else redistribute(positions, index, size)
    if index < len(state.processes):
        restore_random_state(state.processes[index]["random"], session.accelerator.device)


def resume_identity(
    settings: TrainSettings, shards: Sequence[str], processes: int, steps: int | None
) -> dict[str, Any]:
    """Describe a training by what its result follows from, as JSON values.

    Files are told by name, size and a part of their content, so that a folder may be moved.

    Args:
        settings: Of the run.
        shards: What `train_shards` stands for, in order.
        processes: How many share the data.
        steps: Of the whole run; they count where the learning rate follows from them.
    """
    values = settings.model_dump(mode="json", exclude=set(FREE | _NAMES_OF_FILES))
    values["train_shards"] = [
        [Path(shard).name, Path(shard).stat().st_size] if Path(shard).is_file() else [shard, None]
        for shard in shards
    ]
    values["base_model_path"] = _weights_facts(settings.base_model_path)
    start = settings.lora_weights_path
    values["lora_weights_path"] = None if start is None else _weights_facts(start)
    values["processes"] = processes
    values["schedule_steps"] = steps if follows_length(settings) else None
    return values


def _weights_facts(path: Path) -> list[Any]:
    """Name, bytes, and a digest of each file's head and tail: reading all of a large base would take minutes."""
    digest = hashlib.blake2b(digest_size=8)
    with open_checkpoint(path) as checkpoint:
        files = list(checkpoint.files)
        for file in files:
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLED_BYTES))
                stream.seek(max(0, file.stat().st_size - _SAMPLED_BYTES))
                digest.update(stream.read(_SAMPLED_BYTES))
    return [Path(path).name, sum(file.stat().st_size for file in files), digest.hexdigest()]


def require_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse to resume a training that was another one.

    The number of processes may change where a step has as many samples as before.

    Raises:
        ConfigError: Names every key that differs, with both values.
    """
    different = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if "processes" in different and _step_samples(before) == _step_samples(now):
        different = [key for key in different if key not in _OF_A_STEP]
    if different:
        listed = "; ".join(
            f"{key}: {_shortened(before.get(key))} then, {_shortened(now.get(key))} now" for key in different
        )
        raise ConfigError(
            f"{checkpoint}: was trained with other settings ({listed}).",
            hint="Set them back, choose another save_ckpt_path, or start anew with --no_resume.",
        )


def _step_samples(values: Mapping[str, Any]) -> int:
    return math.prod(values[key] for key in _OF_A_STEP)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    needed = follows_length(settings) and settings.max_steps is None
    piped = any(shard.startswith(PIPE) for shard in shards)
    samples = None
    if not piped and (needed or sum(Path(shard).stat().st_size for shard in shards) <= COUNTED_BYTES):
        samples = count_samples(shards)
    if samples is None:
        return settings.max_steps
    batches = -(-(samples // processes) // settings.batch_size)
    steps = epochs * -(-batches // settings.gradient_accumulation_steps)
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def epoch_limit(settings: TrainSettings) -> int | None:
    """Epochs to train at most; None where `max_steps` alone was given, which then decides."""
    if settings.max_steps is not None and "max_epochs" not in settings.model_fields_set:
        return None
    return settings.max_epochs


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
