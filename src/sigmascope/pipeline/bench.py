"""Benchmark a pipeline: warm each case up, repeat it, and keep every repeat as a run.

It measures with a `PerformanceMonitor`, as everything here does, so that `sigmascope check` and `sigmascope compare`
read a benchmark as they read any other run. `Subject` says what can be measured: anything that makes pictures when it
is told size, batch and steps. `RunFiles` saves each run in a file of its own, named for its case.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.run_figures import BenchSummary, summarise
from sigmascope.errors import ConfigError, WriteError
from sigmascope.files import reason_of
from sigmascope.monitor.performance import ASSUMED_TARGET, PerformanceMonitor, seconds_above_zero
from sigmascope.monitor.recorder import current_recorder
from sigmascope.monitor.scope import Clock
from sigmascope.pipeline.out_of_memory import free_memory, let_go
from sigmascope.probes import Accelerator
from sigmascope.probes.host import CpuMoment, cpu_moment, others_share
from sigmascope.probes.reading import error_text, is_out_of_memory
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BENCHMARK, OTHERS, BenchCase, Made
from sigmascope.records.run import Finding, Run

__all__ = ["DEFAULT_TARGET", "BenchOptions", "CaseResult", "run_benchmark"]

DEFAULT_TARGET: Final = ASSUMED_TARGET


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark measures.

    Attributes:
        repeat: Generations of each case that count.
        warm_up: Generations of each case before them that do not.
        seed: The same for all of them, so that each is the same work.
        target: Seconds that a generation may take, above 0.

    Raises:
        ConfigError: A number below what makes sense.
    """

    repeat: int = 10
    warm_up: int = 1
    seed: int = 0
    target: float = DEFAULT_TARGET

    def __post_init__(self) -> None:
        for name, value, least in (("repeat", self.repeat, 1), ("warmup", self.warm_up, 0)):
            if value < least:
                raise ConfigError(f"--{name} is {value}.", hint=f"Give {least} or more.")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}.", hint="Give a number from 0 to 2**63 - 1.")
        seconds_above_zero("--target", self.target)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case."""

    case: BenchCase
    made: Made | None = None
    runs: tuple[Run, ...] = ()
    warm_up: tuple[Run, ...] = ()
    files: tuple[Path, ...] = ()
    failure: str | None = None
    summary: BenchSummary | None = None

    def findings(self) -> tuple[Finding, ...]:
        """What the rules say of the last run."""
        return diagnose(self.runs[-1]) if self.runs else ()

    def as_dict(self) -> dict[str, Any]:
        """All of it but the runs themselves, as JSON values."""
        return {
            "case": self.case.as_dict(),
            "made": None if self.made is None else asdict(self.made),
            "failure": self.failure,
            "summary": None if self.summary is None else self.summary.as_dict(),
            "findings": [
                {"id": one.id, "message": one.message, "advice": one.advice} for one in self.findings()
            ],
            "files": [str(path) for path in self.files],
        }


@runtime_checkable
class Subject(Protocol):
    """A loaded pipeline.

    Its generations must be the same work each time: the same case and seed, the same steps on the same shapes. Stages
    are those of the current recorder (`sigmascope.monitor.stage`); steps are timed by the monitor, or by
    `sigmascope.monitor.step`.
    """

    @property
    def name(self) -> str:
        """What it is called in records and tables."""
        ...

    @property
    def model(self) -> object:
        """The pipeline or denoiser, to read facts from."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def check(self, case: BenchCase) -> None:
        """Refuse a case that it cannot run, before anything is run.

        Raises:
            ConfigError: Says which setting, and what it takes.
        """
        ...

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Make one generation, and wait until it is there.

        Args:
            case: Size, batch and steps.
            seed: Of its noise.
            monitor: In whose generation this is called.
        """
        ...


def run_benchmark(
    subject: Subject,
    cases: Sequence[BenchCase],
    options: BenchOptions | None = None,
    *,
    output: Path | None = None,
    load_seconds: float | None = None,
    accelerator: Accelerator | None = None,
    clock: Clock = time.perf_counter_ns,
    progress: Progress = no_progress,
) -> tuple[CaseResult, ...]:
    """Measure a pipeline in several cases, one after another.

    Every run is saved as soon as it is made. A case that runs out of memory, or that the pipeline refuses, is told with
    the reason, and the others go on.

    Args:
        subject: The pipeline.
        cases: At least one, each once.
        options: Repeats, warm-up and seed.
        output: Folder for the runs, made when it is not there; None: they are not saved.
        load_seconds: What loading took, to be noted in each run.
        accelerator: Where to read devices; None: what torch would use.
        clock: Monotonic nanoseconds.
        progress: Told after each generation.

    Raises:
        ConfigError: No case, the same twice, one that the pipeline cannot be called with, or a folder with other runs.
        WriteError: A run cannot be saved.
    """
    options = options or BenchOptions()
    _check(subject, cases)
    files = None if output is None else RunFiles(output)
    bench = _Bench(subject, options, files, load_seconds, accelerator, clock, progress, len(cases))
    try:
        return tuple(bench.measure(case) for case in cases)
    finally:
        if files is not None:
            files.tidy()


def _check(subject: Subject, cases: Sequence[BenchCase]) -> None:
    if not cases:
        raise ConfigError("There is no case to measure.", hint="Give at least one.")
    labels = [case.label for case in cases]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"The case {label} is there twice.", hint="Name each once.")
    for case in cases:
        subject.check(case)


class RunFiles:
    """A folder that holds one benchmark's runs, and no other's: two of them in one would be taken for the same.

    Raises:
        ConfigError: There are runs in it already.
        WriteError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, int] = {}
        self._made: list[Path] = []
        try:
            self._made = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            has_runs = any(folder.glob("*.json"))
        except OSError as error:
            raise WriteError(
                folder, f"cannot be made a folder ({reason_of(error)}).", hint="Choose another --output."
            ) from error
        if has_runs:
            raise ConfigError(f"--output: {folder} holds .json files already.", hint="Choose another folder.")

    def save(self, run: Run, case: BenchCase) -> Path:
        """Save a run as the next of its case.

        Raises:
            WriteError: It cannot be written.
        """
        number = self._saved.get(case.label, 0) + 1
        path = self.folder / f"{case.label}-{number:03d}.json"
        run.save(path)
        self._saved[case.label] = number
        return path

    def tidy(self) -> None:
        """Take away the folders that were made for nothing: no run was saved."""
        if self._saved:
            return
        with suppress(OSError):  # somebody else put something there, or took it away
            for made in self._made:
                made.rmdir()


