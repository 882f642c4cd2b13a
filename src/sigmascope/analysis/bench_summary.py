"""The repeats of one benchmark case in one row: MLPerf's percentiles, throughput and peaks of memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any, Final

from sigmascope.analysis.leaks import theil_sen
from sigmascope.analysis.run_figures import figures_of, step_name, timed_on_device, timed_steps, warm
from sigmascope.records.performance import others_of
from sigmascope.records.run import Run

GENERATION: Final = "generation"
_PERCENTILES: Final = (50, 90, 99)
_NOISY: Final = 0.05
_DRIFT: Final = 0.05
_BUSY: Final = 0.1
_FEWEST_FOR_DRIFT: Final = 6


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of something that was measured `count` times.

    Attributes:
        p50: sorted[int(n · 0.5)], MLPerf's definition, as all three.
        spread: Standard deviation / mean; None of one value.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    least: float
    most: float
    spread: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """Of at least one value.

        Raises:
            ValueError: There is none.
        """
        p50, p90, p99 = (percentile(seconds, share) for share in _PERCENTILES)
        mean = fmean(seconds)
        spread = stdev(seconds) / mean if len(seconds) > 1 and mean > 0 else None
        return cls(len(seconds), mean, p50, p90, p99, min(seconds), max(seconds), spread)


@dataclass(frozen=True, slots=True)
class BenchSummary:
    """What the repeats of one case come to. Times are seconds.

    Attributes:
        generation: From the call to the picture.
        stages: By name, in the order in which they ran.
        step: Every denoising step of every repeat but the first of each, which compiles and tunes.
        samples_per_second: Pictures, or videos, made one generation after another.
        first_seconds: The very first generation, which was not counted; None: there was no warm-up.
        peak_bytes: The highest of all repeats: "process", and each device by name.
        notes: What to know before one believes the figures.
    """

    generation: Latency
    stages: Mapping[str, Latency]
    step: Latency | None
    samples_per_second: float
    first_seconds: float | None
    peak_bytes: Mapping[str, int]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"notes": list(self.notes)}


def summarise(runs: Sequence[Run], *, samples: int = 1, warm_up: Sequence[Run] = ()) -> BenchSummary:
    """What the repeats of one case come to.

    Args:
        runs: Of the same work, in the order in which they were made; at least one.
        samples: Pictures, or videos, that each of them made.
        warm_up: What ran before them.

    Raises:
        ValueError: No run.
    """
    figures = figures_of(runs)
    seconds = [_generation_seconds(run) for run in runs]
    latency = Latency.of(seconds)
    steps = list(_warm_steps(runs))
    return BenchSummary(
        generation=latency,
        stages={
            name: Latency.of(figure.values)
            for name, figure in figures.items()
            if figure.unit == "seconds" and name not in ("total", GENERATION) and not name.endswith(" step")
        },
        step=Latency.of(steps) if steps else None,
        samples_per_second=samples * len(runs) / sum(seconds),
        first_seconds=_generation_seconds(warm_up[0]) if warm_up else None,
        peak_bytes={
            name.removesuffix(" peak"): int(max(figure.values))
            for name, figure in figures.items()
            if figure.unit == "bytes"
        },
        notes=(*_notes(seconds, latency), *_note_on_others(runs), *_note_on_steps(runs)),
    )


def _generation_seconds(run: Run) -> float:
    """Of the generation; of the whole run where it has no stage of that name."""
    found = [stage.seconds for stage in run.stages if stage.name == GENERATION]
    return sum(found) if found else run.seconds


def _warm_steps(runs: Sequence[Run]) -> Iterator[float]:
    on_device = timed_on_device(runs)
    for run in runs:
        for stage in run.walk():
            yield from warm(timed_steps(stage, on_device))


def _notes(seconds: Sequence[float], latency: Latency) -> Iterator[str]:
    count = len(seconds)
    slowest = [share for share in _PERCENTILES if int(count * share / 100) >= count - 1]
    if slowest:
        names = " and ".join(f"p{share}" for share in slowest)
        yield f"{names} of {count} repeats {'are' if len(slowest) > 1 else 'is'} the slowest of them."
    if latency.spread is not None and latency.spread > _NOISY:
        yield (
            f"The repeats vary by {_percent(latency.spread)}: a change below that takes many of them to show, or a "
            "quieter machine."
        )
    drift = _drift(seconds)
    if drift is not None and abs(drift) > _DRIFT:
        way = "slower" if drift > 0 else "faster"
        why = "heat, or memory that fills" if drift > 0 else "more warm-up is needed"
        yield f"They became {_percent(abs(drift))} {way} from the first to the last: {why}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _drift(seconds: Sequence[float]) -> float | None:
    """The trend from the first to the last as a share of the median, by Theil and Sen; None where it may be chance."""
    if len(seconds) < _FEWEST_FOR_DRIFT:
        return None
    slope = theil_sen(seconds)
    if slope.lower <= 0 <= slope.upper:
        return None
    return slope.value * (len(seconds) - 1) / median(seconds)


def _note_on_others(runs: Sequence[Run]) -> Iterator[str]:
    shares = [share for run in runs if (share := others_of(run.facts)) is not None]
    if shares and fmean(shares) > _BUSY:
        yield (
            f"Other programs used {_percent(fmean(shares))} of the processor meanwhile: these are the times of a "
            "busy machine."
        )


def _note_on_steps(runs: Sequence[Run]) -> Iterator[str]:
    on_device = timed_on_device(runs)
    columns = [
        timed_steps(stage, on_device) for run in runs for stage in run.walk() if step_name(stage) in on_device
    ]
    missing = sum(column.count(None) for column in columns)
    if missing:
        yield (
            f"{missing} of {sum(map(len, columns))} steps are not among those of the table: the accelerator was not "
            "seen to finish them."
        )


def percentile(values: Sequence[float], share: int | float) -> float:
    """sorted[int(n · share / 100)], the value that MLPerf's SDXL benchmark reports; the largest for 100.

    It is one of the values, never between two of them.

    Args:
        values: At least one, in any order.
        share: 0 to 100.

    Raises:
        ValueError: No values, or a share out of range.
    """
    if not values or not 0 <= share <= 100:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    return sorted(values)[min(int(len(values) * share / 100), len(values) - 1)]
