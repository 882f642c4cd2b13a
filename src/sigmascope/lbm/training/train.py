"""Train a Latent Bridge Matching model (`train`), or say what a training would do (`dry_run`).

A training loads its base and continues from its newest checkpoint. The loop makes optimizer steps, and validations and
checkpoints in between. SIGTERM and Ctrl-C end it after the current step, with a checkpoint.

A dry run loads no weights. It reports what would be trained, the data, an estimate of one process's memory, and the
checkpoint that it would resume.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, Final, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    SigmascopeError,
    WriteError,
)
from sigmascope.files import DISK_FULL, reason_of, writing_hint
from sigmascope.lbm.data import DataPosition, SkippedSamples, TrainingData
from sigmascope.lbm.devices import LESS_FOR_TRAINING, explain_out_of_memory
from sigmascope.lbm.images import Size
from sigmascope.lbm.model import LbmModel, build_lbm, check_fits, load_lbm
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.shards import PIPE, expand_shards
from sigmascope.lbm.training.accelerate import (
    accelerated,
    check_tracker,
    log_pictures,
    start_trackers,
)
from sigmascope.lbm.training.checkpoints import CheckpointFolder, checkpoint_name, newest_readable, read_facts
from sigmascope.lbm.training.distributed import (
    Processes,
    StepBatches,
    launched_processes,
    naming_lost_processes,
    reshard,
    step_batches,
)
from sigmascope.lbm.training.lora_layers import PlanRow, TrainableFull, make_trainable, plan_training
from sigmascope.lbm.training.metrics import (
    RUN_FILE,
    TRAINING,
    Listeners,
    MetricsLogger,
    StepLog,
    TrainingRecord,
    Validation,
    nonfinite_finding,
    read_samples,
    save_sheet,
    validate,
)
from sigmascope.lbm.training.objective import lpips_package
from sigmascope.lbm.training.own_base import check_own_base, make_own_base
from sigmascope.lbm.training.session import (
    Session,
    add_lora,
    capture_state,
    epoch_limit,
    make_schedule,
    make_session,
    open_data,
    planned_steps,
    reached_limits,
    require_same_settings,
    restore,
    resume_identity,
    write_result,
)
from sigmascope.lbm.training.settings import TrainSettings, make_optimizer
from sigmascope.lora.loadable import WrittenLoads
from sigmascope.pipeline.lora_loading import loads_of_written
from sigmascope.pipeline.peak_prediction import FusedAttention
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Run
from sigmascope.records.serialization import load_run

_log = logging.getLogger(__name__)

StopReason = Literal["SIGTERM", "SIGINT"]

EPOCH_SAVE_DIVISOR: Final = 10
"""An epoch's end is saved unless fewer than 1/10 of `save_interval` steps were made since the last checkpoint."""
_SIGNALS: dict[int, StopReason] = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}
EXIT_CODES: dict[StopReason, int] = {reason: 128 + number for number, reason in _SIGNALS.items()}
"""As shells report a process that a signal ended."""


