"""The figures of runs: those that can be compared, by name, and those of a benchmark's repeats in one row.

A figure is seconds, steps or a peak of memory, by the host's clock or the accelerator's, which are never mixed
(`figures_of`). The repeats of a case have MLPerf's percentiles, throughput and peaks (`summarise`).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, median, stdev
from typing import Any, Final, Literal, NamedTuple

from sigmascope.analysis.run_order import in_order
from sigmascope.records.performance import ProcessorUse, others_of, processor_use_of
from sigmascope.records.run import Run, Stage, device_seconds, is_duration, names_in

Unit = Literal["seconds", "bytes"]
Number = int | float
MOST_READINGS: Final = 400
"""From so many a slope is taken: 80,000 pairs."""
_ONLY_STAGE = "generation"
"""Of a run that a `PerformanceMonitor` made."""
_FEWEST_LEFT: Final = 5
"""Fewer on each side cannot give p < 0.01 by Mann and Whitney's test."""
_SHARE_LEFT: Final = 0.8
GENERATION: Final = "generation"
TOTAL: Final = "total"
STEP: Final = " step"
"""How the name of the figure of a stage's steps ends."""
PROCESS_PEAK: Final = "process peak"
_PERCENTILES: Final = (50, 90, 99)
_NOISY: Final = 0.05
_DRIFT: Final = 0.05
BUSY: Final = 0.1
"""Of the processors: what other programs use beyond this counts as a busy machine."""
MUCH_WAITED: Final = 0.25
"""Of a time of which more was waited for a processor, the clock on the wall tells nothing."""
_ALL_IN_USE: Final = 0.9
_FEWEST_FOR_DRIFT: Final = 6


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run. More is worse.

    Attributes:
        name: Such as "denoising", "denoising step", "cuda:0 peak".
        unit: Of the values.
        values: One a run, in the order of the runs; fewer where a run has none.
        untimed: How many runs are left out since the accelerator's clock, which the others go by, did not time them.
        own: Processor time of the process in place of each value; empty where it is not known for all of them, or
            tells nothing: of memory, and where an accelerator works while the host waits for it.
        waited: The share of each time that the run waited for a processor; empty where that is not known.
        is_estimate: Whether the system does not tell of waiting, and the share of the processors that other programs used
            stands for it.
        is_by_others: Whether `waited` is what other programs used, because together with the run that was everything.
        is_stopped: Whether most of what a run waited is that its process was stopped.
        others: The median share of the processors that other programs used; None: not recorded.
    """

    name: str
    unit: Unit
    values: tuple[float, ...]
    untimed: int = 0
    own: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()
    is_estimate: bool = False
    is_by_others: bool = False
    is_stopped: bool = False
    others: float | None = None


class _Of(NamedTuple):
    """One run's value of a figure; its processor time and the share that it waited for one, where they are known."""

    name: str
    unit: Unit
    value: float
    own: float | None = None
    waited: float | None = None
    is_estimate: bool = False
    is_by_others: bool = False
    is_stopped: bool = False


def figures_of(runs: Sequence[Run], on_device: Collection[str] = ()) -> dict[str, Figure]:
    """The figures of several runs of the same work, by name.

    Each run gives one value. A run's steps are summarised by their median, because they are not independent; the first
    of several steps is left out, and folded steps are not known one by one. A stage that a run passes repeatedly counts
    with the sum of its times, folded ones included. Only runs with several stages have a total: for a single generation
    it would add nothing but the monitor's own time. Times that cannot be are left out, with the stage that holds them:
    see `impossible_times`.

    Args:
        runs: Any number; values are in the order in which they ran, see `run_order`.
        on_device: Stages and steps whose time is that of the accelerator's clock (see `timed_on_device`), without the runs
            that it did not time; others the host's.
    """
    values: dict[tuple[str, Unit], list[_Of]] = {}
    untimed: Counter[str] = Counter()
    for run in in_order(runs):
        for figure in _figures_of_run(run, on_device):
            if figure.unit == "bytes" or is_duration(figure.value):
                values.setdefault((figure.name, figure.unit), []).append(figure)
            elif figure.name in on_device:
                untimed[figure.name] += 1
    others = _others_beside(runs)
    return {name: _figure(of_runs, others, untimed[name]) for (name, _), of_runs in values.items()}


