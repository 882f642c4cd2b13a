"""What a measurement found: each set-up's time and memory, each choice's gain, and what stays."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from sigmascope import units
from sigmascope.analysis.compare_runs import FigureComparison
from sigmascope.pipeline.optimizing.images import ImageChange
from sigmascope.pipeline.optimizing.plan import Choice, Plan
from sigmascope.records.run import Run


@dataclass(frozen=True, slots=True)
class SetUp:
    """Some runs of a pipeline as it was set up. None: see `unavailable`.

    Attributes:
        seconds: Of each timed run.
        step_seconds: Median of the denoiser's calls, the first left out.
        peak_bytes: The highest of all runs: of the device, or of the process where there is none.
        peak_of: What that is the peak of: a device, or "process".
        warmup_seconds: The first warm-up run, where compiling falls.
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


def _lines(found: Measurement) -> Iterator[str]:
    yield f"As found: {_figures(found.first)}"
    for result in found.results:
        sign = "+" if result.kept else "-"
        yield f"{sign} {result.choice.name}: {_figures(result.after)}, image {result.image}. {result.verdict}"
    factor = "" if found.factor is None else f", {found.factor:.2f} times as fast"
    yield f"With what paid: {_figures(found.last)}{factor}, image {found.image}"
    if found.repeatable is False:
        yield "Runs as found did not give the same image twice: give the call a seed."


def _figures(set_up: SetUp) -> str:
    if set_up.error is not None:
        return set_up.error
    return f"{units.seconds(set_up.median_seconds)}, peak {units.mib(set_up.peak_bytes)} MB of {set_up.peak_of or '-'}"
