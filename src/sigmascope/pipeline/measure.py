"""Put a plan to the test: try its choices one after another, each on top of those that paid.

`Trials` runs the pipeline as it is set up and notes times, peak memory and the image. `compare_images` tells how far
one image is from another: PSNR and relative L2 error. `judge` decides whether a choice stays. A `Measurement` holds
it all: the figures of each set-up, what each choice gained, and what stays.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sigmascope import units
from sigmascope.analysis.run_comparison import FigureComparison, compare_values
from sigmascope.errors import ConfigError, OptimizationError
from sigmascope.monitor.recorder import Recorder
from sigmascope.pipeline.apply_undo import AppliedChoice, undo_all
from sigmascope.pipeline.model_state import wait_for
from sigmascope.pipeline.optimization_plan import Choice, NotTaken, Plan, parts_of
from sigmascope.probes.models import pipeline_facts
from sigmascope.probes.reading import attempt, describe
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import PipelineFacts, Run

_MEASURE_AGAIN_ABOVE: Final = 0.8
"""Ratios above this are measured a second time, in turn, before they count."""
Call = Callable[[Any], object] | Mapping[str, object]
"""What makes a pipeline generate: a function of the pipeline, or the arguments of its call."""
STAGE: Final = "generation"


@dataclass(frozen=True, slots=True)
class SetUp:
    """Some runs of a pipeline as it was set up. None: see `unavailable`.

    Attributes:
        seconds: Of each timed run.
        step_seconds: Median of the denoiser's calls, the first left out.
        peak_bytes: The highest of all runs: of the device, or of the process where there is none.
        peak_of: What that is the peak of: a device, or "process".
        warmup_seconds: The first warm-up run, which includes compiling.
        runs: The records.
        error: Why it did not run.
    """

    seconds: tuple[float, ...] = ()
    step_seconds: float | None = None
    peak_bytes: int | None = None
    peak_of: str | None = None
    warmup_seconds: float | None = None
    runs: tuple[Run, ...] = ()
    error: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def median_seconds(self) -> float | None:
        """Of the timed runs."""
        return median(self.seconds) if self.seconds else None

    def as_dict(self) -> dict[str, Any]:
        """All but the records, as JSON values."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "runs"}
        return values | {"seconds": list(self.seconds), "unavailable": dict(self.unavailable)}


@dataclass(frozen=True, slots=True)
class ImageChange:
    """An image compared with the one before. None: see `unavailable`.

    Attributes:
        identical: Whether they are bit for bit the same.
        psnr_db: 10 · log10(range² / mean squared error); None where they are identical, which would be infinite.
        relative_l2: ‖new − old‖ / ‖old‖.
        largest: Of all differences.
        value_range: What PSNR took for the range: 1 for images from 0 to 1, else the old one's own.
        non_finite: NaN and Inf in the new one that the old one does not have.
        blank: Whether a picture of the new one is a single value throughout, where the old one shows something: what
            pipelines make of NaN once they turn it into bytes.
    """

    identical: bool | None = None
    psnr_db: float | None = None
    relative_l2: float | None = None
    largest: float | None = None
    value_range: float | None = None
    non_finite: int | None = None
    blank: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.identical:
            return "identical"
        if self.non_finite:
            return f"{self.non_finite} values are NaN or Inf"
        if self.psnr_db is None or self.relative_l2 is None:
            return f"not compared ({next(iter(self.unavailable.values()), 'nothing ran')})"
        return f"{self.psnr_db:.1f} dB, {units.rough_percent(self.relative_l2)}"


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """What one choice did to the set-up that it was added to.

    Attributes:
        kept: Whether it stays.
        verdict: Why, with numbers.
        before: The set-up without it.
        after: The set-up with it.
        time: The two compared: ratio of medians (below 1 is faster) with its interval.
        image: Against the pipeline as it was found.
        image_step: Against the set-up before.
    """

    choice: Choice
    kept: bool
    verdict: str
    before: SetUp
    after: SetUp
    time: FigureComparison | None = None
    image: ImageChange = field(default_factory=ImageChange)
    image_step: ImageChange = field(default_factory=ImageChange)

    @property
    def saved_percent(self) -> float | None:
        """Of the time, in per cent; negative: it became slower."""
        ratio = None if self.time is None else self.time.ratio
        return None if ratio is None else 100 * (1 - ratio)

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "choice": asdict(self.choice),
            "kept": self.kept,
            "verdict": self.verdict,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "time": None if self.time is None else self.time.as_dict(),
            "saved_percent": self.saved_percent,
            "image": asdict(self.image),
            "image_step": asdict(self.image_step),
        }