@dataclass(frozen=True)
class TrainReport:
    """The outcome of a training.

    Attributes:
        step: Optimizer steps done, including those of earlier sessions.
        resumed_from: Step that this session resumed at; None if it started anew.
        stopped_by: The signal that ended it early; None if it was completed.
        logs: Reports of this session, oldest first.
        validations: Validations of this session, oldest first.
        checkpoint: The last checkpoint; None if there is none yet.
        files: Weights that were written at the end: LoRA files, or the whole model. None if it was stopped early.
        skipped: Samples that could not be used.
        run: The record, saved beside the checkpoints as `run.json`.
        set_aside: Where the checkpoints of an earlier training were moved if this one had to start anew.
        reached: The settings that left nothing to train, of `max_steps` and `max_epochs`; empty where steps were made.
        loads: What takes each LoRA of `files`, by file: our own reader, since an LBM has no other host.
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
    reached: Sequence[str]
    loads: Mapping[Path, WrittenLoads] = field(default_factory=dict)


def train(
    settings: TrainSettings,
    *,
    progress: Progress = no_progress,
    resume: bool | None = None,
    listeners: Listeners | None = None,
) -> TrainReport:
    """Train as the settings say, and write the result.

    SIGTERM and Ctrl-C end the training after the current step, with a checkpoint. Another call with the same settings
    continues from there; in a single process on the CPU, the weights are then bit for bit those of a training that was
    never stopped.

    Args:
        settings: Settings of the run.
        progress: Called while loading.
        resume: Continue from the newest good checkpoint in `save_ckpt_path`; False starts anew and moves existing
            checkpoints aside; None does what `resume_from_checkpoint` says.
        listeners: Called after steps, logs and validations.

    Raises:
        ConfigError: The settings, the data or the checkpoint do not fit, memory runs out, or a package is missing.
        NonFiniteError: Loss or gradient became NaN or Inf; names the step, the samples and the layers.
        WriteError: The disk is full or refuses. The last checkpoint is intact.
        OtherProcessError: Another process failed or ended. The last checkpoint is intact.
        SigmascopeError: Something else is wrong with the files that the settings name.
    """
    _check_packages(settings)
    resume = settings.resume_from_checkpoint if resume is None else resume
    folder = CheckpointFolder(settings.save_ckpt_path, settings.keep_checkpoints)
    watch = TrainingRecord()
    with StopSignals() as stop, accelerated(settings) as accelerator, ExitStack() as held:
        main, team = accelerator.is_main_process, Processes(accelerator)
        with naming_lost_processes(team):
            with team.together():
                samples = read_samples(settings)
                if main:
                    held.enter_context(folder.locked())
                if main:
                    _say_what_is_left_out(settings)
                    make_own_base(settings, progress)
            try:
                with explain_out_of_memory("training", LESS_FOR_TRAINING), watch.recorder:
                    with team.together():
                        model = load_base(settings, accelerator, progress)
                    session = make_session(settings, accelerator, model)
                    with team.together():  # nothing is moved for a training that is refused
                        aside = folder.set_aside() if main and not resume else None
                    report = _train(session, folder, samples, watch, stop, listeners or Listeners(), aside)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                raise WriteError(
                    folder.path, f"cannot be written to ({reason_of(error)}).", hint=writing_hint(error)
                ) from error
            except NonFiniteError as error:
                watch.findings.append(nonfinite_finding(error.message))
                raise
            finally:
                if main:
                    try:  # also of a failure, which is what the user must see when this fails too
                        watch.save_last(folder.path)
                    except SigmascopeError as error:
                        _log.warning("The record was not saved: %s", error)
            accelerator.end_training()
    return replace(report, run=watch.run())  # now it is over


class StopSignals:
    """Within its `with` block the first SIGTERM or Ctrl-C only sets `reason`; a second Ctrl-C interrupts at once.

    Only the main thread receives signals: in another thread the block changes nothing, but `request` still works.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self._before: dict[int, Any] = {}

    def request(self, reason: StopReason) -> None:
        """Ask for the end, as a signal does."""
        self.reason = self.reason or reason

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.request(_SIGNALS[number])


def load_base(settings: TrainSettings, accelerator: Accelerator, progress: Progress) -> LbmModel:
    """Load the base in the precision of training; trained weights stay float32.

    If FSDP shards the denoiser, no device needs room for all of it.
    """
    sharded = accelerator.is_fsdp2
    model = load_lbm(
        settings.base_model_path,
        settings.lbm,
        dtype=settings.weight_dtype,
        device="cpu" if sharded else accelerator.device,
        progress=progress,
    )
    if sharded:
        model.vae.to(accelerator.device)
    return model


def _train(
    session: Session,
    folder: CheckpointFolder,
    samples: Sequence[Batch],
    watch: TrainingRecord,
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
        teller=MetricsLogger(session, listeners),
    )
    resumed: int | None = None
    before: Mapping[str, Any] = {}
    with session.team.together():
        newest = folder.newest() if aside is None else None
        if newest is not None:
            checkpoint, state = newest
            require_same_settings(state.identity, session.identity, checkpoint)
            restore(session, state, checkpoint)
            loop.checkpoint, resumed, before = checkpoint, state.step, state.identity
            if session.accelerator.is_main_process:
                folder.remove_older(checkpoint)  # which a killed run had no time for
    # Processes on another machine may not see the same checkpoints.
    steps = [row[0] for row in session.team.gather([session.step])]
    if len(set(steps)) > 1:
        raise ConfigError(
            f"save_ckpt_path: processes found checkpoints of different steps ({', '.join(map(str, steps))}).",
            hint="Choose a folder that all processes share.",
        )
    with session.team.together():
        if session.accelerator.is_main_process:
            watch.begin(folder.path, session.step, aside)
        start_trackers(session.accelerator, session.settings, session.step)
    reason = loop.run()
    files = [] if reason else write_result(session, folder.path)
    reached: Sequence[str] = ()
    if reason is None and session.step == resumed:
        # Where nobody has counted the steps of the epochs, only these can have ended it.
        limits = reached_limits(session.settings, session.sizes, session.team.size, before, session.step)
        reached = limits or ("max_epochs",)
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
        reached=reached,
        loads={}
        if isinstance(session.trainable, TrainableFull)
        else {file: loads_of_written(file) for file in files},
    )