def _others_beside(runs: Iterable[Run]) -> float | None:
    """The median share of the processors that other programs used; short runs do not tell it."""
    shares = known(others_of(run.facts) for run in runs)
    return median(shares) if shares else None


def _figure(of_runs: Sequence[_Of], others: float | None, untimed: int = 0) -> Figure:
    own, waited = (known(figure.own for figure in of_runs), known(figure.waited for figure in of_runs))
    return Figure(
        of_runs[0].name,
        of_runs[0].unit,
        tuple(figure.value for figure in of_runs),
        untimed,
        tuple(own) if len(own) == len(of_runs) else (),
        tuple(waited) if len(waited) == len(of_runs) else (),
        any(figure.is_estimate for figure in of_runs),
        any(figure.is_by_others for figure in of_runs),
        any(figure.is_stopped for figure in of_runs),
        others,
    )


def total_of(runs: Sequence[Run]) -> Figure:
    """What whole runs took, in the order in which they ran, without times that cannot be.

    At least one has a valid time.
    """
    timed = [run for run in in_order(runs) if is_duration(run.seconds)]
    return _figure([_total(run) for run in timed], _others_beside(timed))


def _total(run: Run) -> _Of:
    has_own = processor_use_of(run.facts) is not None or not run.stages
    facts = [run.facts] if has_own else [stage.facts for stage in run.stages]
    return _Of(TOTAL, "seconds", run.seconds, *_of_processor(run, facts, run.seconds))


class _OfProcessor(NamedTuple):
    """The processor's part in some time, as `_Of` has it."""

    own: float | None = None
    waited: float | None = None
    is_estimate: bool = False
    is_by_others: bool = False
    is_stopped: bool = False


def _of_processor(run: Run, facts: Sequence[Mapping[str, Any]], seconds: float) -> _OfProcessor:
    """Processor time, and the share of the seconds that was waited for a processor; whether that is an estimate, others' use, or a stop."""
    uses = [processor_use_of(of_stage) for of_stage in facts]
    own = [None if use is None else use.own_seconds for use in uses]
    waits = [None if use is None else waited_seconds(use) for use in uses]
    has_device = run.host is not None and bool(run.host.accelerators)
    is_known = None not in waits and seconds > 0
    others = others_of(run.facts)
    share = min(sum(known(waits)) / seconds, 1.0) if is_known else others
    is_by_others = not is_known
    stopped = sum(known(None if use is None else use.stopped_seconds for use in uses))
    is_stopped = is_known and stopped > sum(known(waits)) / 2
    if share is not None and others is not None and others > share and _is_crowded(run, others):
        share, is_by_others, is_stopped = others, True, False
    return _OfProcessor(
        None if None in own or has_device else sum(known(own)),
        share,
        not is_known,
        is_by_others,
        is_stopped,
    )


def _is_crowded(run: Run, others: float) -> bool:
    """Whether other programs and this one together had all the processors, so that each got fewer than it could use."""
    use, host = processor_use_of(run.facts), run.host
    if use is None or host is None or not host.cpu_count_logical or run.seconds <= 0:
        return False
    return others > BUSY and others + use.own_seconds / run.seconds / host.cpu_count_logical > _ALL_IN_USE


def waited_seconds(use: ProcessorUse) -> float | None:
    """How long a thread was held back, by other threads, by a quota, or since the process was stopped; None: that is not known."""
    if use.waited_seconds is None and not use.stopped_seconds:
        return None
    return sum(known((use.waited_seconds, use.throttled_seconds, use.stopped_seconds)))


