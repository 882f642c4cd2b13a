"""The server around the page: a port of its own, a prompt end, and an address told once it answers.

`make_app` is the page as a Starlette application: addresses, errors, and the line of jobs that lives with it. The
model runs in one worker thread (`jobs.JobLine`), results are kept in memory (`requests.Recent`), and nothing is
written to disk.
"""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.ui.jobs import JobLine
from sigmascope.ui.lbm_model import ServedModel
from sigmascope.ui.lbm_page import ASSETS, Page
from sigmascope.ui.security import (
    Guard,
    Limits,
    Refusal,
    answer_fault,
    answer_http_error,
    answer_refusal,
    answer_sigmascope_error,
    is_loopback,
)

STOPPED_BY_USER: Final = 130
"""The exit code of a program that Ctrl-C ended."""
PATIENCE_SECONDS: Final = 3.0
"""How long the end waits for a step of the model."""
HEADER_SECONDS: Final = 20.0
"""How long a request's headers may take."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is. `host` is as the user gave it, `port` the one that was really taken."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    @property
    def is_loopback(self) -> bool:
        """Whether other machines cannot reach it."""
        return is_loopback(self.host)


def serve(
    served: ServedModel,
    listening: socket.socket,
    host: str,
    on_ready: Callable[[Address], object],
    limits: Limits | None = None,
) -> None:
    """Serve until Ctrl-C, SIGTERM, or the end of the process.

    Args:
        served: Model and LoRA.
        listening: From `bind`; closed in the end.
        host: As given to `bind`.
        on_ready: Told the address once requests are answered.
        limits: Of requests.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    lines: list[JobLine] = []
    app = make_app(served, limits, host=host, on_line=lines.append)
    address = Address(host, listening.getsockname()[1])
    config = uvicorn.Config(
        app,
        http=_Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=2,
    )
    try:
        _Server(config, lines[0], lambda: on_ready(address)).run(sockets=[listening])
    finally:
        listening.close()
        _leave(lines[0])


class _Connection(H11Protocol):
    """uvicorn's connection that closes when a request's headers do not come to their end."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_waiting()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """uvicorn's server that says when it is ready, and ends the line of jobs with the first signal.

    Waiting requests are answered then: otherwise the server would wait for them, and they for the model.
    """

    def __init__(self, config: uvicorn.Config, line: JobLine, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._line = line
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._line.stop)


def _leave(line: JobLine) -> None:
    """Give the model a moment to come to the end of its step, then leave without it.

    A step of a large model may take minutes, and Python waits for its threads. Nothing is lost: what the
    thread makes is nowhere but in memory.
    """
    ends = time.monotonic() + PATIENCE_SECONDS
    while line.busy:
        if time.monotonic() > ends:
            os._exit(STOPPED_BY_USER)
        time.sleep(0.02)


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


def bind(host: str, port: int) -> socket.socket:
    """Take the port, before a model is loaded for nothing.

    Args:
        host: Name or address of an interface of this machine.
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is taken or out of range, or the host is none of this machine.
    """
    if not 0 <= port < 65536:
        raise ConfigError(
            f"--port: expected 0 to 65535, got {port}.", hint="Use 7860, or 0 for any free one."
        )
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = addresses[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        raise _cannot_bind(host, port, error) from error


def _cannot_bind(host: str, port: int, error: Exception) -> ConfigError:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return ConfigError(
            f"--port: {port} is taken on {host}.", hint="Choose another, or 0 for any that is free."
        )
    if code == errno.EACCES:
        return ConfigError(f"--port: {port} is not yours to take.", hint="Choose one above 1023.")
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"--host: cannot bind to {host} ({reason}).", hint="Use 127.0.0.1.")
