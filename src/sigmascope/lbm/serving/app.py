"""The page as a Starlette application: addresses, errors, and the line of jobs that lives with it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from sigmascope.errors import SigmascopeError
from sigmascope.lbm.serving.endpoints import ASSETS, Page
from sigmascope.lbm.serving.guard import Guard
from sigmascope.lbm.serving.jobs import JobLine
from sigmascope.lbm.serving.limits import Limits
from sigmascope.lbm.serving.models import ServedModel
from sigmascope.lbm.serving.refusals import (
    Refusal,
    answer_fault,
    answer_http_error,
    answer_refusal,
    answer_sigmascope_error,
)


def make_app(
    served: ServedModel,
    limits: Limits | None = None,
    *,
    host: str = "127.0.0.1",
    on_line: Callable[[JobLine], object] = lambda line: None,
) -> Starlette:
    """The application that serves one model.

    Args:
        served: Model and LoRA.
        limits: Of requests; the defaults when left out.
        host: That the server binds to.
        on_line: Given the line of jobs, for who ends the server.
    """
    page = Page(served, limits or Limits())
    on_line(page.line)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(page.line.run())
        yield
        page.line.stop()
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working

    app = Starlette(
        routes=[
            Route("/", page.index),
            Mount("/static", StaticFiles(directory=ASSETS / "static")),
            Route("/api/about", page.about),
            Route("/api/pictures", page.add_picture, methods=["POST"]),
            Route("/api/scenes/{number}", page.add_scene, methods=["POST"]),
            Route("/api/pictures/{picture}.png", page.picture),
            Route("/api/jobs", page.add_job, methods=["POST"]),
            Route("/api/jobs/{job}", page.job),
            Route("/api/results/{result}/picture.png", page.result_picture),
            Route("/api/results/{result}/run.json", page.result_run),
        ],
        exception_handlers={
            Refusal: answer_refusal,
            HTTPException: answer_http_error,
            SigmascopeError: answer_sigmascope_error,
            Exception: answer_fault,
        },
        lifespan=lifespan,
    )
    app.add_middleware(Guard, host=host)
    return app