@dataclass(frozen=True, slots=True)
class Measurement:
    """A plan put to the test. `str(measurement)` is its table.

    Attributes:
        plan: Of what paid; apply it by `PipelineOptimizer.apply(pipeline, measurement.plan)`.
        results: Of each choice, in order.
        first: The pipeline as it was found.
        last: With all that paid.
        time: The last compared with the first.
        image: The last against the first.
        repeatable: Whether runs of the first set-up gave the same image each time; if not, part of the images'
            changes is not the choices' doing.
    """

    plan: Plan
    results: tuple[ChoiceResult, ...]
    first: SetUp
    last: SetUp
    time: FigureComparison | None = None
    image: ImageChange = field(default_factory=ImageChange)
    repeatable: bool | None = None

    @property
    def factor(self) -> float | None:
        """How many times as fast it became."""
        return None if self.time is None or not self.time.ratio else 1 / self.time.ratio

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values, without the runs."""
        return {
            "plan": self.plan.as_dict(),
            "results": [result.as_dict() for result in self.results],
            "first": self.first.as_dict(),
            "last": self.last.as_dict(),
            "time": None if self.time is None else self.time.as_dict(),
            "factor": self.factor,
            "image": asdict(self.image),
            "repeatable": self.repeatable,
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(measurement: Measurement) -> Iterator[str]:
    yield f"As found: {_figures(measurement.first)}"
    for result in measurement.results:
        sign = "+" if result.kept else "-"
        yield f"{sign} {result.choice.name}: {_figures(result.after)}, image {result.image}. {result.verdict}"
    factor = "" if measurement.factor is None else f", {measurement.factor:.2f} times as fast"
    yield f"With the choices that paid: {_figures(measurement.last)}{factor}, image {measurement.image}"
    if measurement.repeatable is False:
        yield "The unchanged pipeline did not give the same image twice: pass a seed or a generator in the call."


def _figures(set_up: SetUp) -> str:
    if set_up.error is not None:
        return set_up.error
    return f"{units.seconds(set_up.median_seconds)}, peak {units.mib(set_up.peak_bytes)} MB of {set_up.peak_of or '-'}"


@dataclass(frozen=True, slots=True)
class Demands:
    """What a choice must bring to stay.

    Attributes:
        least_gain: Share of time, or of the device's peak memory, to be saved.
        min_psnr: Against the pipeline as it was found, in dB; None: any finite image that is not blank will do.

    Raises:
        ConfigError: A gain that is not a share, or not a number at all.
    """

    least_gain: float = 0.02
    min_psnr: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least_gain < 1:
            raise ConfigError(f"least_gain is {self.least_gain}.", hint="Give a share from 0 to below 1.")
        if self.min_psnr is not None and not math.isfinite(self.min_psnr):
            raise ConfigError(f"min_psnr is {self.min_psnr}.", hint="Give dB, such as 30, or None.")


def measure_plan(
    pipeline: Any,
    call: Call,
    plan: Plan,
    apply: Callable[[Any, Choice], AppliedChoice],
    *,
    repeats: int,
    warmup: int,
    seed: int,
    demands: Demands,
    progress: Progress = no_progress,
) -> tuple[Measurement, list[AppliedChoice]]:
    """Measure a plan; see `PipelineOptimizer.measure`. If it is interrupted, everything is undone.

    Returns:
        The measurement, and the choices that paid, which are in force.

    Raises:
        ConfigError: No repeats, a negative number of warm-up runs, or a pipeline without a denoiser.
    """
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"repeats is {repeats} and warmup {warmup}.", hint="Give at least 1 and 0.")
    denoiser = next(iter(parts_of(pipeline).of_role("denoiser").values()), None)
    if denoiser is None:
        raise ConfigError(
            f"{type(pipeline).__name__} has no known denoiser.", hint="Give a diffusers pipeline."
        )
    count = Count(progress, (repeats + warmup) * (1 + len(plan.choices)))
    trials = Trials(pipeline, as_function(call, seed), denoiser, repeats, warmup, count)
    course = _Course(trials, apply, demands)
    try:
        return course.run(plan), course.stack
    except BaseException:
        undo_all(course.stack)
        raise


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


def as_function(call: Call, seed: int) -> Callable[[Any], object]:
    """A function of the pipeline, from one, or from the arguments of the pipeline's call."""
    if callable(call):
        return call
    arguments = dict(call)

    def generate(pipeline: Any) -> object:
        return pipeline(**{"generator": torch.Generator().manual_seed(seed), **arguments})

    return generate


