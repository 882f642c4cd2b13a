"""All that one training run works with, made from its settings and brought to where a checkpoint left off."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from sigmascope.errors import CheckpointError
from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.checkpoint_files import TrainingState
from sigmascope.lbm.training.distributed import Team
from sigmascope.lbm.training.ema import MovingAverage
from sigmascope.lbm.training.identity import identity
from sigmascope.lbm.training.injection import TrainableFull, TrainableLora, prepare
from sigmascope.lbm.training.objective import Objective
from sigmascope.lbm.training.optimizers import make_optimizer, make_schedule
from sigmascope.lbm.training.plan_length import follows_length, planned_steps
from sigmascope.lbm.training.random_state import random_state, restore_random_state
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.step import Stepper, TrainingStep

_NUMPY_SEEDS: Final = 2**32


@dataclass
class Session:
    """A training run in one process.

    Attributes:
        settings: Of the run.
        accelerator: Of the run.
        team: All its processes.
        model: As it is outside of what Accelerate wraps around it.
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
    trainable: TrainableLora | TrainableFull
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

    def state(self) -> TrainingState:
        """All that is needed to go on from here. Every process calls this; each knows its own part."""
        scaler = self.accelerator.scaler
        here = {
            "position": None if self.position is None else self.position.to_dict(),
            "random": random_state(self.accelerator.device),
        }
        progress = {
            "optimizer": self.stepper.optimizer.state_dict(),
            "schedule": self.stepper.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "average": None if self.average is None else self.average.numbers(),
        }
        average = None if self.average is None else self.average.weights(list(self.parameters))
        return TrainingState(
            step=self.step,
            epoch=self.epoch,
            identity=self.identity,
            weights=dict(self.parameters),
            average=average,
            progress=progress,
            processes=tuple(self.team.objects(here)),
        )

    def restore(self, state: TrainingState, checkpoint: Path) -> None:
        """Go on from a checkpoint of this same training.

        Raises:
            CheckpointError: It does not hold what this training needs.
        """
        _copy_weights(self.parameters, state.weights, checkpoint)
        progress, scaler = state.progress, self.accelerator.scaler
        self.stepper.optimizer.load_state_dict(progress["optimizer"])
        self.stepper.schedule.load_state_dict(progress["schedule"])
        if scaler is not None and progress["scaler"] is not None:
            scaler.load_state_dict(progress["scaler"])
        if self.average is not None and state.average is not None:
            self.average.restore(progress["average"], [state.average[name] for name in self.parameters])
        here = state.processes[self.accelerator.process_index]
        position = here["position"]
        self.step, self.epoch = state.step, state.epoch
        self.position = None if position is None else DataPosition.from_dict(position)
        restore_random_state(here["random"], self.accelerator.device)


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
    """
    team = Team(accelerator)
    data = open_data(settings, accelerator.process_index, team.size)
    set_seed(
        settings.seed % _NUMPY_SEEDS
    )  # for libraries that draw; training's own draws have their generators
    trainable = prepare(model, settings)
    model.denoiser.train()
    if settings.gradient_checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    named = dict(trainable.parameters())
    optimizer = make_optimizer(
        settings.optimizer, named.values(), settings.learning_rate, settings.optimizer_kwargs
    )
    length = planned_steps(settings, data.shards, team.size)
    schedule = make_schedule(
        settings.lr_scheduler,
        optimizer,
        steps=length,
        warmup_steps=settings.warmup_steps,
        kwargs=settings.lr_scheduler_kwargs,
    )
    objective = Objective(settings)
    module, prepared = accelerator.prepare(TrainingStep(model, objective), optimizer)
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
        stepper=Stepper(accelerator, module, prepared, schedule, settings.max_grad_norm, team),
        average=average,
        identity=identity(settings, data.shards, team.size, length if follows_length(settings) else None),
        total_steps=length,
    )


def _copy_weights(
    parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], checkpoint: Path
) -> None:
    different = [
        name
        for name in parameters.keys() | weights.keys()
        if name not in parameters or name not in weights or parameters[name].shape != weights[name].shape
    ]
    if different:
        raise CheckpointError(
            checkpoint,
            f"holds other weights than are trained here, first {min(different)}.",
            hint="Start anew with --no_resume.",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
