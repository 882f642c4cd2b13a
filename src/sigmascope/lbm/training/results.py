"""What a training gives away: the LoRA in each checkpoint, and the files at the end."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lbm.training.checkpoint_files import TrainingState
from sigmascope.lbm.training.export import write_trained
from sigmascope.lbm.training.injection import TrainableFull
from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.session_state import result_of

_log = logging.getLogger(__name__)


def add_lora(session: Session, state: TrainingState, folder: Path) -> None:
    """Put the LoRA of a checkpoint into its folder, so that it can be tried before the end.

    Args:
        session: Of the run.
        state: That the checkpoint holds.
        folder: Its folder, while it is being written.
    """
    if isinstance(session.trainable, TrainableFull):
        return  # the checkpoint holds these weights already, and a whole model more would fill disks
    try:
        _write(session, folder, state.weights if state.average is None else state.average)
    except NonFiniteError as error:
        _log.warning("The checkpoint has no LoRA file: %s", error)


def write_result(session: Session, folder: Path) -> list[Path]:
    """Write what was trained. Every process calls this; the main one writes.

    Returns:
        The files of weights; none in other processes.

    Raises:
        NonFiniteError: A trained value is NaN or Inf.
        WriteError: A file cannot be written.
        OtherProcessError: Either was so in the main process.
    """
    weights = result_of(session)
    files: list[Path] = []
    with session.team.together():
        if session.accelerator.is_main_process:
            files = _write(session, folder, weights)
    return files


def _write(session: Session, folder: Path, weights: Mapping[str, Tensor]) -> list[Path]:
    name = "model" if isinstance(session.trainable, TrainableFull) else "lora"
    return write_trained(
        session.trainable, session.settings, session.step, folder, name=name, weights=weights
    )