@dataclass(frozen=True, slots=True)
class Seen:
    """A set-up with the image that it gave."""

    set_up: SetUp
    image: Tensor | None = None
    repeatable: bool | None = None


@dataclass(frozen=True, slots=True)
class Trials:
    """How set-ups of one pipeline are run."""

    pipeline: Any
    call: Callable[[Any], object]
    denoiser: nn.Module
    repeats: int
    warmup: int
    count: "Count"

    def run(self, name: str) -> Seen:
        """Warm up, then time. A failure becomes the set-up's `error`; Ctrl-C is raised."""
        facts = pipeline_facts(self.pipeline)
        try:
            warmed = [seconds_of(self._once(name, facts)[0]) for _ in range(self.warmup)]
            timed = [self._once(name, facts) for _ in range(self.repeats)]
        except Exception as failure:  # noqa: BLE001 - a set-up that does not run is a result
            return Seen(SetUp(error=describe(failure)))
        image = timed[0][1]
        same = None if image is None else all(compare_images(other, image).identical for _, other in timed)
        return Seen(_summed_up([run for run, _ in timed], warmed), image, same)

    def run_again(self, seen: Seen, name: str) -> Seen:
        """Run a set-up again, and combine all of its runs."""
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


def _summed_up(runs: list[Run], warmed: list[float]) -> SetUp:
    steps = [duration for run in runs for stage in run.walk() for duration in stage.steps.seconds[1:]]
    where, peaks = _peaks(runs)
    gaps = {} if peaks else {"peak_bytes": "the peak of neither device nor process could be read"}
    if not steps:
        gaps["step_seconds"] = "the denoiser was called at most once"
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
    peaks: dict[str, list[int]] = {}
    for run in runs:
        peak = run.peak()
        for device in peak.accelerators:
            if device.allocated_bytes:
                peaks.setdefault(device.device, []).append(device.allocated_bytes)
        if peak.rss_bytes is not None:
            peaks.setdefault("process", []).append(peak.rss_bytes)
    devices = [name for name in peaks if name != "process"]
    where = max(devices, key=lambda name: max(peaks[name]), default="process" if peaks else None)
    return where, peaks.get(where or "", [])


def seconds_of(run: Run) -> float:
    """What the generation of a run took."""
    return sum(stage.seconds for stage in run.stages if stage.name == STAGE)


def _finish(pipeline: Any, denoiser: nn.Module) -> None:
    """Wait for the device, so that the time is that of the work; here nobody else's work is held up.

    It need not be the current device, and weights may be in RAM between two runs.
    """
    runs_on: torch.device | None = attempt(lambda: pipeline._execution_device).value
    for device in {weight.device for weight in denoiser.parameters()} | ({runs_on} if runs_on else set()):
        attempt(partial(wait_for, device))


@dataclass(slots=True)
class _Course:
    """A measurement under way. `stack` holds the choices that paid so far, which are in force."""

    trials: Trials
    apply: Callable[[Any, Choice], AppliedChoice]
    demands: Demands
    stack: list[AppliedChoice] = field(default_factory=list)

    def run(self, plan: Plan) -> Measurement:
        first = before = self.trials.run("as found")
        results: list[ChoiceResult] = []
        for choice in plan.choices:
            if results and not results[-1].kept:
                before = self.trials.run_again(before, "again")  # the machine may be faster or slower by now
                first = before if not self.stack else first
            result, after = self._try(choice, before, first)
            results.append(result)
            before = after if result.kept else before
        return _measurement(plan, results, first, before)

    def _try(self, choice: Choice, before: Seen, first: Seen) -> tuple[ChoiceResult, Seen]:
        """Apply a choice, measure, and undo it unless it pays."""
        try:
            self.stack.append(self.apply(self.trials.pipeline, choice))
        except OptimizationError as failure:
            after = Seen(SetUp(error=failure.message))
            return ChoiceResult(choice, False, failure.message, before.set_up, after.set_up), after
        after = self.trials.run(choice.name)
        compared = compare_times(after.set_up, before.set_up)
        image = compare_images(after.image, first.image)
        demands = self.demands if first.set_up.error is None else replace(self.demands, min_psnr=None)
        pays, verdict = judge(choice, before.set_up, after.set_up, compared, image, demands)
        if pays and _is_above(_MEASURE_AGAIN_ABOVE, compared):
            before, after = self._there_and_back(choice, before, after)
            compared = compare_times(after.set_up, before.set_up)
            pays, verdict = judge(choice, before.set_up, after.set_up, compared, image, demands)
        if not pays:
            self.stack[-1].undo()
            self.stack.pop()
        step = compare_images(after.image, before.image)
        return (
            ChoiceResult(choice, pays, verdict, before.set_up, after.set_up, compared, image, step),
            after,
        )

    def _there_and_back(self, choice: Choice, before: Seen, after: Seen) -> tuple[Seen, Seen]:
        """Undo a choice, measure, apply it again and measure: a machine that became faster meanwhile shows so."""
        self.stack[-1].undo()
        self.stack.pop()
        before = self.trials.run_again(before, "again")
        self.stack.append(self.apply(self.trials.pipeline, choice))
        return before, self.trials.run_again(after, choice.name)