def _figures_of_run(run: Run, on_device: Collection[str]) -> Iterable[_Of]:
    if [stage.name for stage in run.stages] != [_ONLY_STAGE]:
        yield _total(run)
    for name, stages in _by_name(run).items():
        times = [device_seconds(stage) if name in on_device else stage.seconds for stage in stages]
        seconds = [value for value in times if value is not None and is_duration(value)]
        is_whole = len(seconds) == len(times)
        folded = _folded_seconds(run, name, on_device)
        of_processor = _OfProcessor()
        if name not in on_device and is_whole and not folded:
            of_processor = _of_processor(run, [stage.facts for stage in stages], sum(seconds))
        whole = sum(seconds) + folded if is_whole else math.nan
        yield _Of(name, "seconds", whole, *of_processor)
        columns = [timed_steps(stage, on_device) for stage in stages if len(stage.steps)]
        # compiling, autotuning and lazy loading fall into the first; it is in the stage's time all the same
        steps = [value for column in columns for value in warm(column)]
        if columns:
            step = median(steps) if steps and all(map(known, columns)) else math.nan
            own_step = None if of_processor.own is None else _own_step(stages)
            yield _Of(step_name(stages[0]), "seconds", step, *of_processor._replace(own=own_step))
    peak = run.peak()
    if peak.rss_bytes is not None:
        yield _Of(PROCESS_PEAK, "bytes", float(peak.rss_bytes))
    for device in peak.accelerators:
        if device.allocated_bytes is not None:
            yield _Of(f"{device.device} peak", "bytes", float(device.allocated_bytes))


def _own_step(stages: Iterable[Stage]) -> float | None:
    """The median processor time of the steps but each stage's first; None where it was not measured."""
    own = [value for stage in stages for value in warm(stage.steps.cpu_seconds)]
    return median(own) if own else None


def _folded_seconds(run: Run, name: str, on_device: Collection[str]) -> float:
    """What folded stages of a name took together; NaN where the accelerator was to time them and did not time all."""
    total = 0.0
    for path, sums in {} if run.folded is None else run.folded.stages.items():
        *around, last = names_in(path)
        if last == name and name not in around:
            if name in on_device and sums.timed_on_device < sums.count:
                return math.nan
            total += sums.device_seconds if name in on_device else sums.seconds
    return total


def _by_name(run: Run) -> Mapping[str, list[Stage]]:
    """Stages by name; one inside another of the same name is part of that one."""
    stages_by_name: dict[str, list[Stage]] = {}

    def visit(stage: Stage, around: frozenset[str]) -> None:
        if stage.name not in around:
            stages_by_name.setdefault(stage.name, []).append(stage)
        for child in stage.children:
            visit(child, around | {stage.name})

    for stage in run.stages:
        visit(stage, frozenset())
    return stages_by_name


def timed_on_device(*sides: Sequence[Run]) -> frozenset[str]:
    """Names of the stages, and of their steps, to be compared by the accelerator's clock.

    A host that only queues work is done with a stage long before the device is. So the device's clock is compared if
    enough runs have it, and the other runs are left out, because the two clocks cannot be compared. Enough is every run
    of a side that passed the stage; or most of them, if as many remain as a check needs. Only few may be missing, since
    a long time may be why they are. A generation goes by the host's clock: that is the time somebody waits.

    Args:
        sides: Runs of the same work, such as a baseline's and the new ones; each has to have enough.
    """
    counted = [_count_timed(side) for side in sides]
    names = {name for counts in counted for name in counts} - {_ONLY_STAGE}
    return frozenset(
        name for name in names if all(_are_enough(*counts[name]) for counts in counted if name in counts)
    )


def _count_timed(runs: Sequence[Run]) -> Mapping[str, tuple[int, int]]:
    """By name of stages and of their steps: how many runs the device timed throughout, of how many that have them."""
    counts: dict[str, tuple[int, int]] = {}
    for run in runs:
        of_run: dict[str, bool] = {}
        for stage in run.walk():
            of_run[stage.name] = of_run.get(stage.name, True) and device_seconds(stage) is not None
            if len(stage.steps):
                name = step_name(stage)
                of_run[name] = of_run.get(name, True) and is_timed_on_device(stage)
        for name, is_timed in of_run.items():
            timed, count = counts.get(name, (0, 0))
            counts[name] = (timed + is_timed, count + 1)
    return counts


def _are_enough(timed: int, runs: int) -> bool:
    return timed == runs or (timed >= _FEWEST_LEFT and timed >= _SHARE_LEFT * runs)