@dataclass
class TrainingLoop:
    """Trains a session until it is complete or stopped.

    Attributes:
        session: What is trained, and how far it is.
        folder: Folder of the checkpoints.
        samples: Samples for validation.
        watch: The record.
        stop: Asks for an early end.
        teller: Reports every step.
        checkpoint: The last checkpoint of this training.
        validations: All validations of this session.
    """

    session: Session
    folder: CheckpointFolder
    samples: Sequence[Batch]
    watch: TrainingRecord
    stop: StopSignals
    teller: MetricsLogger
    checkpoint: Path | None = None
    validations: list[Validation] = field(default_factory=list)
    _saved_step: int | None = None
    _validated_step: int | None = None

    def run(self) -> StopReason | None:
        """Train; afterwards the last step is in a checkpoint, and validated unless training was stopped early.

        Returns:
            What stopped it early; None if it was completed.

        Raises:
            NonFiniteError: Loss or gradient is NaN or Inf.
            WriteError: A checkpoint cannot be written; those before are intact.
            DataError: The shards hold nothing to train on.
        """
        session = self.session
        self._saved_step = None if self.checkpoint is None else session.step
        with self.watch.recorder.stage(TRAINING) as stage:
            stage.module("denoiser", session.model.denoiser)
            try:
                reason = self._epochs()
                if reason is None or session.step > 0:
                    self._save()
                if reason is None and self._validated_step != session.step:
                    self._validate()  # after the checkpoint, which must not be lost where this fails
                return reason
            finally:
                for name, value in self.watch.spent.facts().items():
                    stage.fact(name, value)
                stage.fact("optimizer_steps", session.step)
                stage.fact("skipped_samples", session.data.skipped.count)

    def _epochs(self) -> StopReason | None:
        session = self.session
        last = epoch_limit(session.settings)
        if session.step == 0:
            self._validate()
        while not self._is_done() and (last is None or session.epoch < last):
            if reason := agreed_reason(self.stop, session.team) or self._epoch():
                return reason
            if self._is_done():
                return None
            session.epoch, session.position = session.epoch + 1, None
            made = session.step - (self._saved_step or 0)
            if made * EPOCH_SAVE_DIVISOR >= session.settings.save_interval:
                self._save()
        return None

    def _epoch(self) -> StopReason | None:
        """Train to the end of the data, of the steps, or until someone stops it."""
        session, settings = self.session, self.session.settings
        seen = 0 if session.position is None else 1
        with closing(self._groups()) as all_groups:
            for group in all_groups:
                seen += group.samples
                self._step(group)
                if session.step % settings.validate_every == 0:
                    self._validate()
                reason = agreed_reason(self.stop, session.team)
                if reason or self._is_done():
                    return reason
                if session.step % settings.save_interval == 0:
                    self._save()
        if seen == 0:
            raise DataError("train_shards hold no picture that can be decoded.", hint="Check the data.")
        return None

    def _groups(self) -> Generator[StepBatches[DataPosition], None, None]:
        session = self.session
        stream = session.data.batches(session.epoch, session.position)
        with closing(stream):  # its threads end now, whatever ends the epoch
            rest = step_batches(stream, session.settings.gradient_accumulation_steps, session.team)
            while True:
                with self.watch.spent.on("data"):
                    group = next(rest, None)
                if group is None:
                    return
                yield group

    def _step(self, group: StepBatches[DataPosition]) -> None:
        session = self.session
        last = None if self.checkpoint is None else self.checkpoint.name
        with self.watch.spent.on("step"), self.watch.recorder.step():
            result = session.stepper.make(group, session.step + 1, last)
            if session.average is not None and not result.skipped:
                session.average.update()
        session.step, session.position = session.step + 1, group.position
        self.watch.spent.steps += 1
        self.teller.step(result)

    def _is_done(self) -> bool:
        steps = self.session.settings.max_steps
        return steps is not None and self.session.step >= steps

    def _validate(self) -> None:
        """The main process makes the pictures; other processes join in if they hold a part of the model.

        Nobody's training is touched by it.
        """
        session = self.session
        if not self.samples:
            return
        self._validated_step = session.step
        main, sharded = session.accelerator.is_main_process, session.accelerator.is_fsdp2
        with self.teller.pause(), session.team.together():
            if main or sharded:
                with self.watch.spent.on("validation"), self.watch.recorder.stage("validation"):
                    with session.average.in_place() if session.average is not None else nullcontext():
                        validation = validate(
                            session.model,
                            self.samples,
                            session.step,
                            session.settings.num_steps,
                            conditioning=session.objective.conditioning,
                            autocast=session.stepper.prepared.backend.autocast(),
                        )
                        reshard(session.model)
                    if main:
                        self._show(validation)

    def _show(self, validation: Validation) -> None:
        accelerator, step = self.session.accelerator, self.session.step
        self.validations.append(validation)
        sheet = save_sheet(validation, self.folder.path)
        values = {f"validation/psnr_{count}": value for count, value in validation.psnr.items()}
        accelerator.log(values, step=step)
        log_pictures(accelerator, "validation/pictures", validation.sheet, step)
        self.teller.listeners.on_validation(validation, sheet)

    def _save(self) -> None:
        """Write a checkpoint, unless this step is in one already."""
        session = self.session
        if self._saved_step == session.step:
            return
        main = session.accelerator.is_main_process
        with self.teller.pause():
            with self.watch.spent.on("saving"), self.watch.recorder.stage("checkpoint_saving"):
                state = capture_state(session)
                with session.team.together():
                    if main:
                        self.folder.save(state, lambda folder: add_lora(session, state, folder))
            self.checkpoint = self.folder.path / checkpoint_name(session.step)
            self._saved_step = session.step
            with session.team.together():
                if main:
                    self.watch.save(self.folder.path)


