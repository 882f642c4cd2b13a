"""What a session keeps in a checkpoint, and how it goes on from one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.errors import CheckpointError
from sigmascope.lbm.data import DataPosition
from sigmascope.lbm.shards.position import dealt_anew
from sigmascope.lbm.training.checkpoint_files import TrainingState
from sigmascope.lbm.training.random_state import random_state, restore_random_state
from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.sharding import collected, spread, spread_optimizer_state


def state_of(session: Session) -> TrainingState:
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
        "optimizer": collected(session.stepper.optimizer.state_dict(), keep=keep),
        "schedule": session.stepper.schedule.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "average": None if average is None else average.numbers(),
    }
    return TrainingState(
        step=session.step,
        epoch=session.epoch,
        identity=session.identity,
        weights=collected(session.parameters, keep=keep),
        average=None if average is None else collected(average.weights(list(session.parameters)), keep=keep),
        progress=progress,
        processes=tuple(session.team.objects(here)),
    )


def result_of(session: Session) -> dict[str, Tensor]:
    """The trained weights as they are given away, by name: their average where one is kept.

    Every process calls this; the main one's are whole.
    """
    weights: Mapping[str, Tensor] = session.parameters
    if session.average is not None:
        weights = session.average.weights(list(session.parameters))
    return collected(weights, keep=session.accelerator.is_main_process)


def restore(session: Session, state: TrainingState, checkpoint: Path) -> None:
    """Go on from a checkpoint of this same training.

    Raises:
        CheckpointError: It does not hold what this training needs.
    """
    _copy_weights(session.parameters, state.weights, checkpoint)
    progress, scaler = state.progress, session.accelerator.scaler
    parameters = list(session.parameters.values())
    session.stepper.optimizer.load_state_dict(spread_optimizer_state(progress["optimizer"], parameters))
    session.stepper.schedule.load_state_dict(progress["schedule"])
    if scaler is not None and progress["scaler"] is not None:
        scaler.load_state_dict(progress["scaler"])
    if session.average is not None and state.average is not None:
        shadows = [spread(state.average[name], like) for name, like in session.parameters.items()]
        session.average.restore(progress["average"], shadows)
    session.step, session.epoch = state.step, state.epoch
    session.position = _position(session, [process["position"] for process in state.processes])
    index = session.accelerator.process_index
    if index < len(state.processes):
        restore_random_state(state.processes[index]["random"], session.accelerator.device)


def _position(session: Session, stored: list[Any]) -> DataPosition | None:
    """Where this process's data goes on; those of an epoch's beginning are None, in all processes."""
    index, size = session.accelerator.process_index, session.team.size
    known = [DataPosition.from_dict(position) for position in stored if position is not None]
    if not known:
        return None
    return known[index] if len(known) == size else dealt_anew(known, index, size)


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
            parameter.copy_(spread(weights[name], parameter))
