"""A run beside the runs like it that were kept before: is it slower than all of them, is its output another?

Whether a difference is noise is decided as everywhere (`analysis.run_comparison`). One run is held against the slowest of
the earlier ones. The first run of a process loads, compiles and warms up, so it is held against first runs alone. Where the
whole is not slower, its generations may be: imports and loading hide them in the record of a script.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sigmascope.analysis.recipe import NOT_SET, recipe_of_runs
from sigmascope.analysis.run_comparison import compare_totals, is_noise
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.analysis.what_changed import first_difference, what_changed
from sigmascope.history.store import KeptRun, Store
from sigmascope.records.performance import PROCESSOR
from sigmascope.records.run import RUNS_BEFORE, Run, Stage

_WHOLE: Final = 0.8
"""Generations that take this share of their run are as slow as the whole."""
_MOST: Final = 30
"""Earlier runs that are looked at."""
_FEWEST: Final = 3
"""Of fewer nobody knows how far they differ by themselves."""


def beside_earlier(store: Store, kept: KeptRun, run: Run) -> str | None:
    """A line for the user; None: there is nothing to say.

    Args:
        store: With the earlier runs.
        kept: The row of the run, which is in the store.
        run: Its record.

    Raises:
        StoreError: The store cannot be read.
    """
    earlier = store.comparable_before(kept, limit=_MOST) if run.complete else []
    return _slower(store, earlier, kept, run) or _other_output(store, earlier, kept, run)


def _slower(store: Store, earlier: list[KeptRun], kept: KeptRun, run: Run) -> str | None:
    if len(earlier) < _FEWEST:
        return None
    wholes = [before.row.seconds for before in earlier]
    if _is_above(kept.row.seconds, wholes):
        count, last = _measures(store, earlier, run)
        return _told_slower("slower than each of", count, run, last)
    medians = [before.row.generation_seconds for before in earlier]
    alone = _generations_of(run)
    if alone.seconds < _WHOLE * run.seconds and _is_above(kept.row.generation_seconds, medians):
        count, last = _measures(store, earlier, run)
        return _told_slower(
            "its generations are slower than in each of", count, alone, list(map(_generations_of, last))
        )
    return None


def _measures(store: Store, earlier: list[KeptRun], run: Run) -> tuple[int, list[Run]]:
    """How many of the earlier runs are a measure, and the last of them: of a first run of its process, first ones alone."""
    if run.facts.get(RUNS_BEFORE) != 0:
        return len(earlier), [store.record(before.number) for before in earlier[:_FEWEST]]
    records = (store.record(before.number) for before in earlier)
    firsts = [record for record in records if record.facts.get(RUNS_BEFORE) == 0]
    return len(firsts), firsts[:_FEWEST]


def _is_above(seconds: float | None, earlier: Sequence[float | None]) -> bool:
    """Whether a time is longer than all of the earlier ones, beyond noise."""
    if seconds is None or None in earlier:
        return False
    slowest = max(before for before in earlier if before is not None)
    return seconds > slowest and not is_noise([seconds], [slowest], "seconds")


def _told_slower(how: str, count: int, run: Run, last: Sequence[Run]) -> str | None:
    if count < _FEWEST:
        return None
    total = compare_totals([run], last)
    if total.is_noise or not total.is_comparable:
        return None
    return f"{how} the last {count} runs like it: {what_changed([run], last).headline}"


def _generations_of(run: Run) -> Run:
    """The run as if its generations were all of it, one after another."""
    stages: list[Stage] = []
    seconds = 0.0
    for stage in run.stages:
        if stage.name == GENERATION:
            stages.append(replace(stage, started_seconds=seconds))
            seconds += stage.seconds
    facts = {name: value for name, value in run.facts.items() if name != PROCESSOR}  # that is of the whole
    return replace(run, seconds=seconds, stages=tuple(stages), folded=None, facts=facts)


def _other_output(store: Store, earlier: list[KeptRun], kept: KeptRun, run: Run) -> str | None:
    same = [before for before in earlier if before.row.recipe == kept.row.recipe is not None][:_FEWEST]
    if not same or NOT_SET in recipe_of_runs([run]).get("seed", NOT_SET):
        return None
    last = [store.record(before.number) for before in same]
    if first_difference([run], last) is None:
        return None
    return (
        f"another output than that of the last run of the same recipe: {what_changed([run], last).headline}"
    )
