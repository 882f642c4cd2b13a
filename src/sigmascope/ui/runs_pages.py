"""Pages on the runs that were kept: a list with filters, one run as its report, and two side by side.

The store is opened for each request, so that a store that was missing, locked or replaced is found again by the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sigmascope.files import without_home
from sigmascope.history.location import file_of, is_there
from sigmascope.history.references import filters_of, runs_of
from sigmascope.history.store import Filters, KeptRun, Store, open_store
from sigmascope.records.failures import OUTCOMES
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_to_json
from sigmascope.reports.html import private_runs, report_view
from sigmascope.ui.app import Part, page_of
from sigmascope.ui.security import Refusal
from sigmascope.units import UNKNOWN, format_size, local_time, seconds

PAGE: Final = 50
"""Runs on a page of the list."""
_ID_SHOWN: Final = 8
_MOST_PAGES: Final = 10**6
_FILTERS: Final = tuple(field.name for field in fields(Filters))
_SOURCES: Final = ("watch", "process", "bench", "asgi", "comfyui", "import")


def runs_part(url: str, prompts: PromptPrivacy) -> Part:
    """The pages on runs.

    Args:
        url: The store's.
        prompts: What they show of prompts.
    """
    pages = RunsPages(url, prompts)
    return Part(
        title="Runs",
        path="runs",
        routes=(
            Route("/runs", pages.list),
            Route("/runs/{run}", pages.one),
            Route("/runs/{run}/record.json", pages.record),
            Route("/compare", pages.compare),
        ),
    )


@dataclass(frozen=True)
class RunsPages:
    """The pages, each a method."""

    url: str
    prompts: PromptPrivacy

    async def list(self, request: Request) -> Response:
        """Runs that pass the filters, the newest first."""
        given = {name: text for name in _FILTERS if (text := request.query_params.get(name, "").strip())}
        number = request.query_params.get("page", "1")
        page = int(number) if number.isdecimal() and 0 < len(number) < 7 else 1
        values = await run_in_threadpool(self._listed, given, min(max(page, 1), _MOST_PAGES))
        return await page_of(request, "runs.html.jinja", **values)

    def _listed(self, given: dict[str, str], page: int) -> dict[str, Any]:
        file = file_of(self.url)
        shown: dict[str, Any] = {
            "given": dict.fromkeys(_FILTERS, "") | given,
            "is_filtered": bool(given),
            "outcomes": OUTCOMES,
            "sources": _SOURCES,
            "page": page,
            "address": urlencode(given),
            "first": PAGE * (page - 1) + 1,
        }
        filters = filters_of(given, str.capitalize)
        if file is not None and not is_there(file):
            return shown | {
                "runs": [],
                "count": 0,
                "pages": 1,
                "store": without_home(str(file)),
                "is_missing": True,
            }
        with open_store(self.url, create=False) as store:
            runs = store.runs(filters, limit=PAGE, offset=PAGE * (page - 1))
            count = len(runs) if page == 1 and len(runs) < PAGE else store.count(filters)
            name = store.name
        longest = max((run.row.seconds for run in runs), default=0.0) or 1.0
        return shown | {
            "runs": [_listed_run(run, longest) for run in runs],
            "count": count,
            "pages": max(1, -(-count // PAGE)),
            "store": without_home(name),
            "is_missing": False,
        }

    async def one(self, request: Request) -> Response:
        """One run: its row, and the report."""
        values = await run_in_threadpool(self._one, request.path_params["run"])
        return await page_of(request, "one_run.html.jinja", **values)

    def _one(self, word: str) -> dict[str, Any]:
        with open_store(self.url, create=False) as store:
            kept = _run_of(word, store)
            record = store.record(kept.number)
            before = store.comparable_before(kept, limit=1)
        (private,) = private_runs([record], self.prompts)
        return {
            **report_view([private], with_json=False),
            "kept": _listed_run(kept, kept.row.seconds or 1.0),
            "before": before[0].number if before else None,
        }

    async def record(self, request: Request) -> Response:
        """The record as JSON, with what may be shown of prompts."""
        text = await run_in_threadpool(self._record, request.path_params["run"])
        name = (
            f"run-{request.path_params['run']}.json" if request.path_params["run"].isdecimal() else "run.json"
        )
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type="application/json", headers=headers)

    def _record(self, word: str) -> str:
        with open_store(self.url, create=False) as store:
            record = store.record(_run_of(word, store).number)
        (private,) = private_runs([record], self.prompts)
        return run_to_json(private)

    async def compare(self, request: Request) -> Response:
        """Two runs side by side, the older one first; one alone beside the last comparable one before it."""
        words = [word for word in request.query_params.getlist("run") if word]
        values = await run_in_threadpool(self._compared, words)
        return await page_of(request, "compare.html.jinja", **values)

    def _compared(self, words: Sequence[str]) -> dict[str, Any]:
        if not 1 <= len(words) <= 2:
            raise Refusal(
                422,
                f"{'No run is' if not words else f'{len(words)} runs are'} ticked.",
                "Tick two runs in the list; one alone is compared with the last comparable one before it.",
            )
        with open_store(self.url, create=False) as store:
            chosen = [_run_of(word, store) for word in words]
            if len(chosen) == 1:
                before = store.comparable_before(chosen[0], limit=1)
                if not before:
                    raise Refusal(
                        404,
                        "No run like this one was kept before it: of the same pipeline, model, size, steps and device.",
                        "Tick two runs in the list.",
                    )
                chosen.insert(0, before[0])
            if chosen[0].number == chosen[1].number:
                raise Refusal(422, "Both are the same run.", "Tick two runs in the list.")
            chosen.sort(key=lambda run: run.place)
            records: list[Run] = [store.record(run.number) for run in chosen]
        return {
            **report_view(private_runs(records, self.prompts), with_json=False),
            "sides": [_listed_run(run, 1.0) for run in chosen],
        }


def _run_of(word: str, store: Store) -> KeptRun:
    """The run that a word of an address means: its number, or what commands take for one run.

    Raises:
        Refusal: There is none, or there are several (404).
        NoSuchRunError: As `runs_of`.
    """
    if word.isdecimal() and len(word) < 19:
        found = store.runs_of_numbers([int(word)])
        if not found:
            raise Refusal(
                404, f"There is no run {word} in the store.", "It may have been removed. List the runs again."
            )
        return found[0]
    found = runs_of(word, store)
    if len(found) > 1:
        raise Refusal(404, f"{word} means {len(found)} runs.", "List them with the filter for tags.")
    return found[0]


def _listed_run(run: KeptRun, longest_seconds: float) -> dict[str, Any]:
    row = run.row
    return {
        "number": run.number,
        "id": row.id,
        "short": row.id[:_ID_SHOWN],
        "name": row.name,
        "what": (row.pipeline or row.name or "unnamed").removesuffix("Pipeline"),
        "started": local_time(row.started_at),
        "size": "" if row.width is None else f"{row.width}×{row.height}",
        "steps": "" if row.steps is None else f"{row.steps:,}",
        "took": seconds(row.seconds),
        "width": 100 * min(1.0, row.seconds / longest_seconds),
        "peak": UNKNOWN if row.peak_bytes is None else format_size(row.peak_bytes),
        "outcome": row.outcome,
        "model": row.model,
        "loras": row.loras,
        "recipe": row.recipe,
        "on": None if row.hardware is None else f"{row.device}: {row.hardware}",
        "source": run.source,
        "tags": run.tags,
        "notes": run.notes,
    }
