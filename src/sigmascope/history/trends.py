"""What the kept runs show together: a series for each kind of work, with the places where it changed, and why.

Runs are of one kind where `store.COMPARABLE` is equal; or, on wish, where their recipe is, too. Only whole runs count. Values
come from the store's rows, a hundred thousand at once; the figures that no row has, such as a step's, from the records of
the last runs. Why something changed is in the records on both sides of the place.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from typing import Any, Final

from sigmascope.analysis.memory import held_less_before
from sigmascope.analysis.recipe import recipe_differences
from sigmascope.analysis.run_comparison import MAX_GROWTH, USUAL, Limits, compare_wholes
from sigmascope.analysis.run_figures import PROCESS_PEAK, Unit, figures_of, timed_on_device
from sigmascope.analysis.trend import MOST_BEFORE, Series, SeriesRun, ToldChange, is_value, trend_of
from sigmascope.analysis.what_changed import causes_in_words
from sigmascope.errors import ConfigError, StoreError
from sigmascope.history.row import row_of
from sigmascope.history.store import COMPARABLE, Filters, KeptRun, Point, Store
from sigmascope.records.run import Run

COLUMNS: Final[dict[str, tuple[str, Unit]]] = {
    "time": ("seconds", "seconds"),
    "generation": ("generation_seconds", "seconds"),
    "peak": ("peak_bytes", "bytes"),
}
"""Figures that stand in the rows, with their column."""
STEP: Final = "step"
_MOST_RECORDS: Final = 300
"""That are read for a figure that no row has."""
MOST_BESIDE: Final = 10
"""Records on each side of a change point that are compared."""
_PROCESS: Final = Limits(bytes=MAX_GROWTH)
"""Allocators of processes keep 1 % more or less."""
_NO_WHOLE: Final = "the runs of one side have no time that can be one"
_WRONG_SECONDS: Final = 3600.0
"""Clocks of machines differ, and runs go on side by side."""


def trends(
    store: Store,
    figure: str = "time",
    filters: Filters | None = None,
    *,
    like: KeptRun | None = None,
    by_recipe: bool = False,
    most: int | None = None,
) -> list[Series]:
    """The series of the runs that are meant, that with the latest run first.

    Args:
        store: Where to look.
        figure: One of `COLUMNS`, "step", or a figure of `compare` such as "latent_decoding".
        filters: Which runs.
        like: Only the runs of the same kind of work as this one.
        by_recipe: A series for each recipe, too; with `like`, of its recipe alone.
        most: So many series, those of the latest runs.

    Raises:
        ConfigError: No run has such a figure.
        StoreError: The store or a record cannot be read.
    """
    column, unit = COLUMNS.get(figure, ("seconds", "seconds"))
    points = store.points(column, filters, like=like)
    if by_recipe and like is not None:
        points = [point for point in points if point.kind[-1] == like.row.recipe]
    if figure not in COLUMNS:
        points, unit = _of_records(store, figure, points)
    kinds: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        kinds.setdefault(point.kind if by_recipe else point.kind[:-1], []).append(point)
    timed = [of_kind for of_kind in kinds.values() if any(is_value(point.value) for point in of_kind)]
    timed.sort(key=lambda of_kind: of_kind[-1].place, reverse=True)
    return [_series(figure, unit, of_kind) for of_kind in timed[:most]]


def comparable_before(store: Store, runs: Sequence[Run]) -> list[Run]:
    """The kept runs of the same work on the same device before these, the oldest first; 50 at most.

    The runs themselves need not be in the store.

    Raises:
        ConfigError: The runs are not of one kind of work.
        StoreError: There is none, or the store cannot be read.
    """
    rows = [row_of(run) for run in runs]
    kinds = {tuple(getattr(row, name) for name in COMPARABLE) for row in rows}
    if len(kinds) != 1:
        differing = [name for name, *values in zip(COMPARABLE, *kinds, strict=True) if len(set(values)) > 1]
        raise ConfigError(
            f"The runs differ in {', '.join(differing)}." if kinds else "There are no runs to check.",
            hint="Check runs of one kind of work at a time.",
        )
    first = min(store.placed(rows), key=lambda run: run.place)
    ids = {row.id for row in rows}
    found = store.comparable_before(first, limit=MOST_BEFORE + len(rows))
    kept = [run for run in found if run.row.id not in ids][:MOST_BEFORE]
    if not kept:
        raise StoreError(
            f"No run like {first.row.id} was kept before it: of the same pipeline, model, size, steps and device.",
            hint="List what is kept with sigmascope runs.",
        )
    return [store.record(run.number) for run in reversed(kept)]


def _series(figure: str, unit: Unit, points: Sequence[Point]) -> Series:
    timed = tuple(
        SeriesRun(point.number, point.id, point.started_at, float(point.value))
        for point in points
        if point.value is not None and is_value(point.value)
    )
    recipes = {point.kind[-1] for point in points}
    kind = dict(zip(COMPARABLE, points[-1].kind, strict=False))
    limits = _PROCESS if unit == "bytes" and _is_of_process(figure, kind["device"]) else USUAL
    trend = trend_of([run.value for run in timed], unit, limits=limits)
    if len(recipes) == 1:
        kind["recipe"] = points[-1].kind[-1]
    told = tuple(
        ToldChange(change, timed[change.at].id, timed[change.at].started_at) for change in trend.changes
    )
    left_out, wrong = len(points) - len(timed), of_wrong_clocks(points)
    return Series(figure, unit, kind, timed, trend, told, left_out, wrong, len(recipes))


def _is_of_process(figure: str, device: str | None) -> bool:
    """Whether a figure of memory is that of the process, and not of a device."""
    return figure == PROCESS_PEAK or (figure == "peak" and (device is None or device.startswith("cpu")))


def of_wrong_clocks(points: Sequence[Point]) -> int:
    """How many of the runs that stand in this order a clock puts elsewhere, by more than an hour.

    These are as few as one can leave out so that the others ended one after another. A run that ended in 2099 is one, and not
    the thousand that were kept after it.
    """
    ends = [_end(point) for point in points]
    latest = [-math.inf, *accumulate(ends, max)][:-1]
    earliest = [math.inf, *accumulate(reversed(ends), min)][::-1][1:]
    doubtful = [
        end // _WRONG_SECONDS
        for end, before, after in zip(ends, latest, earliest, strict=True)
        if end < before - _WRONG_SECONDS or end > after + _WRONG_SECONDS
    ]
    rising: list[float] = []  # the smallest end of a rising row of each length
    for hour in doubtful:
        at = bisect_right(rising, hour)
        rising[at : at + 1] = [hour]
    return len(doubtful) - len(rising)


def _end(point: Point) -> float:
    return datetime.fromisoformat(point.started_at).timestamp() + point.seconds


def _of_records(store: Store, figure: str, points: Sequence[Point]) -> tuple[list[Point], Unit]:
    """The last points with a value from their records."""
    latest = points[-_MOST_RECORDS:]
    found: list[Point] = []
    unit: Unit = "seconds"
    known: set[str] = set()
    for point in latest:
        run = store.record(point.number)
        figures = figures_of([run], timed_on_device([run]))
        known |= set(figures)
        name = figure if figure != STEP else next((name for name in figures if name.endswith(" step")), STEP)
        of_run = figures.get(name)
        if of_run is not None:
            unit = of_run.unit
        found.append(point._replace(value=of_run.values[0] if of_run is not None and of_run.values else None))
    if latest and all(point.value is None for point in found):
        names = ", ".join(dict.fromkeys([*COLUMNS, STEP, *sorted(known)]))
        raise ConfigError(f"No run has the figure {figure!r}.", hint=f"Give one of {names}.")
    return found, unit


def with_causes(store: Store, series: Series, *, most: int = 10) -> Series:
    """The series with what differs around its last change points; a record that is gone or damaged is left out."""
    first = max(0, len(series.changes) - most)
    told = tuple(_told(store, series, change) for change in series.changes[first:])
    trend = series.trend
    if trend.drift is not None and series.unit == "seconds" and not _drifts(store, series):
        trend = replace(trend, drift=None)
    return replace(series, trend=trend, changes=(*series.changes[:first], *told))


def _drifts(store: Store, series: Series) -> bool:
    """Whether the first and last runs since the last change point are comparable."""
    since = series.runs[series.changes[-1].change.at if series.changes else 0 :]
    before, now = (list(_records(store, side)) for side in (since[:MOST_BESIDE], since[-MOST_BESIDE:]))
    whole = compare_wholes(now, before) if before and now else None
    return whole is not None and whole.is_comparable


def _told(store: Store, series: Series, told: ToldChange) -> ToldChange:
    change = told.change
    sides = (
        series.runs[max(change.start, change.at - MOST_BESIDE) : change.at],
        series.runs[change.at : min(change.end, change.at + MOST_BESIDE)],
    )
    before, now = (list(_records(store, side)) for side in sides)
    if not (before and now):
        return replace(told, unavailable="the records of one side are gone or damaged")
    causes = tuple(causes_in_words(recipe_differences(now, before)))
    return replace(told, causes=causes, unavailable=_not_comparable(series, now, before, causes))


def _not_comparable(
    series: Series, now: Sequence[Run], before: Sequence[Run], causes: Sequence[str]
) -> str | None:
    """Why the figure says nothing of the runs: others waited for, or memory that the process lost; None: it does."""
    if series.unit == "seconds":
        whole = compare_wholes(now, before)
        return _NO_WHOLE if whole is None else whole.unavailable.get("wall")
    is_of_process = _is_of_process(series.figure, series.kind["device"])
    return held_less_before(now, before) if is_of_process and not causes else None


def _records(store: Store, runs: Iterable[SeriesRun]) -> Iterator[Run]:
    """Those that can be read."""
    for run in runs:
        with suppress(StoreError):
            yield store.record(run.number)
