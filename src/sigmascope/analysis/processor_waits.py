"""Where a run waited for a processor: what held it back was another program, its own threads, a quota, or that it was stopped."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sigmascope import units
from sigmascope.analysis.rules import Seen, rule
from sigmascope.analysis.run_figures import BUSY, MUCH_WAITED, known, waited_seconds
from sigmascope.plain_text import in_one_line
from sigmascope.records.performance import CHILDREN, ProcessorUse, others_of, processor_use_of
from sigmascope.records.run import Run, is_duration

WAITED: Final = "time.waited_for_processor"
_LEAST_SHARE_OF_RUN: Final = 0.1
"""A stage that waited is told of if its waiting is this share of the run."""
_LEAST_SECONDS: Final = 0.2


class _Wait(NamedTuple):
    what: str
    stage: str | None
    seconds: float
    waited: float
    use: ProcessorUse


def _waits(run: Run) -> Iterator[_Wait]:
    """The run, or its outermost stages together where the run itself has no figures; then its stages, as far as they are known."""
    subjects: list[tuple[str, str | None, float, Mapping[str, Any]]] = [
        ("The run", None, run.seconds, run.facts)
    ]
    subjects += [(in_one_line(stage.name), stage.name, stage.seconds, stage.facts) for stage in run.walk()]
    outermost = [use for stage in run.stages if (use := processor_use_of(stage.facts)) is not None]
    for what, stage, seconds, facts in subjects:
        use = processor_use_of(facts)
        if stage is None and use is None and outermost:
            use = _together(outermost)
        waited = None if use is None else waited_seconds(use)
        if use is not None and waited is not None and seconds > 0:
            yield _Wait(what, stage, seconds, min(waited, seconds), use)


def _together(uses: Sequence[ProcessorUse]) -> ProcessorUse:
    return ProcessorUse(
        sum(use.own_seconds for use in uses),
        _sum(use.waited_seconds for use in uses),
        _sum(use.throttled_seconds for use in uses),
        _sum(use.stopped_seconds for use in uses),
    )


def _sum(seconds: Iterable[float | None]) -> float | None:
    of_known = known(seconds)
    return sum(of_known) if of_known else None


@rule(WAITED, "warning", about="time", looks_at="run")
def waited_for_a_processor(run: Run) -> Iterator[Seen]:
    """A run, or a stage of it, waited for a processor for more than a quarter of its time: other programs, its own threads, a quota, or a stop."""
    many = [
        wait
        for wait in _waits(run)
        if wait.waited > MUCH_WAITED * wait.seconds and wait.waited > _LEAST_SECONDS
    ]
    whole = [wait for wait in many if wait.stage is None]
    parts = [wait for wait in many if wait.waited > _LEAST_SHARE_OF_RUN * run.seconds]
    if not whole and not parts:
        return
    wait = whole[0] if whole else max(parts, key=lambda part: part.waited)
    others = others_of(run.facts)
    who, advice = _cause(wait, others, _share_of_children(run))
    yield Seen(
        message=f"{wait.what} {'stood still' if _was_stopped(wait) else 'waited for a processor'} for "
        f"{units.percent(wait.waited, wait.seconds)} of "
        f"{units.seconds(wait.seconds)}: {who}{_also_stopped(wait)}.",
        evidence={
            "waited_seconds": wait.waited,
            "seconds": wait.seconds,
            "own_seconds": wait.use.own_seconds,
            "throttled_seconds": wait.use.throttled_seconds,
            "stopped_seconds": wait.use.stopped_seconds,
            "others_cpu_share": others,
        },
        advice=advice,
        stage=wait.stage,
    )


def _was_stopped(wait: _Wait) -> bool:
    return (wait.use.stopped_seconds or 0.0) > wait.waited / 2


def _share_of_children(run: Run) -> float:
    """The share of all processors that the run's own child processes used; 0 where that is not known."""
    seconds = run.facts.get(CHILDREN)
    count = None if run.host is None else run.host.cpu_count_logical
    if not (isinstance(seconds, int | float) and is_duration(seconds) and is_duration(run.seconds) and count):
        return 0.0
    return seconds / run.seconds / count if run.seconds > 0 else 0.0


def _also_stopped(wait: _Wait) -> str:
    """That it was stopped beside what held it back more; empty where it was not for long."""
    stopped = wait.use.stopped_seconds or 0.0
    is_told = not _was_stopped(wait) and stopped > _LEAST_SHARE_OF_RUN * wait.seconds
    return f"; the process was stopped for {units.seconds(stopped)}, too" if is_told else ""


def _cause(wait: _Wait, others: float | None, children: float) -> tuple[str, str]:
    """What held it back, and what helps."""
    throttled = wait.use.throttled_seconds or 0.0
    if _was_stopped(wait):
        return (
            f"the process was stopped for {units.seconds(wait.use.stopped_seconds)} (Ctrl-Z, SIGSTOP, a debugger, a paused container)",
            "Its times tell of the stop, not of the pipeline: measure again.",
        )
    if throttled > wait.waited / 2:
        return (
            f"the quota of its control group held it back for {units.seconds(throttled)}",
            "Raise the container's limit (docker run --cpus, resources.limits.cpu), or use fewer threads (OMP_NUM_THREADS).",
        )
    if others is not None and children > max(BUSY, others / 2):
        return (
            f"its own child processes, which used {100 * children:.0f} % of the processors",
            "Workers that compile or load data take processors from the pipeline: start fewer of them (num_workers, "
            "TORCHINDUCTOR_COMPILE_THREADS), or let them be done before.",
        )
    if others is None or others > BUSY:
        share = "" if others is None else f", which used {100 * others:.0f} % of the processors"
        return (
            f"other programs{share}",
            "The times are those of a busy machine: measure again when it is idle.",
        )
    return (
        "its own threads held each other back, no other program did",
        "Use no more threads than there are processors (torch.set_num_threads, OMP_NUM_THREADS; workers of data loaders).",
    )
