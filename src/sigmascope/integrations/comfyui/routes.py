"""The addresses under `/sigmascope/` of ComfyUI's own server, and the news of each prompt to the pages that are open.

They are ComfyUI's routes like any other, and lie behind its own check of where a request comes from. All of them only
read. Records are read off the event loop.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from sigmascope.errors import SigmascopeError
from sigmascope.integrations.comfyui.browser import Shelf, summary_of
from sigmascope.integrations.comfyui.session import Session
from sigmascope.records.run import Run

_log = logging.getLogger("sigmascope")
EVENT: Final = "sigmascope.prompt"
"""What pages are told of each prompt that is over: its summary."""
_PROMPT: Final = "/sigmascope/prompts/{name}"
_HTML_HEADERS: Final = {
    # A report is a page of its own: it shares nothing with ComfyUI's, whatever a record holds.
    "Content-Security-Policy": "sandbox allow-scripts allow-downloads",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def serve(session: Session, server: Any) -> None:
    """Add the addresses to ComfyUI's server, before it begins to answer, and tell its pages of each record.

    Args:
        session: Whose records they show.
        server: ComfyUI's `PromptServer`.
    """
    web, shelf = import_module("aiohttp.web"), Shelf(session.folder)

    def failure(error: Exception) -> Any:
        missing = isinstance(error, KeyError)
        status = HTTPStatus.NOT_FOUND if missing else HTTPStatus.INTERNAL_SERVER_ERROR
        reason = "There is no such record." if missing else str(error)
        return web.json_response({"error": reason}, status=status)

    def json_of(read: Callable[..., Any]) -> Callable[[Any], Any]:
        async def answer(request: Any) -> Any:
            try:
                return web.json_response(await asyncio.to_thread(read, **request.match_info))
            except (KeyError, SigmascopeError) as error:
                return failure(error)

        return answer

    def html_of(read: Callable[..., str]) -> Callable[[Any], Any]:
        async def answer(request: Any) -> Any:
            try:
                text = await asyncio.to_thread(read, **request.match_info)
            except (KeyError, SigmascopeError) as error:
                return failure(error)
            return web.Response(text=text, content_type="text/html", headers=_HTML_HEADERS)

        return answer

    def all_prompts() -> dict[str, Any]:
        off = [one for one in session.status()["instruments"] if one["state"] == "off"]
        return {"prompts": shelf.summaries(), "off": off, "records": session.folder is not None}

    server.routes.get("/sigmascope/prompts")(json_of(all_prompts))
    server.routes.get(_PROMPT)(json_of(shelf.view))
    server.routes.get(f"{_PROMPT}/report.html")(html_of(shelf.report))
    server.routes.get(f"{_PROMPT}/comparison.html")(html_of(shelf.comparison))

    def tell(run: Run, path: Path | None) -> None:
        if path is not None:
            server.send_sync(EVENT, summary_of(run, path.stem))

    session.listeners.append(tell)


def server_here() -> Any:
    """ComfyUI's server in this process; None: there is none yet."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
