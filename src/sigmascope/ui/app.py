"""The app: one server and one frame for all pages. Each subject is a `Part`, which has addresses and a place in the bar.

`make_app` puts parts together behind the guard of `security`. `page_of` lays a page out in the frame: templates lie in
`page/`, and what they are made of (`look.css`, `parts.html.jinja`) beside the report's. An error is a page for browsers, and JSON for
programs; both say the next step.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sigmascope.__about__ import __version__
from sigmascope.errors import SigmascopeError
from sigmascope.reports import html
from sigmascope.ui.security import Guard, Refusal, refusal_of

ASSETS: Final = Path(__file__).parent / "page"
_SHARED: Final = ("look.css", "report.js")
"""Files that the reports bring."""


def _nothing() -> None:
    """For a part that has nothing to end."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pages on one subject.

    Attributes:
        title: In the bar.
        path: Of its first page, without a slash before it.
        routes: Its addresses, that of the first page first.
        running: Entered while the server runs.
        stop: Called on the event loop with the first signal: whoever waits for something is answered then.
        is_busy: Whether a thread works that the end should wait for a moment.
        clean: Removes what lies on the disk; called where the process ends without leaving `running`.
    """

    title: str
    path: str
    routes: tuple[Route, ...]
    running: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    stop: Callable[[], None] = _nothing
    is_busy: Callable[[], bool] = lambda: False
    clean: Callable[[], None] = _nothing


def make_app(parts: Sequence[Part], *, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """The application that has these parts; the first one is shown first."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for part in parts:
                await stack.enter_async_context(part.running())
            yield

    app = Starlette(
        routes=[
            Route("/", parts[0].routes[0].endpoint),
            *(Route(f"/static/{name}", _shared(name)) for name in _SHARED),
            Mount("/static", StaticFiles(directory=ASSETS / "static")),
            *(route for part in parts for route in part.routes),
        ],
        exception_handlers=dict.fromkeys((Refusal, HTTPException, SigmascopeError, Exception), _answer_error),
        lifespan=lifespan,
    )
    app.state.parts = tuple(parts)
    app.state.templates = html.environment(("sigmascope.ui", "page"))
    app.add_middleware(
        Guard, host=host, token=token, answer=lambda request, refusal: _told(app, request, refusal)
    )
    return app


def _shared(name: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return FileResponse(html.ASSETS / name)

    return answer


async def page_of(request: Request, template: str, **values: Any) -> HTMLResponse:
    """A page in the app's frame, laid out in a thread."""
    return await run_in_threadpool(_page, request.app, request, template, values)


def _page(
    app: Starlette, request: Request, template: str, values: dict[str, Any], status: int = 200
) -> HTMLResponse:
    path = request.url.path
    frame = {
        "parts": app.state.parts,
        "here": path.split("/")[1] or app.state.parts[0].path,
        "base": "../" * (path.count("/") - 1) or "./",
        "version": __version__,
    }
    return HTMLResponse(app.state.templates.get_template(template).render(**frame, **values), status)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of every exception; it raises unforeseen ones again, for the server's own output."""
    response = _told(request.app, request, refusal_of(request, error))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _told(app: Starlette, request: Request, refusal: Refusal) -> Response:
    """A page for who asked for one, else JSON."""
    if "text/html" not in request.headers.get("accept", "") or request.url.path.startswith("/api/"):
        return refusal.response
    page = _page(app, request, "error.html.jinja", {"refusal": refusal}, refusal.status)
    page.headers.update(refusal.headers)
    return page
