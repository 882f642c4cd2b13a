"""Runs in progress: what the watched processes say of themselves (`history.live`), renewed once a second by server-sent events.

Without JavaScript the page loads itself again. Nothing is asked of the watched process.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from statistics import median
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sigmascope.history.live import LiveRun, live_runs
from sigmascope.ui.app import Part, page_of
from sigmascope.units import UNKNOWN, counted, format_size, local_time, percent, seconds, time_to_come

SECONDS: Final = 1.0
"""Between two looks."""
_BARS: Final = 60


def live_part(url: str) -> Part:
    """The page on runs in progress.

    Args:
        url: The store's.
    """
    pages = LivePages(url)
    return Part(
        title="Live",
        path="live",
        routes=(Route("/live", pages.index), Route("/live/events", pages.events)),
        stop=pages.stop,
    )


class LivePages:
    """The page, and the stream that renews it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = asyncio.Event()

    def stop(self) -> None:
        """End all streams."""
        self._over.set()

    async def index(self, request: Request) -> Response:
        """All runs in progress as they are now."""
        return await page_of(request, "live.html.jinja", runs=await run_in_threadpool(self._now))

    async def events(self, request: Request) -> Response:
        """An event each second that something has changed: all runs as JSON."""
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[str]:
        told = None
        silent = 0
        while not self._over.is_set():
            text = json.dumps(await run_in_threadpool(self._now))
            silent += 1
            if text != told:
                told, silent = text, 0
                yield f"data: {text}\n\n"
            elif silent >= 10:  # so that a peer that is gone is noticed
                silent = 0
                yield ": nothing new\n\n"
            try:
                await asyncio.wait_for(self._over.wait(), SECONDS)
            except TimeoutError:
                continue

    def _now(self) -> list[dict[str, Any]]:
        return [_view(live) for live in live_runs(self._url)]


def _view(live: LiveRun) -> dict[str, Any]:
    """A run in words, so that a page only shows them."""
    times = live.step_seconds[-_BARS:]
    most = max(times, default=0.0) or 1.0
    middle = median(live.step_seconds) if live.step_seconds else None
    left = max(0, (live.planned or 0) - live.steps)
    is_stepping = live.steps > 0
    return {
        "id": live.id,
        "name": live.name or "unnamed",
        "started": _moment(live.started_at),
        "took": time_to_come(live.seconds),
        "where": live.stage or "between stages",
        "generation": counted(live.generations, "generation"),
        "steps": f"{live.steps:,}" + (f" of {live.planned:,}" if live.planned else "")
        if is_stepping
        else UNKNOWN,
        "done": min(100.0, 100 * live.steps / live.planned) if live.planned else None,
        "share": percent(min(live.steps, live.planned), live.planned) if live.planned else "",
        "step": seconds(middle),
        "left": time_to_come(left * middle) if live.planned and middle is not None and is_stepping else "",
        "peak": UNKNOWN if live.peak_bytes is None else format_size(live.peak_bytes),
        "peak_of": live.peak_of,
        "process": f"process {live.process_id} on {live.host}",
        "bars": [round(100 * value / most, 1) for value in times],
    }


def _moment(text: str) -> str:
    try:
        return local_time(text)
    except ValueError:
        return text
