"""The generations of a run: what rules look at, how each meets its target, and how it compares with another.

A `Case` is a run, or one generation in it, with what is known of its pipeline and its call. A generation is
held against its target (`performance_score`), and while it runs against where it will end
(`projected_seconds`). Two of them, or the median generations of two sets of runs, are set beside each other
as before and after a change.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final, TypeGuard

from sigmascope.records.performance import (
    AssumedDict,
    BeforeAfterDict,
    ComparedGenerationDict,
    ComparisonSummaryDict,
    Compilations,
    ImprovementDict,
    PerformanceMetrics,
    StepTimeDict,
    compilations_of,
)
from sigmascope.records.run import (
    AcceleratorFacts,
    CallFacts,
    ComponentFacts,
    HostFacts,
    PipelineFacts,
    Role,
    Run,
    Stage,
    is_duration,
    stage_seconds,
)
from sigmascope.records.serialization import from_plain

PIPELINE, CALL = "pipeline", "call"
"""The facts of a run or a stage in which `PipelineFacts` and `CallFacts` lie."""
PERFORMANCE: Final = "performance"
"""The fact of a generation in which its `PerformanceMetrics` lie."""
FULL_SCORE: Final = 100.0
SIGNIFICANT_PERCENT: Final = 50.0
"""An improvement of the total time above this is called significant."""


@dataclass(frozen=True, slots=True)
class Case:
    """One generation.

    Prompts are facts of its first stage: `stages[0].facts["prompts"]`, by the argument's name (`prompt`, `negative_prompt`, …)
    as {"sha256", "text"}, without the text if privacy is "hash"; absent if it is "none".

    Attributes:
        stages: Its stages, outermost first, those inside others included.
        seconds: What it took in all.
        pipeline: What ran; None: not recorded.
        call: What it was called with.
        host: The machine.
        name: The stage that it is; None: the whole run, or what in it is part of no generation.
        number: Which generation of the run; one inside another has its number. None: no generation.
        denoises: Whether anything is generated. If not, other work cannot take too large a share of the time.
        misses_target: Whether a generation in it, or around it, took longer than its target.
    """

    stages: tuple[Stage, ...]
    seconds: float
    pipeline: PipelineFacts | None = None
    call: CallFacts = field(default_factory=CallFacts)
    host: HostFacts | None = None
    name: str | None = None
    number: int | None = None
    denoises: bool = True
    misses_target: bool = False

    def named(self, *names: str) -> list[Stage]:
        """Stages of these names, none of them inside another one of them."""
        named = [stage for stage in self.stages if stage.name in names]
        inner = {id(part) for stage in named for part in stage.walk() if part is not stage}
        return [stage for stage in named if id(stage) not in inner]

    def with_steps(self) -> list[Stage]:
        """Stages that have steps of their own."""
        return [stage for stage in self.stages if len(stage.steps)]

    def components(self, role: Role) -> Mapping[str, ComponentFacts]:
        """The pipeline's components that do this, by name."""
        return {} if self.pipeline is None else self.pipeline.of_role(role)

    def accelerators(self) -> tuple[AcceleratorFacts, ...]:
        """Of the machine."""
        return () if self.host is None else self.host.accelerators


def cases(run: Run) -> Iterator[Case]:
    """A case for each generation whose call is known, then one for the work outside generations; else one for the run.

    A pipeline noted on the run holds for all of its generations. The work outside them is that between calls: models
    loaded, prompts encoded, LoRAs put on. The seconds of that case are those of the run.
    """
    pipeline = _pipeline(run.facts)
    for number, outermost in enumerate(_outermost_generations(run.stages)):
        misses = _misses_target(outermost.walk())
        for stage in filter(_is_generation, outermost.walk()):
            own_pipeline = _pipeline(stage.facts) or pipeline
            call = _call(stage.facts)
            stages = tuple(stage.walk())
            denoises = _denoises(stages)
            yield Case(
                stages, stage.seconds, own_pipeline, call, run.host, stage.name, number, denoises, misses
            )
    between = tuple(_stages_between(run.stages))
    if between or not run.stages:
        denoises, misses = _denoises(run.walk()), _misses_target(between)
        call = _call(run.facts)
        yield Case(between, run.seconds, pipeline, call, run.host, denoises=denoises, misses_target=misses)


def _pipeline(facts: Mapping[str, Any]) -> PipelineFacts | None:
    plain = facts.get(PIPELINE)
    return None if plain is None else from_plain(plain, PipelineFacts, PIPELINE)


