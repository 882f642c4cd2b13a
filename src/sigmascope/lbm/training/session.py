"""All that one training run works with, made from its settings and brought to where a checkpoint left off."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.distributed import Team
from sigmascope.lbm.training.ema import MovingAverage
from sigmascope.lbm.training.identity import identity
from sigmascope.lbm.training.injection import Trainable, prepare
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.optimizers import make_optimizer, make_schedule
from sigmascope.lbm.training.plan_length import follows_length, planned_steps
from sigmascope.lbm.training.preparing import prepare_step
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.step import Stepper

_NUMPY_SEEDS: Final = 2**32


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
    team: Team
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
            crop=settings.crop,
            size=settings.image_size,
            process=process,
            processes=processes,
        ),
    )


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
    team = Team(accelerator)
    with team.together():
        data = open_data(settings, accelerator.process_index, team.size)
        # For libraries that draw; training's own draws have their generators.
        set_seed(settings.seed % _NUMPY_SEEDS)
        trainable = _trainable(model, settings)
        length = planned_steps(settings, data.shards, team.size)
        optimizer, schedule = _optimizer(settings, trainable, length)
        objective = Objective(settings)
        known = identity(settings, data.shards, team.size, length if follows_length(settings) else None)
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
        identity=known,
        total_steps=length,
    )


def _trainable(model: LbmModel, settings: TrainSettings) -> Trainable:
    trainable = prepare(model, settings)
    model.denoiser.train()
    if settings.gradient_checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    return trainable


def _optimizer(
    settings: TrainSettings, trainable: Trainable, length: int | None
) -> tuple[Optimizer, LRScheduler]:
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
    return optimizer, schedule