def _measurement(plan: Plan, results: list[ChoiceResult], first: Seen, last: Seen) -> Measurement:
    dropped = (result for result in results if not result.kept)
    left = tuple(NotTaken(result.choice.kind, result.choice.component, result.verdict) for result in dropped)
    paid = tuple(result.choice for result in results if result.kept)
    reduced = replace(plan, choices=paid, not_taken=(*plan.not_taken, *left))
    last = last if paid else first
    return Measurement(
        reduced,
        tuple(results),
        first.set_up,
        last.set_up,
        compare_times(last.set_up, first.set_up),
        compare_images(last.image, first.image),
        first.repeatable,
    )


def compare_times(new: SetUp, old: SetUp) -> FigureComparison | None:
    """The ratio of medians with its interval; None if one of them did not run."""
    ran = new.seconds and old.seconds
    return compare_values(STAGE, "seconds", new.seconds, old.seconds) if ran else None


def _is_above(ratio: float, time: FigureComparison | None) -> bool:
    return time is not None and time.ratio is not None and time.ratio > ratio


def judge(
    choice: Choice,
    before: SetUp,
    after: SetUp,
    time: FigureComparison | None,
    image: ImageChange,
    demands: Demands,
) -> tuple[bool, str]:
    """Whether a choice stays by what was measured, and why.

    It pays if it saves the least gain of time, both in the median and between the fastest runs (which other load
    disturbs least), and the ratio's interval is below 1. It also pays if it saves as much of the device's peak memory;
    a choice for speed must not lose time then.
    """
    least_gain = demands.least_gain
    if after.error is not None:
        without = "" if before.error is None else ", nor without it"
        return (False, f"It does not run{without}: {after.error.removesuffix('.')}.")
    broken = _why_broken(image, demands.min_psnr)
    if broken is not None:
        return (False, broken)
    if before.error is not None:
        return (True, "The pipeline runs only with it.")
    faster, saved = _faster(time, before, after, least_gain), _saved(before, after)
    if faster:
        return (True, _time_words(time))
    if (
        saved is not None
        and saved >= least_gain
        and (choice.gains == "memory" or not _is_above(1 + least_gain, time))
    ):
        return (True, f"{_memory_words(before, after)} {_time_words(time)}")
    if choice.necessary:
        return (True, f"The pipeline does not fit without it. {_time_words(time)}")
    return (False, f"It did not pay. {_time_words(time)} {_memory_words(before, after)}")


def _why_broken(image: ImageChange, min_psnr: float | None) -> str | None:
    if image.non_finite:
        return f"It breaks the image: {image.non_finite} values are NaN or Inf."
    if image.blank:
        return "It breaks the image: all of it is one value."
    if min_psnr is None or image.identical:
        return None
    if image.psnr_db is None:
        return f"Whether the image still has {min_psnr:g} dB to the first is unknown: it is {image}."
    if image.psnr_db < min_psnr:
        return f"The image has a PSNR of {image.psnr_db:.1f} dB to the first, less than the {min_psnr:g} dB asked for."
    return None


def _faster(time: FigureComparison | None, before: SetUp, after: SetUp, least_gain: float) -> bool:
    if time is None or time.ratio is None or time.ratio > 1 - least_gain:
        return False
    if min(after.seconds) > (1 - least_gain) * min(before.seconds):
        return False
    return time.upper is None or time.upper < 1