def agreed_reason(stop: StopSignals, team: Processes) -> StopReason | None:
    """The reason for which any process was asked to stop. All call this together, and stop together."""
    code = -1 if stop.reason is None else list(EXIT_CODES).index(stop.reason)
    most = max(row[0] for row in team.gather([code]))
    return None if most < 0 else list(EXIT_CODES)[most]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process that holds the whole model.

    Attributes:
        weights: Of the model and the LoRA.
        gradients: Of what is trained.
        optimizer: Its state.
        average: The moving average of the weights.
        activations: What the backward pass needs for one batch; with gradient checkpointing, without what is computed
            again. LPIPS and temporary buffers are not included.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations


@dataclass(frozen=True)
class DryRun:
    """What would be trained, and on which data.

    Attributes:
        base: The model that is trained.
        backbone: What the run makes the base from; None where the base is there.
        trains: Such as `a LoRA of rank 8`.
        rows: The table of what is trained and what is frozen.
        trained_parameters: Number of all trained values.
        frozen_parameters: Number of all frozen values.
        shards: Shards of training.
        samples: Number of samples in them that can be used, as far as their headers tell; None if they cannot be counted.
        picture_size: (width, height) of the first batch, which was read and decoded; None if shards are commands,
            because a dry run does not run them.
        validation_samples: Number of validation samples that were read; None likewise.
        total_steps: Optimizer steps, for as many processes as were launched; None if it is not known.
        epochs: Times through the data; None if `max_steps` decides.
        step_samples: `batch_size`, `gradient_accumulation_steps` and processes: together the pairs of a step.
        memory: Memory of one process.
        seconds_left: Time of the steps to come at the pace of the last session; None if there was none.
        seconds_reason: Why that is unknown.
        folder: Where everything is written.
        resumes: The checkpoint that training would resume.
        done_steps: Steps that it has.
        reached: The settings that leave nothing to train after it, of `max_steps` and `max_epochs`.
    """

    base: Path
    backbone: str | None
    trains: str
    rows: Sequence[PlanRow]
    trained_parameters: int
    frozen_parameters: int
    shards: Sequence[str]
    samples: int | None
    picture_size: tuple[int, int] | None
    validation_samples: int | None
    total_steps: int | None
    epochs: int | None
    step_samples: tuple[int, int, int]
    memory: MemoryEstimate
    seconds_left: float | None
    seconds_reason: str | None
    folder: Path
    resumes: Path | None
    done_steps: int
    reached: Sequence[str]


