"""Runs of a pipeline as it is set up: timed, with their peaks, and with the image they give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope.monitor.recorder import Recorder
from sigmascope.pipeline.optimizing.images import compare_images, image_of
from sigmascope.pipeline.optimizing.measurement import SetUp
from sigmascope.probes.pipelines import pipeline_facts
from sigmascope.probes.reading import attempt, describe
from sigmascope.progress import Progress
from sigmascope.records.pipeline import PipelineFacts
from sigmascope.records.run import Run

STAGE: Final = "generation"
Call = Callable[[Any], object] | Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Seen:
    """A set-up with the image that it gave.

    Attributes:
        set_up: Times and memory.
        image: Of the first timed run; None: there is none that is known.
        repeatable: Whether all timed runs gave the same.
    """

    set_up: SetUp
    image: Tensor | None = None
    repeatable: bool | None = None


@dataclass(slots=True)
class Count:
    """How many runs there were, and how many are expected: more, where a set-up is measured a second time."""

    progress: Progress
    expected: int
    done: int = 0

    def one_more(self, name: str) -> None:
        """Tell of a run."""
        self.done += 1
        self.expected = max(self.expected, self.done)
        self.progress(self.done, self.expected, name)


@dataclass(frozen=True, slots=True)
class Trials:
    """How set-ups of one pipeline are run.

    Attributes:
        pipeline: The pipeline.
        call: Makes it generate, with the same seed each time.
        denoiser: Its calls are the steps.
        repeats: Timed runs.
        warmup: Runs before these.
        count: Told of each run.
    """

    pipeline: Any
    call: Callable[[Any], object]
    denoiser: nn.Module
    repeats: int
    warmup: int
    count: "Count"

    def run(self, name: str) -> Seen:
        """Warm up, then time. What fails is told by its error; Ctrl-C goes through."""
        facts = pipeline_facts(self.pipeline)
        try:
            warmed = [seconds_of(self._once(name, facts)[0]) for _ in range(self.warmup)]
            timed = [self._once(name, facts) for _ in range(self.repeats)]
        except Exception as failure:  # noqa: BLE001 - a set-up that does not run is a result
            return Seen(SetUp(error=describe(failure)))
        image = timed[0][1]
        same = None if image is None else all(compare_images(one, image).identical for _, one in timed)
        return Seen(_summed_up([run for run, _ in timed], warmed), image, same)

    def run_again(self, seen: Seen, name: str) -> Seen:
        """Run a set-up that was seen before, and take all of its runs together."""
        again = self.run(name).set_up
        if again.error is not None or seen.set_up.error is not None:
            return seen
        merged = _summed_up([*seen.set_up.runs, *again.runs], [])
        return replace(seen, set_up=replace(merged, warmup_seconds=seen.set_up.warmup_seconds))

    def _once(self, name: str, facts: PipelineFacts) -> tuple[Run, Tensor | None]:
        recorder = Recorder(name)
        recorder.fact("pipeline", facts)  # for `diagnose`
        with recorder, recorder.stage(STAGE):
            with recorder.hook_steps(self.denoiser):
                output = self.call(self.pipeline)
            _finish(self.pipeline, self.denoiser)
        self.count.one_more(name)
        return recorder.run(), image_of(output)


def seconds_of(run: Run) -> float:
    """What the generation of a run took."""
    return sum(stage.seconds for stage in run.stages if stage.name == STAGE)


def as_function(call: Call, seed: int) -> Callable[[Any], object]:
    """A function of the pipeline, from one, or from the arguments of the pipeline's call.

    Args:
        call: Either.
        seed: Of the generator that arguments get.
    """
    if callable(call):
        return call
    arguments = dict(call)

    def generate(pipeline: Any) -> object:
        return pipeline(**{"generator": torch.Generator().manual_seed(seed), **arguments})

    return generate


def _summed_up(runs: list[Run], warmed: list[float]) -> SetUp:
    steps = [one for run in runs for stage in run.walk() for one in stage.steps.seconds[1:]]
    where, peaks = _peaks(runs)
    gaps = {} if peaks else {"peak_bytes": "neither a device nor the process told its peak"}
    if not steps:
        gaps["step_seconds"] = "the denoiser was called no more than once"
    return SetUp(
        tuple(seconds_of(run) for run in runs),
        median(steps) if steps else None,
        max(peaks, default=None),
        where,
        warmed[0] if warmed else None,
        tuple(runs),
        unavailable=gaps,
    )


def _peaks(runs: list[Run]) -> tuple[str | None, list[int]]:
    """Of the device that held the most; where none held anything, of the process."""
    found: dict[str, list[int]] = {}
    for run in runs:
        peak = run.peak()
        for device in peak.accelerators:
            if device.allocated_bytes:
                found.setdefault(device.device, []).append(device.allocated_bytes)
        if peak.rss_bytes is not None:
            found.setdefault("process", []).append(peak.rss_bytes)
    devices = [name for name in found if name != "process"]
    where = max(devices, key=lambda name: max(found[name]), default="process" if found else None)
    return where, found.get(where or "", [])


def _finish(pipeline: object, denoiser: nn.Module) -> None:
    """Wait for the device, so that the time is that of the work; here nobody else's work is held up."""
    for device in _devices_of(pipeline, denoiser):
        attempt(partial(torch.accelerator.synchronize, device))


def _devices_of(pipeline: Any, denoiser: nn.Module) -> set[torch.device]:
    """Where it runs, which need not be the current device; weights may be in RAM between two runs."""
    runs_on: torch.device | None = attempt(lambda: pipeline._execution_device).value
    found = {weight.device for weight in denoiser.parameters()} | ({runs_on} if runs_on else set())
    return {device for device in found if device.type not in ("cpu", "meta")}
