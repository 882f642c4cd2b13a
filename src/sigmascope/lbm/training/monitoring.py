"""Training watched: where its time went, its peak memory, and what to do about it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from sigmascope.monitor import Recorder
from sigmascope.records.finding import Finding
from sigmascope.records.run import Run

TRAINING: Final = "training"
RUN_FILE: Final = "run.json"
WAITING_SHARE: Final = 0.20
"""Of the training's time, above which waiting on data is a finding."""
SAVING_SHARE: Final = 0.20
MEASURED_STEPS: Final = 5
"""Fewer steps say nothing about shares: the first ones fill buffers and compile kernels."""


@dataclass
class Spent:
    """Seconds of training by what they went to; `step` is the computation of optimizer steps."""

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
class Watch:
    """The record of one training: a `Recorder`, the time spent, and findings."""

    recorder: Recorder = field(default_factory=lambda: Recorder(name="lbm train", sample_hz=2.0))
    spent: Spent = field(default_factory=Spent)
    findings: list[Finding] = field(default_factory=list)

    def run(self) -> Run:
        """All that is known now, with the findings that follow from it."""
        findings = (*time_findings(self.spent), *self.findings)
        return replace(self.recorder.run(), findings=findings)

    def save(self, folder: Path) -> Path:
        """Write the record beside the checkpoints."""
        path = folder / RUN_FILE
        self.run().save(path)
        return path


def keep_earlier_record(folder: Path, step: int) -> None:
    """Give the record of the session before another name, which says where this one resumed."""
    path = folder / RUN_FILE
    if path.is_file():
        path.replace(folder / f"run-until-{step:06d}.json")


def time_findings(spent: Spent) -> Sequence[Finding]:
    """What the shares of the time say."""
    if spent.steps < MEASURED_STEPS or spent.total == 0:
        return ()
    found = []
    data = spent.data / spent.total
    if data > WAITING_SHARE:
        found.append(
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
        found.append(
            Finding(
                "training.saving",
                "info",
                f"{saving:.0%} of the training's time went to writing checkpoints.",
                {"saving_seconds": spent.saving, "seconds": spent.total, "share": saving},
                "Raise save_interval.",
                TRAINING,
            )
        )
    return found


def nonfinite_finding(message: str) -> Finding:
    """Training stopped on NaN or Inf."""
    return Finding(
        "training.nonfinite",
        "critical",
        message,
        {},
        "Lower learning_rate, or train in bf16 or float32.",
        TRAINING,
    )
