"""Steps of two sets of runs beside each other: all of a stage together, or each by its number."""

from collections.abc import Collection, Mapping, Sequence

from sigmascope.analysis.compare_runs import FigureComparison, compare_values
from sigmascope.analysis.run_figures import timed_on_device, timed_steps
from sigmascope.analysis.step_times import warm
from sigmascope.records.run import Run


def compare_pooled_steps(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[FigureComparison, ...]:
    """All steps of each stage but every run's first, as one sample a side.

    For where there are too few runs to compare run by run. The intervals then say how sure the difference is of these
    very runs: steps of one run share its circumstances, so that another run may lie outside.

    Args:
        new: At least one run.
        baseline: At least one run.
        seed: Of the resampling.
    """
    on_device = timed_on_device(new, baseline)
    ours, theirs = _pooled(new, on_device), _pooled(baseline, on_device)
    return tuple(
        compare_values(f"{name} step", "seconds", ours[name], values, seed=seed)
        for name, values in theirs.items()
        if name in ours
    )


def compare_by_step(
    new: Sequence[Run], baseline: Sequence[Run], *, seed: int = 0
) -> tuple[FigureComparison, ...]:
    """Each step of each stage by its number, one value a run; steps that one side lacks are left out.

    Args:
        new: At least one run.
        baseline: At least one run.
        seed: Of the resampling.
    """
    on_device = timed_on_device(new, baseline)
    ours, theirs = _numbered(new, on_device), _numbered(baseline, on_device)
    return tuple(
        compare_values(f"{name} step {number}", "seconds", ours[name, number], values, seed=seed)
        for (name, number), values in theirs.items()
        if (name, number) in ours
    )


def _pooled(runs: Sequence[Run], on_device: Collection[str]) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}
    for run in runs:
        for stage in run.walk():
            seconds = warm(timed_steps(stage, on_device))
            if seconds:
                found.setdefault(stage.name, []).extend(seconds)
    return found


def _numbered(runs: Sequence[Run], on_device: Collection[str]) -> Mapping[tuple[str, int], list[float]]:
    """By stage and number from 1 on, each run's seconds; a stage passed twice counts on."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        passed: dict[str, int] = {}
        for stage in run.walk():
            for seconds in timed_steps(stage, on_device):
                number = passed[stage.name] = passed.get(stage.name, 0) + 1
                if seconds is not None:
                    found.setdefault((stage.name, number), []).append(seconds)
    return found
