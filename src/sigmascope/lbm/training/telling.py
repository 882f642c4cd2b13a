"""What training tells while it runs: progress after each step, and means over some steps to the trackers."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sigmascope.lbm.training.session import Session
from sigmascope.lbm.training.step import StepResult
from sigmascope.lbm.training.validation import Validation
from sigmascope.progress import Progress, no_progress


@dataclass(frozen=True)
class StepLog:
    """What is told every `log_interval` steps: means over them.

    Attributes:
        step: Optimizer steps done.
        epoch: From 0.
        loss: Mean over all processes.
        latent: Its latent term, unweighted; None where it has no weight.
        pixel: Its pixel term, likewise.
        gradient_norm: Of the last step, before clipping.
        learning_rate: Of the last step.
        step_seconds: From one step to the next, with waiting for data and without validation and saving.
    """

    step: int
    epoch: int
    loss: float
    latent: float | None
    pixel: float | None
    gradient_norm: float | None
    learning_rate: float
    step_seconds: float

    def scalars(self) -> dict[str, float]:
        """By the names that trackers show."""
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
class Listeners:
    """Who is told what while training; only in the main process."""

    progress: Progress = no_progress
    on_log: Callable[[StepLog], object] = lambda log: None
    on_validation: Callable[[Validation, Path], object] = lambda validation, sheet: None


@dataclass
class Teller:
    """Collects the steps' results and tells them on.

    Attributes:
        session: Of the run.
        listeners: Are told.
        logs: All that was told in this session.
    """

    session: Session
    listeners: Listeners
    logs: list[StepLog] = field(default_factory=list)
    _results: list[StepResult] = field(default_factory=list)
    _since: float = field(default_factory=time.perf_counter)

    def step(self, result: StepResult) -> None:
        """Take the result of a step that was just made."""
        session = self.session
        self._results.append(result)
        rate = session.stepper.optimizer.param_groups[0]["lr"]
        seconds = (time.perf_counter() - self._since) / len(self._results)
        if session.accelerator.is_main_process:
            what = f"loss {result.loss:.4g} lr {rate:.2g} {seconds:.2g} s/step"
            self.listeners.progress(session.step, session.total_steps or 0, what)
        if session.step % session.settings.log_interval == 0 or session.step == session.total_steps:
            self._log(rate, seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The block's time belongs to no step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - started

    def _log(self, rate: float, seconds: float) -> None:
        session, results = self.session, self._results
        loss, latent, pixel = (
            _mean(session.team.objects(_mean([getattr(result, name) for result in results])))
            for name in ("loss", "latent", "pixel")
        )
        assert loss is not None  # every step has one
        norm = results[-1].gradient_norm
        log = StepLog(session.step, session.epoch, loss, latent, pixel, norm, rate, seconds)
        self.logs.append(log)
        self._results, self._since = [], time.perf_counter()
        session.accelerator.log(log.scalars(), step=log.step)
        if session.accelerator.is_main_process:
            self.listeners.on_log(log)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
