"""Train a Latent Bridge Matching model: LoRA or every weight, in one process or many, stopped and resumed at will.

The parts are in `sigmascope.lbm.training`; this is how they follow each other.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sigmascope.errors import NonFiniteError, SigmascopeError, WriteError
from sigmascope.lbm.batches import Batch
from sigmascope.lbm.data import SkippedSamples
from sigmascope.lbm.memory_errors import LESS_FOR_TRAINING, within_memory
from sigmascope.lbm.training.accelerating import accelerated
from sigmascope.lbm.training.checkpointing import CheckpointFolder
from sigmascope.lbm.training.distributed import Team, naming_lost_processes
from sigmascope.lbm.training.loop import TrainingLoop
from sigmascope.lbm.training.monitoring import Watch, nonfinite_finding
from sigmascope.lbm.training.results import add_lora, write_result
from sigmascope.lbm.training.session import Session, make_session
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.starting import go_on, load_base, require_same_start
from sigmascope.lbm.training.stopping import StopReason, StopSignals
from sigmascope.lbm.training.telling import Listeners, StepLog, Teller
from sigmascope.lbm.training.trackers import check_tracker, start_trackers
from sigmascope.lbm.training.validation import Validation, read_samples
from sigmascope.progress import Progress, no_progress
from sigmascope.records.os_errors import DISK_FULL, reason_of, writing_hint
from sigmascope.records.run import Run

__all__ = ["Listeners", "StepLog", "TrainReport", "train"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainReport:
    """What a training came to.

    Attributes:
        step: Optimizer steps done, those of earlier sessions included.
        resumed_from: Step that this session began at; None when it began anew.
        stopped_by: The signal that ended it early; None when it came to its end.
        logs: What was logged in this session, oldest first.
        validations: Made in this session, oldest first.
        checkpoint: The last one; None when there is none yet.
        files: Weights that were written at the end: LoRA files, or the whole model. None when stopped early.
        skipped: Samples that could not be used.
        run: The record, saved beside the checkpoints as `run.json`.
        set_aside: Where checkpoints of an earlier training went when this one was to begin anew.
    """

    step: int
    resumed_from: int | None
    stopped_by: StopReason | None
    logs: Sequence[StepLog]
    validations: Sequence[Validation]
    checkpoint: Path | None
    files: Sequence[Path]
    skipped: SkippedSamples
    run: Run
    set_aside: Path | None


def train(
    settings: TrainSettings,
    *,
    progress: Progress = no_progress,
    resume: bool = True,
    listeners: Listeners | None = None,
) -> TrainReport:
    """Train as the settings say, and write what was trained.

    SIGTERM and Ctrl-C end it after the step at hand, with a checkpoint. Called again with the same settings it
    goes on from there; on one CPU process the weights are then those of a training that was never stopped, bit
    for bit.

    Args:
        settings: Of the run.
        progress: Told of loading.
        resume: Go on from the newest good checkpoint in `save_ckpt_path`; False begins anew and moves the
            checkpoints there aside.
        listeners: Told of steps, logs and validations.

    Raises:
        ConfigError: The settings, the data or the checkpoint do not fit, or memory runs out; a package is missing.
        NonFiniteError: Loss or gradient became NaN or Inf; names the step, the samples and the layers.
        WriteError: The disk is full or refuses. The last checkpoint is intact.
        OtherProcessError: Another process failed or ended. The last checkpoint is intact.
        SigmascopeError: Whatever else is wrong with the files named by the settings.
    """
    check_tracker(settings.tracker)
    folder = CheckpointFolder(settings.save_ckpt_path, settings.keep_checkpoints)
    watch = Watch()
    with StopSignals() as stop, accelerated(settings) as accelerator, ExitStack() as held:
        main, team = accelerator.is_main_process, Team(accelerator)
        with naming_lost_processes(team):
            with team.together():
                samples = read_samples(settings)
                if main:
                    held.enter_context(folder.locked())
                aside = folder.set_aside() if main and not resume else None
            try:
                with within_memory("training", LESS_FOR_TRAINING), watch.recorder:
                    with team.together():
                        model = load_base(settings, accelerator, progress)
                    session = make_session(settings, accelerator, model)
                    report = _train(session, folder, samples, watch, stop, listeners or Listeners(), aside)
            except OSError as error:
                raise _full_disk(error, folder.path) from error
            except NonFiniteError as error:
                watch.findings.append(nonfinite_finding(error.message))
                raise
            finally:
                if main:
                    _save_run(watch, folder.path)
            accelerator.end_training()
    return report


def _train(
    session: Session,
    folder: CheckpointFolder,
    samples: Sequence[Batch],
    watch: Watch,
    stop: StopSignals,
    listeners: Listeners,
    aside: Path | None,
) -> TrainReport:
    loop = TrainingLoop(
        session=session,
        folder=folder,
        samples=samples,
        watch=watch,
        stop=stop,
        teller=Teller(session, listeners),
        add_files=partial(add_lora, session),
    )
    with session.team.together():
        resumed = go_on(loop) if aside is None else None
    require_same_start(session)
    with session.team.together():
        if session.accelerator.is_main_process:
            watch.begin(folder.path, session.step, aside)
        start_trackers(session.accelerator, session.settings, session.step)
    reason = loop.run()
    files = [] if reason else write_result(session, folder.path)
    return TrainReport(
        step=session.step,
        resumed_from=resumed,
        stopped_by=reason,
        logs=loop.teller.logs,
        validations=loop.validations,
        checkpoint=loop.checkpoint,
        files=files,
        skipped=session.data.skipped,
        run=watch.run(),
        set_aside=aside,
    )


def _save_run(watch: Watch, folder: Path) -> None:
    """Keep the record, also of a failure; when that fails too, the failure itself is what the user must see."""
    try:
        watch.save_last(folder)
    except SigmascopeError as error:
        _log.warning("The record was not saved: %s", error)


def _full_disk(error: OSError, folder: Path) -> Exception:
    if error.errno not in DISK_FULL:
        return error
    return WriteError(folder, f"cannot be written to ({reason_of(error)}).", hint=writing_hint(error))
