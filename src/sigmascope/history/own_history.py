"""A run beside the runs like it that were kept before: is it slower than all of them, is its output another?

Whether a difference is noise is decided as everywhere (`analysis.run_comparison`). One run is held against the slowest of
the earlier ones, since a first run of a process, which loads and compiles, is no news where there was one before.
"""

from typing import Final

from sigmascope.analysis.recipe import NOT_SET, recipe_of_runs
from sigmascope.analysis.run_comparison import compare_totals, is_noise
from sigmascope.analysis.what_changed import first_difference, what_changed
from sigmascope.history.store import KeptRun, Store
from sigmascope.records.run import Run

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
    return _slower(store, earlier, run) or _other_output(store, earlier, kept, run)


def _slower(store: Store, earlier: list[KeptRun], run: Run) -> str | None:
    slowest = max((before.row.seconds for before in earlier), default=0.0)
    if len(earlier) < _FEWEST or run.seconds <= slowest or is_noise([run.seconds], [slowest], "seconds"):
        return None
    last = [store.record(before.number) for before in earlier[:_FEWEST]]
    total = compare_totals([run], last)
    if total.is_noise or not total.is_comparable:
        return None
    return f"slower than each of the last {len(earlier)} runs like it: {what_changed([run], last).headline}"


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