@dataclass(slots=True)
class _Bench:
    """A benchmark while it runs."""

    subject: Subject
    options: BenchOptions
    files: RunFiles | None
    load_seconds: float | None
    accelerator: Accelerator | None
    clock: Clock
    progress: Progress
    cases: int
    done: int = field(default=0)

    def measure(self, case: BenchCase) -> CaseResult:
        """Warm up and repeat one case, from memory that the one before it has given back."""
        free_memory(self.subject.device)
        options = self.options
        result = CaseResult(case)
        try:
            for number in range(options.warm_up + options.repeat):
                result = self._one(result, number)
        except WriteError:
            raise
        except Exception as failure:  # noqa: BLE001 - told in the result; the other cases go on
            result = replace(result, failure=_reason(failure))
            let_go(failure)
        return _summarised(result)

    def _one(self, found: CaseResult, number: int) -> CaseResult:
        """One generation more."""
        is_warm_up = number < self.options.warm_up
        run, made = self._generation(found, number, is_warm_up=is_warm_up)
        self._tell(found.case)
        if is_warm_up:
            return replace(found, made=made, warm_up=(*found.warm_up, run))
        files = found.files if self.files is None else (*found.files, self.files.save(run, found.case))
        return replace(found, made=made, runs=(*found.runs, run), files=files)

    def _generation(self, found: CaseResult, number: int, *, is_warm_up: bool) -> tuple[Run, Made]:
        case, subject = found.case, self.subject
        size = found.made or Made(case.batch, case.width, case.height)
        monitor = PerformanceMonitor(
            self.options.target,
            history=1,
            on_warning=lambda progress: None,  # a benchmark is run to its end, and tells its times then
            accelerator=self.accelerator,
            clock=self.clock,
        )
        block = monitor.monitor_generation(
            subject.name,
            num_steps=case.steps or 0,
            resolution=(size.width or 0, size.height or 0),
            batch_size=case.batch,
            model=subject.model,
        )
        before = cpu_moment().value
        with block:
            recorder = current_recorder()
            made = subject.generate(case, self.options.seed, monitor)
            if recorder is not None:
                recorder.fact(BENCHMARK, self._noted(case, number, before, is_warm_up=is_warm_up))
        return monitor.runs[-1], made

    def _noted(
        self, case: BenchCase, number: int, before: CpuMoment | None, *, is_warm_up: bool
    ) -> dict[str, Any]:
        after = cpu_moment().value
        return {
            **case.as_dict(),
            "subject": self.subject.name,
            "device": str(self.subject.device),
            "seed": self.options.seed,
            "repeat": None if is_warm_up else number - self.options.warm_up,
            "load_seconds": self.load_seconds,
            "threads": torch.get_num_threads(),
            OTHERS: None if before is None or after is None else others_share(before, after),
        }

    def _tell(self, case: BenchCase) -> None:
        self.done += 1
        whole = self.cases * (self.options.warm_up + self.options.repeat)
        self.progress(self.done, whole, case.label)


def _reason(failure: Exception) -> str:
    return f"out of memory ({error_text(failure)})" if is_out_of_memory(failure) else error_text(failure)


def _summarised(found: CaseResult) -> CaseResult:
    if not found.runs:
        return found
    samples = 1 if found.made is None else found.made.samples
    return replace(found, summary=summarise(found.runs, samples=samples, warm_up=found.warm_up))