def timed_steps(stage: Stage, on_device: Collection[str]) -> tuple[float | None, ...]:
    """Of a stage's steps, one entry each, by one clock: None for what that one did not time."""
    by_device = step_name(stage) in on_device
    if by_device and not is_timed_on_device(stage):
        return (None,) * len(stage.steps)
    return step_seconds(stage, on_device=by_device)


def step_seconds(stage: Stage, *, on_device: bool = True) -> tuple[float | None, ...]:
    """Of a stage's steps, one entry each: by the accelerator's clock where it timed any of them, else by the host's.

    The two are never mixed, since the host's may only tell how long a step took to queue: a step that the accelerator
    was not seen to finish is None. So is what cannot be a time: less than 0, infinite, NaN.
    """
    column = stage.steps.gpu_seconds if on_device and is_timed_on_device(stage) else stage.steps.seconds
    return tuple(value if is_duration(value) else None for value in column)


def seconds_in_steps(stage: Stage) -> float:
    """What a stage's steps took together, without what lies between them.

    By the accelerator's clock where it timed them all: a sum of some would be too small.
    """
    seconds = step_seconds(stage)
    return sum(known(seconds if None not in seconds else step_seconds(stage, on_device=False)), 0.0)


def is_timed_on_device(stage: Stage) -> bool:
    """Whether the accelerator's clock timed any of a stage's steps."""
    return any(map(is_duration, stage.steps.gpu_seconds))


def step_name(stage: Stage) -> str:
    """What the figure of a stage's steps is called."""
    return stage.name + STEP


def known(seconds: Iterable[float | None]) -> list[float]:
    """The values that were measured."""
    return [value for value in seconds if value is not None]


def warm(seconds: tuple[float | None, ...]) -> list[float]:
    """The measured steps without the first, which includes compiling; a single step is kept."""
    return known(seconds[1:] if len(seconds) > 1 else seconds)


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
            if figure.unit == "seconds" and name not in (TOTAL, GENERATION) and not name.endswith(STEP)
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
    generations = [stage.seconds for stage in run.stages if stage.name == GENERATION]
    return sum(generations) if generations else run.seconds


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
            f"The repeats vary by {_percent(latency.spread)}: to see a smaller change, take many more of them or a "
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
    if shares and fmean(shares) > BUSY:
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
            f"{missing} of {sum(map(len, columns))} steps are missing from the table: the accelerator was not seen to "
            "finish them."
        )


def percentile(values: Sequence[float], share: int | float) -> float:
    """sorted[int(n · share / 100)], the value that MLPerf's SDXL benchmark reports; the largest for 100.

    It is one of the values, never between two of them.

    Raises:
        ValueError: No values, or a share out of range.
    """
    if not values or not 0 <= share <= 100:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    return sorted(values)[min(int(len(values) * share / 100), len(values) - 1)]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth by call, with the bounds between which it lies."""

    value: float
    lower: float
    upper: float


def theil_sen(readings: Sequence[Number], confidence: float = 0.99) -> Slope:
    """The median of all pairwise slopes, and Sen's bounds on it, by one step of the index.

    Single jumps and outliers, which a difference between first and last takes for growth, do not move it. Sen,
    "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968).

    Args:
        readings: At least 2, in order. Of more than 400 only some are looked at, evenly spread: all pairs of a
            hundred thousand would not fit into memory.
        confidence: Of the two bounds together, between 0 and 1.
    """
    stride = math.ceil(len(readings) / MOST_READINGS)
    readings = readings[::stride]
    n = len(readings)
    slopes = sorted(
        (readings[later] - readings[earlier]) / (later - earlier)
        for earlier in range(n)
        for later in range(earlier + 1, n)
    )
    tied = sum(t * (t - 1) * (2 * t + 5) for t in Counter(readings).values())
    sigma = math.sqrt((n * (n - 1) * (2 * n + 5) - tied) / 18)
    width = NormalDist().inv_cdf(0.5 + confidence / 2) * sigma
    low = max(round((len(slopes) - width) / 2) - 1, 0)
    high = min(round((len(slopes) + width) / 2), len(slopes) - 1)
    return Slope(*(slope / stride for slope in (median(slopes), slopes[low], slopes[high])))
