"""Time and memory of runs of the same kind, one after another, and the places where they changed."""

from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sigmascope.analysis.trend import Series
from sigmascope.history.location import file_of, is_there
from sigmascope.history.store import open_store
from sigmascope.history.trends import trends, with_causes
from sigmascope.reports.trend import (
    causes_in_words,
    change_in_words,
    day,
    notes,
    picture,
    state_in_words,
    title,
)
from sigmascope.ui.app import Part, page_of
from sigmascope.ui.security import Refusal
from sigmascope.units import counted

_MOST_KINDS: Final = 40
_FEWEST: Final = 2
_MOST_CHANGES: Final = 10
_FIGURES: Final = {"time": "Time", "peak": "Peak of memory"}


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
    if file is not None and not is_there(file):
        return {"kinds": [], "chosen": None, "charts": []}
    with open_store(url, create=False) as store:
        kinds = [series for series in trends(store) if len(series.runs) >= _FEWEST][:_MOST_KINDS]
        number = kinds[0].runs[-1].number if kinds else None
        if chosen:
            number = int(chosen) if chosen.isdecimal() and len(chosen) < 19 else None
        found = [] if number is None else store.runs_of_numbers([number])
        if chosen and not found:
            raise Refusal(404, "There is no such run in the store.", "Choose one of the list.")
        series = [one for kept in found for figure in _FIGURES for one in trends(store, figure, like=kept)]
        series = [with_causes(store, one, most=_MOST_CHANGES) for one in series if len(one.runs) >= _FEWEST]
    return {
        "kinds": [
            {
                "number": one.runs[-1].number,
                "words": title(one),
                "count": counted(len(one.runs), "run"),
                "is_chosen": any(run.number == number for run in one.runs),
            }
            for one in kinds
        ],
        "chosen": title(series[0]) if series else None,
        "charts": [_chart(one) for one in series],
    }


def _chart(series: Series) -> dict[str, Any]:
    numbers = {run.id: run.number for run in series.runs}
    return {
        "title": _FIGURES[series.figure],
        "state": state_in_words(series),
        "picture": picture(series),
        "notes": notes(series),
        "changes": [
            {
                "since": day(told.started_at),
                "id": told.run[:8],
                "number": numbers[told.run],
                "change": change_in_words(series, told),
                "causes": causes_in_words(told),
            }
            for told in series.changes[-_MOST_CHANGES:]
        ],
    }
