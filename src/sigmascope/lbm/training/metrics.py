"""What training reports: progress after each step, means for the trackers, the run's record, and validation.

The record (`TrainingRecord`) says where the time went, how high memory peaked, and what to do about it. `validate`
translates held-out pictures and measures how close they are to their targets.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor, nn

from sigmascope.lbm.bridge import sample_bridge
from sigmascope.lbm.data import DataOptions, TrainingData
from sigmascope.lbm.images import contact_sheet, psnr, save_image, tensor_to_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.accelerate import StepResult
from sigmascope.lbm.training.checkpoints import untouched_random_state
from sigmascope.lbm.training.objective import encoded, vae_alone
from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.monitor import Recorder
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding, Run

TRAINING: Final = "training"
"""The stage of the record that optimizer steps belong to."""
RUN_FILE: Final = "run.json"
"""The record, beside the checkpoints."""
WAITING_SHARE: Final = 0.20
"""Share of the training's time above which waiting for data is a finding."""
SAVING_SHARE: Final = 0.20
"""Share of the training's time above which writing checkpoints is a finding."""
MIN_MEASURED_STEPS: Final = 5
"""Fewer steps say nothing about shares: the first ones fill buffers and compile kernels."""


@dataclass(frozen=True)
class StepLog:
    """The report every `log_interval` steps, with means over them.

    Attributes:
        step: Optimizer steps done.
        epoch: From 0.
        loss: Mean over the samples of all processes; None where none of their pictures can be decoded.
        latent: Its latent term, unweighted; None where it has no weight.
        pixel: Its pixel term, likewise.
        gradient_norm: Norm in the last step, before clipping.
        learning_rate: Learning rate of the last step.
        step_seconds: Time from one step to the next, including waiting for data, without validation and saving.
    """

    step: int
    epoch: int
    loss: float | None
    latent: float | None
    pixel: float | None
    gradient_norm: float | None
    learning_rate: float
    step_seconds: float

    def scalars(self) -> dict[str, float]:
        """The values by the names that trackers show."""
        values = {
            "train/loss": self.loss,
            "train/latent_loss": self.latent,
            "train/pixel_loss": self.pixel,
            "train/gradient_norm": self.gradient_norm,
            "train/learning_rate": self.learning_rate,
            "train/step_seconds": self.step_seconds,
            "train/epoch": float(self.epoch),
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Validation:
    """The result of one validation.

    Attributes:
        step: Optimizer steps done.
        psnr: Mean dB against the targets, by number of inference steps.
        sheet: The pictures side by side: source, result at each number of steps, target.
    """

    step: int
    psnr: Mapping[int, float]
    sheet: Image.Image


@dataclass(frozen=True)
class Listeners:
    """Callbacks during training; only the main process calls them."""

    progress: Progress = no_progress
    on_log: Callable[[StepLog], object] = lambda log: None
    on_validation: Callable[[Validation, Path], object] = lambda validation, sheet: None


@dataclass
class MetricsLogger:
    """Collects the steps' results and reports them.

    Attributes:
        session: The run's session.
        listeners: The callbacks.
        logs: All reports of this session.
    """

    session: Session
    listeners: Listeners
    logs: list[StepLog] = field(default_factory=list)
    _results: list[StepResult] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def step(self, result: StepResult) -> None:
        """Add the result of a finished step."""
        session = self.session
        self._results.append(result)
        rate = session.stepper.optimizer.param_groups[0]["lr"]
        seconds = (time.perf_counter() - self._since) / len(self._results)
        if session.accelerator.is_main_process:
            loss = "none" if result.loss is None else f"{result.loss:.4g}"
            what = f"loss {loss} lr {rate:.2g} {seconds:.2g} s/step"
            self.listeners.progress(session.step, session.total_steps or 0, what)
        if session.step % session.settings.log_interval == 0 or session.step == session.total_steps:
            self._log(rate, seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the block's time from the time of steps."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - started

    def _log(self, rate: float, seconds: float) -> None:
        session, results = self.session, self._results
        loss, latent, pixel = (
            _mean_of_all(session.team.objects([(getattr(result, name), result.share) for result in results]))
            for name in ("loss", "latent", "pixel")
        )
        norm = results[-1].gradient_norm
        log = StepLog(session.step, session.epoch, loss, latent, pixel, norm, rate, seconds)
        self.logs.append(log)
        self._results, self._since = [], time.perf_counter()
        session.accelerator.log(log.scalars(), step=log.step)
        if session.accelerator.is_main_process:
            self.listeners.on_log(log)


def _mean_of_all(rows: Sequence[Sequence[tuple[float | None, float]]]) -> float | None:
    """The mean over steps that have a value, each the mean over its samples.

    Args:
        rows: For each process and step the mean over its samples there, and `StepResult.share`.
    """
    steps = [
        sum(value * share for value, share in known) / len(step)
        for step in zip(*rows, strict=True)
        if (known := [(value, share) for value, share in step if value is not None])
    ]
    return sum(steps) / len(steps) if steps else None


@dataclass
class TimeSpent:
    """Seconds of training by activity; `step` is the computation of optimizer steps."""

    data: float = 0.0
    step: float = 0.0
    validation: float = 0.0
    saving: float = 0.0
    steps: int = 0

    @property
    def total(self) -> float:
        """All that was measured."""
        return self.data + self.step + self.validation + self.saving

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Add the block's seconds to a field."""
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.perf_counter() - started)

    def facts(self) -> dict[str, Any]:
        """As facts of the stage `training`."""
        return {
            "data_wait_seconds": self.data,
            "compute_seconds": self.step,
            "validation_seconds": self.validation,
            "saving_seconds": self.saving,
        }


@dataclass
class TrainingRecord:
    """The record of one training: a `Recorder`, the time spent, and findings.

    `began` says that the record in the folder, where there is one, is this session's.
    """

    recorder: Recorder = field(default_factory=lambda: Recorder(name="lbm train", sample_hz=2.0))
    spent: TimeSpent = field(default_factory=TimeSpent)
    findings: list[Finding] = field(default_factory=list)
    began: bool = False

    def run(self) -> Run:
        """The record so far, with its findings."""
        findings = (*time_findings(self.spent), *self.findings)
        return replace(self.recorder.run(), findings=findings)

    def begin(self, folder: Path, step: int, aside: Path | None) -> None:
        """Make the record in the folder this session's from now on.

        The record of the previous session moves along with its checkpoints, or gets a name that says where this session
        began; none is overwritten.
        """
        path = folder / RUN_FILE
        if path.is_file() and aside is not None:
            path.replace(aside / RUN_FILE)
        elif path.is_file():
            earlier, number = folder / f"run-until-{step:06d}.json", 2
            while earlier.exists():
                earlier, number = folder / f"run-until-{step:06d}-{number}.json", number + 1
            path.replace(earlier)
        self.began = True

    def save_last(self, folder: Path) -> None:
        """Write the record at the end; a session that failed to begin leaves an earlier session's record in place."""
        if self.began or not (folder / RUN_FILE).exists():
            self.save(folder)

    def save(self, folder: Path) -> Path:
        """Write the record beside the checkpoints."""
        path = folder / RUN_FILE
        self.run().save(path)
        return path


def time_findings(spent: TimeSpent) -> Sequence[Finding]:
    """Findings about the shares of the time."""
    if spent.steps < MIN_MEASURED_STEPS or spent.total == 0:
        return ()
    findings = []
    data = spent.data / spent.total
    if data > WAITING_SHARE:
        findings.append(
            Finding(
                "training.waiting_on_data",
                "warning",
                f"{data:.0%} of the training's time went to waiting for samples.",
                {"data_wait_seconds": spent.data, "seconds": spent.total, "share": data},
                "Put the shards on a local disk, store pictures at the size that is trained, or free CPU cores.",
                TRAINING,
            )
        )
    saving = spent.saving / spent.total
    if saving > SAVING_SHARE:
        findings.append(
            Finding(
                "training.saving",
                "info",
                f"{saving:.0%} of the training's time went to writing checkpoints.",
                {"saving_seconds": spent.saving, "seconds": spent.total, "share": saving},
                "Raise save_interval.",
                TRAINING,
            )
        )
    return findings


def nonfinite_finding(message: str) -> Finding:
    """The finding for a training that stopped on NaN or Inf."""
    return Finding(
        "training.nonfinite",
        "critical",
        message,
        {},
        "Lower learning_rate, or train in bf16 or float32.",
        TRAINING,
    )


Conditioning = Callable[[LbmModel, Batch, Tensor], Tensor | None]
"""(model, batch, source latent) -> what the denoiser sees beside the latent."""


def validate(
    model: LbmModel,
    samples: Sequence[Batch],
    step: int,
    num_steps: Sequence[int],
    *,
    conditioning: Conditioning,
    autocast: AbstractContextManager[object],
) -> Validation:
    """Make a picture of every sample at every number of steps. Model and random generators stay unchanged."""
    device = next(model.parameters()).device
    pictures: list[tuple[str, Image.Image]] = []
    values: dict[int, list[float]] = {count: [] for count in num_steps}
    with untouched_random_state(device), torch.no_grad(), _evaluating(model), autocast:
        for batch in samples:
            truth = tensor_to_image(batch.target)
            pictures.append((batch.keys[0], tensor_to_image(batch.source)))
            for count in num_steps:
                picture = tensor_to_image(_translate(model, batch, count, conditioning))
                values[count].append(psnr(picture, truth))
                steps = "1 step" if count == 1 else f"{count} steps"
                pictures.append((f"{steps}, {values[count][-1]:.1f} dB", picture))
            pictures.append(("target", truth))
    sheet = contact_sheet(pictures, columns=len(num_steps) + 2)
    return Validation(
        step, {count: sum(values_there) / len(values_there) for count, values_there in values.items()}, sheet
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; after it every module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _translate(model: LbmModel, batch: Batch, num_steps: int, conditioning: Conditioning) -> Tensor:
    with vae_alone(model):
        z_source = encoded(model, batch.source)
        extra = conditioning(model, batch, z_source)

    def denoise(x_t: Tensor, sigma: Tensor) -> Tensor:
        prediction: Tensor = model(x_t, sigma, extra)
        return prediction

    generator = torch.Generator("cpu").manual_seed(0)  # the same noise in every validation
    z_target = sample_bridge(denoise, z_source, num_steps, model.config.bridge_noise_sigma, generator)
    with vae_alone(model):
        return model.vae.decode(z_target).float()


def read_samples(settings: TrainSettings) -> tuple[Batch, ...]:
    """Read the first `validation_samples` of the validation shards, always the same; none without shards.

    Raises:
        ConfigError: A pattern matches nothing.
        FileError: A shard does not exist.
        DataError: Not one sample can be used.
    """
    if not settings.validation_shards:
        return ()
    options = DataOptions(
        shards=settings.validation_shards,
        batch_size=1,
        shuffle=False,
        allow_pipe=settings.allow_pipe,
        max_member=settings.max_member,
        size=settings.image_size,
        workers=0,
    )
    stream = TrainingData(settings.lbm, options).batches(0)
    usable = (batch for batch, _ in stream if len(batch))
    return tuple(islice(usable, settings.validation_samples))


def save_sheet(validation: Validation, folder: Path) -> Path:
    """Write the pictures of a validation into `folder`/validation.

    Raises:
        WriteError: The disk is full or refuses.
    """
    path = folder / "validation" / f"step-{validation.step:06d}.png"
    save_image(validation.sheet, path)
    return path