def _saved(before: SetUp, after: SetUp) -> float | None:
    """Share of the peak that was saved; None where the two are not of the same thing.

    A process's own peak does not count: it covers more than the pipeline, and never falls.
    """
    if not before.peak_bytes or after.peak_bytes is None or before.peak_of != after.peak_of:
        return None
    return None if before.peak_of == "process" else 1 - after.peak_bytes / before.peak_bytes


def _time_words(time: FigureComparison | None) -> str:
    if time is None or time.ratio is None:
        return "Times could not be compared."
    between = "" if time.lower is None or time.upper is None else f" ({time.lower:.3f} to {time.upper:.3f})"
    return f"{units.seconds(time.new)} instead of {units.seconds(time.baseline)}, {time.ratio:.3f} times as long{between}."


def _memory_words(before: SetUp, after: SetUp) -> str:
    return f"Peak {units.mib(after.peak_bytes)} MB instead of {units.mib(before.peak_bytes)} MB."


_BYTE = 255.0


def compare_images(new: Tensor | None, old: Tensor | None) -> ImageChange:
    """Compare two outputs."""
    if new is None or old is None:
        return _unavailable("the output holds no known kind of image")
    if new.shape != old.shape:
        return _unavailable(f"shapes differ: {tuple(new.shape)} and {tuple(old.shape)}")
    non_finite = int((~new.isfinite() & old.isfinite()).sum())
    if torch.equal(new, old):
        value_range = _range(old[old.isfinite()])
        return ImageChange(True, None, 0.0, 0.0, value_range, 0, blank=False)
    both = new.isfinite() & old.isfinite()
    difference, reference = (new - old)[both], old[both]
    squared = float(difference.square().mean()) if len(difference) else math.nan
    norm = float(reference.norm())
    value_range = _range(reference)
    gaps = {} if norm > 0 else {"relative_l2": "the image before is all zeros"}
    if not value_range or not squared > 0:
        gaps["psnr_db"] = "there is nothing to compare"
    if not len(difference):
        gaps["largest"] = "no value is finite in both"
    return ImageChange(
        identical=False,
        psnr_db=None if "psnr_db" in gaps else 10 * math.log10(value_range**2 / squared),
        relative_l2=float(difference.norm()) / norm if norm > 0 else None,
        largest=float(difference.abs().max()) if len(difference) else None,
        value_range=value_range,
        non_finite=non_finite,
        blank=_became_blank(new, old),
        unavailable=gaps,
    )


def _unavailable(reason: str) -> ImageChange:
    figures = (field.name for field in fields(ImageChange) if field.name != "unavailable")
    return ImageChange(unavailable=dict.fromkeys(figures, reason))


def _range(reference: Tensor) -> float:
    if not len(reference):
        return 0.0
    low, high = float(reference.min()), float(reference.max())
    return 1.0 if low >= 0 and high <= 1 else high - low


def _became_blank(new: Tensor, old: Tensor) -> bool:
    """Whether any picture of a batch, or the one there is, lost all that the old one shows."""
    if not new.numel():
        return False
    pictures = (
        picture.reshape(len(picture), -1) if picture.dim() > 3 else picture.reshape(1, -1)
        for picture in (new, old)
    )
    is_flat, was_flat = (picture.amin(1) == picture.amax(1) for picture in pictures)
    return bool((is_flat & ~was_flat).any())


def image_of(output: object) -> Tensor | None:
    """The images or frames in a pipeline's output, as float64 in RAM; None if there are none.

    Args:
        output: Of a diffusers pipeline: an object or a dict with `images` or `frames`, a tuple, PIL images, arrays or
            tensors. Bytes become values from 0 to 1.
    """
    for name in ("images", "frames"):
        held = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if held is not None:
            return _as_tensor(held)
    if isinstance(output, tuple) and output:
        return _as_tensor(output[0])
    return _as_tensor(output)


def _as_tensor(held: object) -> Tensor | None:
    if isinstance(held, Tensor):
        return held.detach().cpu().to(torch.float64) / (_BYTE if held.dtype == torch.uint8 else 1.0)
    if isinstance(held, np.ndarray):
        return _as_tensor(torch.from_numpy(np.ascontiguousarray(held)))
    if isinstance(held, Sequence) and not isinstance(held, str):
        tensors = [tensor for tensor in map(_as_tensor, held) if tensor is not None]
        same = len(tensors) == len(held) and len({tensor.shape for tensor in tensors}) == 1
        return torch.stack(tensors) if same else None
    is_image = hasattr(held, "getbands")  # of Pillow
    return torch.from_numpy(np.asarray(held).astype(np.float64) / _BYTE) if is_image else None
