"""Time and memory of runs of the same kind, one after another."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sigmascope.history.location import file_of
from sigmascope.history.store import KeptRun, open_store
from sigmascope.ui.app import Part, page_of
from sigmascope.ui.security import Refusal
from sigmascope.units import counted, format_size, local_time, seconds

_MOST_KINDS: Final = 40
_MOST_RUNS: Final = 400
_FEWEST: Final = 2


def trend_part(url: str) -> Part:
    """The page on trends.

    Args:
        url: The store's.
    """

    async def index(request: Request) -> Response:
        chosen = request.query_params.get("of", "")
        values = await run_in_threadpool(_view, url, chosen)
        return await page_of(request, "trends.html.jinja", **values)

    return Part(title="Trend", path="trend", routes=(Route("/trend", index),))


def _view(url: str, chosen: str) -> dict[str, Any]:
    file = file_of(url)
    if file is not None and not file.exists():
        return {"kinds": [], "chosen": None, "charts": []}
    with open_store(url, create=False) as store:
        kinds = [(run, count) for run, count in store.kinds_of_work(limit=_MOST_KINDS) if count >= _FEWEST]
        last = kinds[0][0] if kinds else None
        if chosen:
            found = store.runs_of_numbers([int(chosen)]) if chosen.isdecimal() and len(chosen) < 19 else []
            if not found:
                raise Refusal(404, "There is no such run in the store.", "Choose one of the list.")
            last = found[0]
        series = [] if last is None else store.comparable(last, limit=_MOST_RUNS)[::-1]
    return {
        "kinds": [
            {
                "number": run.number,
                "words": _words(run),
                "count": counted(count, "run"),
                "is_chosen": last is not None and run.number == last.number,
            }
            for run, count in kinds
        ],
        "chosen": None if last is None else _words(last),
        "charts": list(_charts(series)),
    }


def _words(run: KeptRun) -> str:
    row = run.row
    parts = [
        (row.pipeline or row.name or "unnamed").removesuffix("Pipeline"),
        row.work,
        row.model,
        None if row.width is None else f"{row.width}×{row.height}",
        None if row.steps is None else counted(row.steps, "step"),
        row.hardware or row.device,
    ]
    return ", ".join(filter(None, parts))


def _charts(series: list[KeptRun]) -> Iterator[dict[str, Any]]:
    """A chart of times and one of peaks, each from 0."""
    charts: tuple[tuple[str, Callable[[Any], str], list[tuple[KeptRun, float | int]]], ...] = (
        ("Time", seconds, [(run, run.row.seconds) for run in series]),
        (
            "Peak of memory",
            format_size,
            [(run, run.row.peak_bytes) for run in series if run.row.peak_bytes is not None],
        ),
    )
    for title, shown, values in charts:
        most = max((value for _, value in values), default=0)
        if len(values) < _FEWEST or not most:
            continue
        yield {
            "title": title,
            "most": shown(most),
            "first": local_time(values[0][0].row.started_at),
            "last": local_time(values[-1][0].row.started_at),
            "label": f"{title} of {counted(len(values), 'run')}, up to {shown(most)}",
            "dots": [
                {
                    "x": 1 + 98 * index / (len(values) - 1),
                    "y": 97 - 90 * value / most,
                    "number": run.number,
                    "about": f"{run.row.id[:8]}, {local_time(run.row.started_at)}: {shown(value)}",
                }
                for index, (run, value) in enumerate(values)
            ],
        }