def _check_packages(settings: TrainSettings) -> None:
    """Refuse what the settings need and is not installed, all of it at once.

    Raises:
        ConfigError: Names each package, and how to install it.
    """
    lacking: list[ConfigError] = []
    checks: list[Callable[[], object]] = [partial(check_tracker, settings.tracker)]
    if settings.pixel_loss_weight > 0 and settings.pixel_loss_type == "lpips":
        checks.append(lpips_package)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            lacking.append(error)
    if lacking:
        hints = " ".join(f"{error.hint}" for error in lacking)
        raise ConfigError(" ".join(error.message for error in lacking), hint=hints)


def _say_what_is_left_out(settings: TrainSettings) -> None:
    if settings.makes_base:
        what = "every weight of the denoiser" if settings.full_finetune else "a LoRA"
        _log.warning(
            "The YAML names no base, so it is %s, made from %s; what is trained is %s.",
            settings.base_model_path,
            settings.backbone_signature,
            what,
        )


def dry_run(settings: TrainSettings, *, resume: bool | None = None) -> DryRun:
    """Check everything that can go wrong before the first step, and report what would be trained.

    Args:
        settings: Settings of the run.
        resume: Whether training would resume; None does what `resume_from_checkpoint` says.

    Raises:
        SigmascopeError: What `train` would raise before its first step, if it can be found without loading weights.
    """
    _check_packages(settings)
    resume = settings.resume_from_checkpoint if resume is None else resume
    model = build_lbm(settings.lbm, device="meta")
    to_make = check_own_base(settings)
    if not to_make:
        with open_checkpoint(settings.base_model_path) as checkpoint:
            check_fits(model.state_dict(), checkpoint)
    plan = plan_training(model, settings)
    data = open_data(settings)
    size = None if _are_commands(data.shards) else _first_size(data)
    patterns = settings.validation_shards
    validation = expand_shards(patterns, allow_pipe=settings.allow_pipe) if patterns else ()
    sizes, processes = data.count_sizes(), launched_processes()
    steps = planned_steps(settings, sizes, processes)
    make_schedule(settings, torch.optim.SGD([nn.Parameter(torch.zeros(1))]), steps)
    # Whether checkpoints can be written there, without making the folder.
    path = settings.save_ckpt_path
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise WriteError(
            path, f"cannot be created: {there} is not a folder.", hint="Choose another save_ckpt_path."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise WriteError(
            path, f"cannot be written to: {there} is read-only.", hint="Choose another save_ckpt_path."
        )
    resumes, done = None, 0
    reached: Sequence[str] = ()
    if resume and (newest := newest_readable(path, read_facts)) is not None:
        resumes, facts = newest
        now = resume_identity(settings, data.shards, processes, steps)
        require_same_settings(facts["identity"], now, resumes)
        done, before = facts["step"], facts["identity"]
        steps = planned_steps(settings, sizes, processes, before)
        reached = reached_limits(settings, sizes, processes, before, done)
    pace = None if resumes is None else _median_step_seconds(path)
    left = None if steps is None or pace is None else max(0, steps - done) * pace
    return DryRun(
        base=settings.base_model_path,
        backbone=settings.backbone_signature if to_make else None,
        trains=_what_is_trained(settings),
        rows=plan.rows,
        trained_parameters=plan.trained_parameters,
        frozen_parameters=plan.frozen_parameters,
        shards=data.shards,
        samples=None if sizes is None else sum(sizes.values()),
        picture_size=size,
        validation_samples=None if _are_commands(validation) else len(read_samples(settings)),
        total_steps=steps,
        epochs=epoch_limit(settings),
        step_samples=(settings.batch_size, settings.gradient_accumulation_steps, processes),
        memory=estimate_memory(
            settings, size or settings.image_size or (settings.resolution, settings.resolution)
        ),
        seconds_left=left,
        seconds_reason=None if left is not None else _why_unknown(pace),
        folder=path,
        resumes=resumes,
        done_steps=done,
        reached=reached,
    )


def _what_is_trained(settings: TrainSettings) -> str:
    if settings.full_finetune:
        return "every weight of the denoiser"
    if settings.lora_weights_path is not None:
        return f"the LoRA {settings.lora_weights_path}"
    convolutions = settings.conv_rank in (None, settings.rank)
    return f"a LoRA of rank {settings.rank}" + (
        "" if convolutions else f" (convolutions {settings.conv_rank})"
    )


def _median_step_seconds(folder: Path) -> float | None:
    """Of the last session in that folder."""
    try:
        stages = [stage for stage in load_run(folder / RUN_FILE).walk() if stage.name == TRAINING]
    except SigmascopeError:
        return None
    seconds = [each for stage in stages for each in stage.steps.seconds]
    return median(seconds) if seconds else None


def _why_unknown(pace: float | None) -> str:
    if pace is None:
        return "no step of this training has been measured"
    return "the number of steps is unknown"


def _are_commands(shards: Sequence[str]) -> bool:
    return any(shard.startswith(PIPE) for shard in shards)


def _first_size(data: TrainingData) -> Size:
    """(width, height) of the first batch."""
    with explain_out_of_memory("the first batch", LESS_FOR_TRAINING):
        first = next(iter(data.batches(0)), None)
    if first is None:
        raise DataError("train_shards hold no sample that can be used.", hint="Check the keys in the YAML.")
    height, width = first[0].source.shape[-2:]
    return width, height


def estimate_memory(settings: TrainSettings, size: Size) -> MemoryEstimate:
    """Estimate the memory of a training on pictures of this (width, height)."""
    stored = build_lbm(settings.lbm, device="meta", dtype=settings.weight_dtype)
    trained = [parameter for _, parameter in make_trainable(stored, settings).parameters()]
    trained_bytes = _bytes(trained)
    return MemoryEstimate(
        weights=_bytes(stored.parameters()),
        gradients=trained_bytes,
        optimizer=round(trained_bytes * _state_share(settings)),
        average=trained_bytes if settings.ema_decay is not None else 0,
        activations=_saved_bytes(settings, size),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_share(settings: TrainSettings) -> float:
    """Bytes of the optimizer's state for a byte of weights, from one step on a small weight."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = make_optimizer(
        settings.optimizer, [weight], settings.learning_rate, settings.optimizer_kwargs
    )
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
    return _bytes(state) / _bytes([weight])


def _saved_bytes(settings: TrainSettings, size: Size) -> int:
    """Bytes that autograd keeps of a forward pass, counted on tensors without storage."""
    model = build_lbm(settings.lbm, device="meta", dtype=settings.compute_dtype)
    make_trainable(model, settings)
    model.denoiser.train()
    if settings.gradient_checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = tensor  # kept alive, so that no other storage gets its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), _AttentionOnTheWayBack():
        _forward(model, settings, size)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _AttentionOnTheWayBack(FusedAttention):
    """Keeps of attention what the fused kernels of the CPU and of GPUs keep."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept: Tensor = _KeptByAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return kept


class _KeptByAttention(torch.autograd.Function):
    """The shape of attention's result; kept for the way back are the inputs, the result, and a sum for each query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return result


def _forward(model: LbmModel, settings: TrainSettings, size: Size) -> Tensor:
    width, height = (side // model.vae.factor for side in size)
    samples, channels = settings.batch_size, settings.unet_input_channels
    inputs = torch.zeros(samples, channels, height, width, device="meta", dtype=model.denoiser.dtype)
    result: Tensor = model.denoiser(
        inputs, torch.zeros(samples, device="meta"), encoder_hidden_states=None, return_dict=False
    )[0]
    if settings.pixel_loss_weight > 0:
        side = settings.pixel_loss_side
        part = slice(None) if side is None else slice(max(1, side // model.vae.factor))
        return model.vae.decode(result[..., part, part])
    return result
