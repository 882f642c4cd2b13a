"""Whether a machine itself worked slower in some runs than in others, by the work that a watch does in each of them.

Processors clock down when they get hot or run from a battery, and on a shared host others take caches and memory from a virtual
machine, which sees nothing of it: its programs need more processor time for the same work. Of the work of a pipeline nobody knows
that it is the same. Of the watch's own it is known: in runs with one set-up it looks at the same things.
"""

from collections.abc import Sequence
from typing import NamedTuple

from sigmascope.analysis.recipe import SET_UP, recipe_groups
from sigmascope.analysis.run_figures import known
from sigmascope.analysis.run_order import in_order
from sigmascope.records.run import OWN_CPU_SECONDS, RUNS_BEFORE, Run, is_duration


class OwnWork(NamedTuple):
    """What the watch's work took of the processor's time, one value a run, in their order."""

    now: tuple[float, ...]
    before: tuple[float, ...]


def own_work_of(new: Sequence[Run], baseline: Sequence[Run]) -> OwnWork | None:
    """The watch's work in two sets of runs; None where it is not recorded, or says little as an accelerator does the pipeline's."""
    seconds = [[_own_work(run) for run in in_order(side)] for side in (new, baseline)]
    now, before = (tuple(known(side)) for side in seconds)
    if not now or not before or len(now) + len(before) < len(new) + len(baseline):
        return None
    return OwnWork(now, before)


def is_same_work(new: Sequence[Run], baseline: Sequence[Run]) -> bool:
    """Whether the watch is known to have done the same in all of these runs.

    That is with equal models, LoRAs, surroundings, versions and machine; what was asked for may be another. A process's
    first run loads more.
    """
    set_ups = (_set_up(run) for run in (*baseline, *new))
    first = next(set_ups)
    return all(other == first for other in set_ups)


def _own_work(run: Run) -> float | None:
    if run.host is None or run.host.accelerators:
        return None
    seconds = run.facts.get(OWN_CPU_SECONDS)
    return seconds if isinstance(seconds, float) and is_duration(seconds) and seconds > 0 else None


def _set_up(run: Run) -> tuple[object, ...]:
    groups = recipe_groups(run)
    return (run.facts.get(RUNS_BEFORE) == 0, *(groups.get(group) for group in SET_UP))
