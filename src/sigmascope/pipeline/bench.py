"""A benchmark: each case warmed up, repeated, and every repeat kept as a run (SPEC section 6).

It measures with a `PerformanceMonitor`, as everything here does, so that what `sigmascope check` and `sigmascope compare` read
of a benchmark is what they read of any other run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sigmascope.analysis.bench_summary import summarise
from sigmascope.errors import ConfigError, WriteError
from sigmascope.monitor.context import current_recorder
from sigmascope.monitor.guard import describe
from sigmascope.monitor.instruments import Clock
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.pipeline.benching.results import DEFAULT_TARGET, BenchOptions, CaseResult
from sigmascope.pipeline.benching.run_files import RunFiles
from sigmascope.pipeline.benching.subject import Subject
from sigmascope.pipeline.out_of_memory import free_memory, is_out_of_memory, let_go
from sigmascope.probes import Accelerator
from sigmascope.probes.cpu_load import CpuMoment, cpu_moment, others_share
from sigmascope.progress import Progress, no_progress
from sigmascope.records.benchmark import BENCHMARK, OTHERS, BenchCase, Made
from sigmascope.records.run import Run

__all__ = ["DEFAULT_TARGET", "BenchOptions", "CaseResult", "run_benchmark"]


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
        found = CaseResult(case)
        try:
            for number in range(options.warm_up + options.repeat):
                found = self._one(found, number)
        except WriteError:
            raise
        except Exception as failure:  # noqa: BLE001 - told in the result; the other cases go on
            found = replace(found, failure=_reason(failure))
            let_go(failure)
        return _summarised(found)

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


def _summarised(found: CaseResult) -> CaseResult:
    if not found.runs:
        return found
    samples = 1 if found.made is None else found.made.samples
    return replace(found, summary=summarise(found.runs, samples=samples, warm_up=found.warm_up))


def _reason(failure: Exception) -> str:
    return f"out of memory ({describe(failure)})" if is_out_of_memory(failure) else describe(failure)
