"""A run beside the runs like it that were kept before: is it slower than they were, is its output another?

A single run is told where it is slower than each of the earlier ones by more than noise. The first run of a process loads,
compiles and warms up, so it is held against first runs alone. Where the whole is not slower, its generations may be: imports
and loading hide them in the record of a script. A smaller change is told with its third run in a row, once, where a trend
calls it one (`analysis.trend`). What is noise is decided as everywhere (`run_comparison.is_noise`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from sigmascope.analysis.recipe import NOT_SET, recipe_of_runs
from sigmascope.analysis.run_comparison import compare_wholes, is_noise
from sigmascope.analysis.run_figures import GENERATION
from sigmascope.analysis.trend import changed_with_last
from sigmascope.analysis.what_changed import first_difference, what_changed
from sigmascope.history.store import KeptRun, Store
from sigmascope.records.performance import PROCESSOR
from sigmascope.records.run import RUNS_BEFORE, Run, Stage

_WHOLE: Final = 0.8
"""Generations that take this share of their run are as slow as the whole."""
_MOST: Final = 60
"""Earlier runs that are looked at: a whole level of a trend."""
_MOST_COMPARED: Final = 20
"""Their records are read beside a change of a trend."""
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
    run = replace(run, place=kept.place)
    earlier = store.comparable_before(kept, limit=_MOST) if run.complete else []
    return _slower(store, earlier, kept, run) or _other_output(store, earlier, kept, run)


def _slower(store: Store, earlier: list[KeptRun], kept: KeptRun, run: Run) -> str | None:
    if len(earlier) < _FEWEST:
        return None
    if _is_above(kept.row.seconds, [before.row.seconds for before in earlier]):
        count, last = _measures(store, earlier, run)
        return _told(f"slower than each of the last {count} runs like it", [run], last)
    alone = _generations_of(run)
    medians = [before.row.generation_seconds for before in earlier]
    if alone.seconds < _WHOLE * run.seconds and _is_above(kept.row.generation_seconds, medians):
        count, last = _measures(store, earlier, run)
        how = f"its generations are slower than in each of the last {count} runs like it"
        return _told(how, [alone], list(map(_generations_of, last)))
    return _slower_for_some_runs(store, earlier, run)


def _slower_for_some_runs(store: Store, earlier: list[KeptRun], run: Run) -> str | None:
    times = [before.row.seconds for before in reversed(earlier)]
    change = changed_with_last([*times, run.seconds], "seconds")
    if change is None or change.after <= change.before:
        return None
    new = len(times) + 1 - change.at
    since = [store.record(before.number) for before in earlier[new - 2 :: -1]]
    last = [store.record(before.number) for before in earlier[new - 1 :][:_MOST_COMPARED]]
    return _told(f"slower for {new} runs than the runs like it before", [*since, run], last)


def _measures(store: Store, earlier: list[KeptRun], run: Run) -> tuple[int, list[Run]]:
    """How many of the earlier runs are a measure, and the last of them: of a first run of its process, first ones alone."""
    if run.facts.get(RUNS_BEFORE) != 0:
        return len(earlier), [store.record(before.number) for before in earlier[:_FEWEST]]
    records = (store.record(before.number) for before in earlier)
    firsts = [record for record in records if record.facts.get(RUNS_BEFORE) == 0]
    return len(firsts), firsts[:_FEWEST]


def _is_above(seconds: float | None, earlier: Sequence[float | None]) -> bool:
    """Whether a time is longer than all of the earlier ones, beyond noise."""
    times = [before for before in earlier if before is not None]
    if seconds is None or len(times) < len(earlier):
        return False
    return seconds > max(times) and not is_noise([seconds], times, "seconds")


def _told(how: str, new: Sequence[Run], last: Sequence[Run]) -> str | None:
    """What is told, with what changed; None where other programs or waiting explain it."""
    if len(last) < _FEWEST:
        return None
    whole = compare_wholes(new, last)
    if whole is None or whole.state != "changed":
        return None
    return f"{how}: {what_changed(new, last).headline}"


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