def _outermost_generations(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Generations that lie in no other."""
    for stage in stages:
        if _is_generation(stage):
            yield stage
        else:
            yield from _outermost_generations(stage.children)


def _is_generation(stage: Stage) -> bool:
    return PIPELINE in stage.facts or CALL in stage.facts


def _call(facts: Mapping[str, Any]) -> CallFacts:
    plain = facts.get(CALL)
    return CallFacts() if plain is None else from_plain(plain, CallFacts, CALL)


def _denoises(stages: Iterable[Stage]) -> bool:
    return any(stage.name == "denoising" or len(stage.steps) for stage in stages)


def _misses_target(stages: Iterable[Stage]) -> bool:
    return any(metrics.misses_target for metrics in map(noted_metrics, stages) if metrics is not None)


def noted_metrics(stage: Stage) -> PerformanceMetrics | None:
    """What a monitor noted of a generation; None if it noted nothing, or if that cannot be read."""
    noted = stage.facts.get(PERFORMANCE)
    if not isinstance(noted, Mapping):
        return None
    try:
        return PerformanceMetrics.from_dict({"target_met": None, "total_generation_time": None, **noted})
    except ValueError:
        return None


def _stages_between(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Stages that neither are part of a generation nor hold one."""
    for stage in stages:
        if not any(map(_is_generation, stage.walk())):
            yield from stage.walk()
        elif not _is_generation(stage):
            yield from _stages_between(stage.children)


def whole(run: Run) -> Case:
    """All of a run, for rules on what happens from one generation to the next."""
    return Case(tuple(run.walk()), run.seconds, _pipeline(run.facts), _call(run.facts), run.host)


def compilations_in(case: Case) -> Compilations | None:
    """What torch.compile did during a generation; None where that is not recorded."""
    return next(filter(None, (compilations_of(stage.facts) for stage in case.stages)), None)


def compiles(case: Case, role: Role) -> bool:
    """Whether torch.compile compiled something of this role during a generation; where that is not recorded, whether it may have."""
    components = {} if case.pipeline is None else case.pipeline.components
    compiled = {part.role for part in components.values() if part.compiled}
    # A denoiser of one's own, and a ControlNet, are "other".
    is_meant = role in compiled or (role == "denoiser" and "other" in compiled)
    noted = compilations_in(case)
    if noted is None:
        return is_meant
    return noted.count > 0 and (is_meant or not compiled)


def most_at_once(stages: Iterable[Stage]) -> int:
    """The most of these stages that were open at one moment."""
    spans = [(stage.started_seconds, stage.started_seconds + stage.seconds) for stage in stages]
    moments = sorted(
        moment for began, ended in spans if ended > began for moment in ((began, 1), (ended, -1))
    )
    opened = most = 0
    for _, change in moments:  # of one moment, what ends comes first
        opened += change
        most = max(most, opened)
    return most


def seconds_of(stages: list[Stage]) -> float:
    """Of several stages together, by the accelerator's clock where it measured them."""
    return sum(map(stage_seconds, stages), 0.0)


def performance_score(seconds: float | None, target_seconds: float) -> float | None:
    """min(100, 100 · target / time), to one decimal.

    Args:
        seconds: What the generation took; None: not known.
        target_seconds: What it may take.

    Returns:
        0-100; None when the time is not known. A time of 0 meets every target.

    Examples:
        >>> performance_score(16.0, 5.0), performance_score(2.4, 5.0)
        (31.2, 100.0)
    """
    if seconds is None or math.isnan(seconds):
        return None
    if seconds <= target_seconds:
        return FULL_SCORE
    return round(FULL_SCORE * target_seconds / seconds, 1)


def meets_target(seconds: float | None, target_seconds: float) -> bool | None:
    """Whether time ≤ target; None when the time is not known."""
    return None if seconds is None or math.isnan(seconds) else seconds <= target_seconds


def projected_seconds(elapsed_seconds: float, recent_step_seconds: float, steps_left: int) -> float:
    """Where a running generation will end: elapsed + mean of recent steps · steps left."""
    return elapsed_seconds + recent_step_seconds * max(steps_left, 0)


def per_step_time(metrics: PerformanceMetrics, *, is_whole: bool = True) -> StepTimeDict:
    """The mean seconds of a step; total / steps, marked as derived, where no step was timed."""
    timed, total = metrics.generation_time_per_step, metrics.total_generation_time
    if timed == metrics.derived_time_per_step:
        timed = None  # so that it is derived anew of what was written into the metrics since
    steps = 0 if "num_inference_steps" in metrics.assumed else metrics.num_inference_steps
    if timed or not is_whole or not total or steps < 1:
        return {"per_step_time": timed}
    return {"per_step_time": total / steps, "per_step_time_derived": True}


def fill_step_time(metrics: PerformanceMetrics, *, is_whole: bool = True) -> None:
    """Put `per_step_time` into the metrics themselves."""
    step = per_step_time(metrics, is_whole=is_whole)
    metrics.generation_time_per_step = step["per_step_time"]
    metrics.derived_time_per_step = step["per_step_time"] if "per_step_time_derived" in step else None


def compare_metrics(
    before: PerformanceMetrics, after: PerformanceMetrics, *, after_is_whole: bool = True
) -> BeforeAfterDict:
    """What changed from one generation to another, positive where it became faster."""
    compared = _generation_dict(before), _generation_dict(after, is_whole=after_is_whole)
    improvement: ImprovementDict = {
        "total_time_percent": improvement_percent(before.total_generation_time, after.total_generation_time),
        "per_step_time_percent": improvement_percent(
            compared[0]["per_step_time"], compared[1]["per_step_time"]
        ),
        "performance_score_change": _difference(before.performance_score, after.performance_score),
        "target_status_change": None not in (before.target_met, after.target_met)
        and before.target_met != after.target_met,
        "target_status": f"{before.target_met} → {after.target_met}",
    }
    return {
        "before": compared[0],
        "after": compared[1],
        "improvement": improvement,
        "summary": _summary(improvement["total_time_percent"], before, after),
    }


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _generation_dict(metrics: PerformanceMetrics, *, is_whole: bool = True) -> ComparedGenerationDict:
    assumed: AssumedDict = {"target_assumed": True} if metrics.target_assumed else {}
    return {
        "total_time": metrics.total_generation_time,
        **per_step_time(metrics, is_whole=is_whole),
        "target_met": metrics.target_met,
        "performance_score": metrics.performance_score,
        "model": metrics.model_name,
        **assumed,
    }


def _summary(
    percent: float | None, before: PerformanceMetrics, after: PerformanceMetrics
) -> ComparisonSummaryDict:
    return {
        "faster": None if percent is None else percent > 0,
        "improvement_factor": improvement_factor(before.total_generation_time, after.total_generation_time),
        "meets_target_now": after.target_met,
        "significant_improvement": None if percent is None else percent > SIGNIFICANT_PERCENT,
    }


def improvement_percent(before: float | None, after: float | None) -> float | None:
    """(before − after) / before in per cent; None when a side is not known or there was nothing before."""
    if not _is_known(before) or after is None or not is_duration(after):
        return None
    return (before - after) / before * 100


def _is_known(seconds: float | None) -> TypeGuard[float]:
    """Whether there is a time, and one to reckon with."""
    return seconds is not None and seconds != 0 and is_duration(seconds)


def improvement_factor(before: float | None, after: float | None) -> float | None:
    """Before / after; None when a side is not known or zero."""
    if not _is_known(before) or not _is_known(after):
        return None
    return before / after


def before_after(new: Sequence[Run], baseline: Sequence[Run]) -> BeforeAfterDict | None:
    """The generation of median length on each side; None where one side holds no generation of a monitor's."""
    before, after = _median_generation(baseline), _median_generation(new)
    return None if before is None or after is None else compare_metrics(before, after)


def _median_generation(runs: Sequence[Run]) -> PerformanceMetrics | None:
    """The metrics of the generation whose total is the median, or the lower of the two in the middle."""
    generations = [(seconds, metrics) for run in runs for seconds, metrics in _noted_generations(run)]
    if not generations:
        return None
    middle = median_low(seconds for seconds, _ in generations)
    return next(metrics for seconds, metrics in generations if seconds == middle)


def _noted_generations(run: Run) -> Iterator[tuple[float, PerformanceMetrics]]:
    """What a monitor noted of each generation that went to its end, with its total; others are left out."""
    for stage in run.walk():
        metrics = noted_metrics(stage)
        total = None if metrics is None else metrics.total_generation_time
        if metrics is not None and stage.success and total is not None and is_duration(total):
            yield total, metrics
