"""The server and its page: it takes a port, tells its address once it answers, and ends promptly.

`make_app` is the page as a Starlette application: addresses, errors, and the line of jobs that lives with it. Each
method of `Page` answers one address. Results are kept in memory (`lbm_model.Recent`); nothing is written to disk.

Requests wait in line before the one model (`JobLine`), each client with at most one. All of a job's state changes on
the event loop. The model runs in one worker thread, which tells the loop how far it is, so that the server answers
while it works.
"""

import asyncio
import errno
import logging
import os
import socket
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, cast

import uvicorn
from jinja2 import Environment, PackageLoader
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sigmascope.__about__ import __version__
from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.ui.lbm_model import (
    Made,
    Picture,
    Pictures,
    Recent,
    Report,
    ServedModel,
    Translator,
    Wish,
    check_working_size,
    read_wish,
    too_many_bytes,
)
from sigmascope.ui.security import (
    LORA_SCALES,
    Guard,
    Kept,
    Limits,
    Refusal,
    Room,
    answer_error,
    as_error,
    is_loopback,
    new_token,
)

_log = logging.getLogger(__name__)

STOPPED_BY_USER: Final = 130
"""The exit code of a program that Ctrl-C ended."""
LAST_SECONDS: Final = 1.5
"""How long answers that are being sent may go on after the end; uvicorn itself waits for 2 seconds."""
STOP_WAIT_SECONDS: Final = 3.0
"""How long the end waits for a step of the model."""
HEADER_SECONDS: Final = 20.0
"""How long a request's headers may take."""
ASSETS: Final = Path(__file__).parent / "page"
SEND_BUFFER_BYTES: Final = 128 * 1024
"""What the system keeps of an answer. Left to itself it keeps megabytes, and a slow peer seems to take nothing."""
POLL_SECONDS: Final = 20.0
"""How long a question about a job waits for news."""
MOST_JOB_BYTES: Final = 8192
"""Most that the body of a job may have."""
SCENES: Final = frozenset(map(str, range(1000)))
"""The pocket model's held-out scenes, as an address names them."""
MOST_FINISHED_JOBS: Final = 256
"""Finished jobs whose outcome can still be asked for."""
State = Literal["waiting", "running", "done", "failed", "replaced"]
Work = Callable[[Report], dict[str, Any]]
"""Runs in the worker thread; told how to report, which may raise `Stopped`."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the page is.

    Attributes:
        host: As the user gave it.
        port: The one that was really taken.
        token: That every request must have; None where other machines cannot reach the page.
    """

    host: str
    port: int
    token: str | None = None

    @property
    def url(self) -> str:
        """For a browser on this machine, with the token."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        at = f"[{host}]" if ":" in host else host
        return f"http://{at}:{self.port}/" + ("" if self.token is None else f"?token={self.token}")


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
        host: As given to `bind`. If other machines reach it, requests need a token.
        on_ready: Told the address and the token once requests are answered.
        limits: How much may be asked for.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    lines: list[JobLine] = []
    limits = limits or Limits()
    token = None if is_loopback(host) else new_token()
    app = make_app(served, limits, host=host, token=token, on_line=lines.append)
    address = Address(host, listening.getsockname()[1], token)
    config = uvicorn.Config(
        app,
        http=cast("type[H11Protocol]", partial(_Connection, limits)),
        limit_concurrency=limits.connections,
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
    """uvicorn's connection that closes when a request's headers do not end, or the peer takes no more of an answer.

    uvicorn's own end of a connection waits until the peer has taken all, however long that is. Where as many are open
    as may be, a new one takes the place of the one that has asked for nothing the longest.
    """

    def __init__(self, limits: Limits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._patience: asyncio.TimerHandle | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._left_bytes, self._taken_at = 0, 0.0
        self._idle_since = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered, and nothing of an answer is left to send."""
        cycle: RequestResponseCycle | None = self.cycle
        has_asked = cycle is not None and not cycle.response_complete
        return not has_asked and self.transport.get_write_buffer_size() == 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._make_room()
        if len(self.connections) > 2 * self._limits.connections:  # those that ask are told, up to here
            transport.abort()
            return
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._wait()
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:  # a part of a request does not make it younger
            self._idle_since = self.loop.time()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._look_again is not None:
            self._look_again.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._taken_at = self.loop.time()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        # What is still being sent then, uvicorn would cancel, with a traceback for each.
        self.loop.call_later(LAST_SECONDS, self.transport.abort)

    def _make_room(self) -> None:
        """Drop idle connections while there are as many as uvicorn refuses requests at."""
        others = cast("set[_Connection]", self.connections - {self})
        idle = sorted((peer for peer in others if peer.is_idle), key=lambda peer: peer._idle_since)
        for peer in idle[: max(0, len(self.connections) - self._limits.connections + 1)]:
            peer.transport.abort()
            self.connections.discard(peer)

    def _look(self) -> None:
        left_bytes, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not left_bytes or left_bytes != self._left_bytes:
            self._left_bytes, self._taken_at = left_bytes, now
        elif now - self._taken_at >= self._limits.silent_seconds:
            self.transport.abort()
            return
        self._look_again = self.loop.call_later(self._limits.silent_seconds / 4, self._look)

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

    def __init__(self, config: uvicorn.Config, line: "JobLine", on_ready: Callable[[], object]) -> None:
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


def _leave(line: "JobLine") -> None:
    """Give the model a moment to come to the end of its step, then leave without it.

    A step of a large model may take minutes, and Python waits for its threads. Nothing is lost: what the
    thread makes is nowhere but in memory.
    """
    ends = time.monotonic() + STOP_WAIT_SECONDS
    while line.busy:
        if time.monotonic() > ends:
            os._exit(STOPPED_BY_USER)
        time.sleep(0.02)


def make_app(
    served: ServedModel,
    limits: Limits | None = None,
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    on_line: "Callable[[JobLine], object]" = lambda line: None,
) -> Starlette:
    """The application that serves one model."""
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
        exception_handlers=dict.fromkeys((Refusal, HTTPException, SigmascopeError, Exception), answer_error),
        lifespan=lifespan,
    )
    app.add_middleware(Guard, host=host, token=token)
    return app


def bind(host: str, port: int) -> socket.socket:
    """Take the port before the model is loaded, so that a port in use is an error at once.

    Args:
        host: Name or address of an interface of this machine.
        port: 0 takes any that is free.

    Raises:
        ConfigError: The port is taken or out of range, or the host is not one of this machine's.
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
        return ConfigError(f"--port: you may not use {port}.", hint="Choose one above 1023.")
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(f"--host: cannot bind to {host} ({reason}).", hint="Use 127.0.0.1.")


class Page:
    """One served model with its pictures, its results and its line of jobs."""

    def __init__(self, served: ServedModel, limits: Limits) -> None:
        self.served = served
        self.limits = limits
        self.pictures = Pictures(limits)
        self.results = Recent[Made](limits.kept_results_bytes)
        self.line = JobLine(limits.waiting)
        self._translator = Translator(served, self.results)
        self._uploads = 0
        self._receiving = Room(limits.receiving_bytes)
        self._sending = Room(limits.sending_bytes)
        self._decoding = asyncio.Semaphore(2)  # a picture of a few kilobytes may need 150 MB for a moment
        templates = Environment(loader=PackageLoader("sigmascope.ui", "page"), autoescape=True)
        self._template = templates.get_template("index.html")

    async def index(self, request: Request) -> Response:
        """The page itself."""
        return HTMLResponse(await run_in_threadpool(self._template.render, about=self._about()))

    async def about(self, request: Request) -> Response:
        """The model, the LoRA and what may be asked for."""
        return JSONResponse(self._about())

    async def add_picture(self, request: Request) -> Response:
        """Keep the picture that is the request's body."""
        if self._uploads >= self.limits.uploads:
            raise Refusal(429, f"{self._uploads} pictures are being sent already.", "Try again in a while.")
        limit, refusal = self.limits.upload_bytes, too_many_bytes(self.limits)
        self._uploads += 1  # until it is decoded: before that, what was sent is in memory
        try:
            with self._receiving.reserved(_promised_bytes(request, limit, refusal)):
                data = await self._body(request, limit, refusal)
                async with self._decoding:
                    picture = await run_in_threadpool(self.pictures.add, data)
        finally:
            self._uploads -= 1
        return _picture_answer(picture)

    async def add_scene(self, request: Request) -> Response:
        """Keep one of the rendered scenes that the pocket model knows."""
        number = str(request.path_params["number"])
        if not self.served.pocket or number not in SCENES:
            raise Refusal(404, f"There is no scene {number[:20]} here.", "Upload a picture.")
        source, _ = await run_in_threadpool(relighting_pair, int(number), COOL)
        return _picture_answer(await run_in_threadpool(self.pictures.add_image, Image.fromarray(source)))

    async def picture(self, request: Request) -> Response:
        """A kept picture as the model gets it: upright, opaque, 8-bit."""
        picture = self.pictures.get(request.path_params["picture"])
        return Kept(picture.png, self._sending, "image/png")

    async def add_job(self, request: Request) -> Response:
        """Ask for base and result."""
        too_long = Refusal(
            413, f"The request is longer than {MOST_JOB_BYTES} bytes.", "Upload the picture on its own."
        )
        wish = read_wish(await self._body(request, MOST_JOB_BYTES, too_long), self.limits)
        picture = self.pictures.get(wish.picture)
        check_working_size(
            wish,
            picture.image.size,
            resolution=self.served.resolution,
            factor=self.served.model.config.factor,
            limits=self.limits,
        )
        job = self.line.submit(wish.client, partial(self._translate, wish))
        return JSONResponse(job.as_dict(), 202)

    async def job(self, request: Request) -> Response:
        """Where a request stands; with `?after=VERSION`, once it is past that version."""
        job = self.line.get(request.path_params["job"])
        after = request.query_params.get("after", "")
        if after.isdecimal() and len(after) < 10:
            await self.line.wait_for_change(job, int(after), POLL_SECONDS)
        return JSONResponse(job.as_dict())

    async def result_picture(self, request: Request) -> Response:
        """A picture that was made."""
        return Kept(self._made(request).png, self._sending, "image/png")

    async def result_run(self, request: Request) -> Response:
        """The record of making it, as `sigmascope.load_run` reads it."""
        return Kept(self._made(request).run_json, self._sending, "application/json")

    async def _body(self, request: Request, limit: int, refusal: Refusal) -> bytes:
        """Read a body of at most `limit` bytes, whatever its headers promise and however slowly it comes."""
        _promised_bytes(request, limit, refusal)
        read, seconds = bytearray(), self.limits.silent_seconds
        try:
            async with asyncio.timeout(self.limits.body_seconds), asyncio.timeout(seconds) as silence:
                async for chunk in request.stream():
                    read += chunk
                    if len(read) > limit:
                        raise refusal
                    silence.reschedule(asyncio.get_running_loop().time() + seconds)
            return bytes(read)
        except TimeoutError:
            raise Refusal(
                408,
                f"The request did not end within {self.limits.body_seconds:g} s, "
                f"or {self.limits.silent_seconds:g} s went by without a part of it.",
                "Send it again.",
            ) from None
        except ClientDisconnect:  # nobody is there to be told
            raise Refusal(400, "The request ended before its body did.") from None

    def _translate(self, wish: Wish, report: Report) -> dict[str, Any]:
        """Run in line. The picture is looked up only now: a job that waits, or is over, holds none in memory."""
        return self._translator.translate(self.pictures.get(wish.picture), wish, report)

    def _made(self, request: Request) -> Made:
        made = self.results.get(request.path_params["result"])
        if made is None:
            raise Refusal(404, "This result is no longer kept.", "Ask for it again.")
        return made

    def _about(self) -> dict[str, object]:
        limits = self.limits
        return {
            "version": __version__,
            **self.served.facts(),
            "lora_scales": list(LORA_SCALES),
            "most_steps": limits.steps,
            "most_upload_bytes": limits.upload_bytes,
        }


def _promised_bytes(request: Request, limit: int, refusal: Refusal) -> int:
    """Most bytes that the body can have: what its headers promise, else the limit."""
    promised = request.headers.get("content-length", "")
    if not promised.isdecimal():
        return limit
    if len(promised) > 18 or int(promised) > limit:
        raise refusal
    return int(promised)


def _picture_answer(picture: Picture) -> JSONResponse:
    return JSONResponse({"id": picture.id, "width": picture.image.width, "height": picture.image.height}, 201)


@dataclass
class Job:
    """One request and where it stands. `version` grows with every change."""

    client: str
    work: Work
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: State = "waiting"
    position: int = 0
    making: str | None = None
    done: int = 0
    total: int = 0
    outcome: dict[str, Any] | None = None
    error: dict[str, str | None] | None = None
    version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def as_dict(self) -> dict[str, Any]:
        """What the client is told."""
        return {
            "id": self.id,
            "version": self.version,
            "state": self.state,
            "position": self.position,
            "making": self.making,
            "step": self.done,
            "steps": self.total,
            "outcome": self.outcome,
            "error": self.error,
        }

    def change(self, **values: Any) -> None:
        """Set values and wake whoever waits for a change."""
        for name, value in values.items():
            setattr(self, name, value)
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()


class JobLine:
    """Runs jobs one after another in the order they came."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[Job] = []
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._arrived = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.stopping = False
        self.busy = False

    def submit(self, client: str, work: Work) -> Job:
        """Put a job in line, in the place of the client's waiting one if there is one.

        Raises:
            Refusal: The line is full (429), or the server ends (503).
        """
        if self.stopping:
            raise Refusal(503, "The server is being stopped.", "Start it again.")
        job = Job(client, work)
        place = next((at for at, other in enumerate(self._waiting) if other.client == client), None)
        if place is not None:
            replaced, self._waiting[place] = self._waiting[place], job
            replaced.change(state="replaced", position=0)
        elif len(self._waiting) < self._limit:
            self._waiting.append(job)
        else:
            raise Refusal(429, f"{self._limit} requests are waiting already.", "Try again in a while.")
        self._remember(job)
        self._number()
        self._arrived.set()
        return job

    def get(self, job_id: str) -> Job:
        """The job of that id.

        Raises:
            Refusal: There is none, or it is forgotten (404).
        """
        if job_id not in self._jobs:
            raise Refusal(404, "This request no longer exists.", "Ask again.")
        return self._jobs[job_id]

    async def wait_for_change(self, job: Job, after: int, seconds: float) -> None:
        """Return once the job's version is past `after`, the time is over, or the server ends."""
        changed = job.changed
        if job.version <= after and not self.stopping:
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                pass

    async def run(self) -> None:
        """Work through the line until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting and not self.stopping:
                job = self._waiting.pop(0)
                try:
                    job.change(state="running", position=0)
                    self._number()
                    await self._work(job)
                except Exception as error:  # noqa: BLE001 - those that wait are still to be worked through
                    self._fail(job, error)

    def stop(self) -> None:
        """Refuse new jobs, stop the running one at its next step, and answer everybody who waits."""
        self.stopping = True
        for job in self._jobs.values():
            job.change()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _work(self, job: Job) -> None:
        loop = asyncio.get_running_loop()

        def tell(making: str, done: int, total: int) -> None:
            if self.stopping:
                raise Stopped
            loop.call_soon_threadsafe(lambda: job.change(making=making, done=done, total=total))

        def in_worker() -> dict[str, Any]:
            self.busy = True
            try:
                return job.work(tell)
            finally:
                self.busy = False

        try:
            outcome = await loop.run_in_executor(self._executor, in_worker)
        except (Stopped, asyncio.CancelledError) as stop:
            job.change(state="failed", error=as_error("The server was stopped.", "Start it again."))
            if isinstance(stop, asyncio.CancelledError):
                raise
        except (SigmascopeError, Refusal) as error:
            job.change(state="failed", error=as_error(error.message, error.hint))
        except Exception as error:  # noqa: BLE001 - one request must not end the server
            self._fail(job, error)
        else:
            job.change(state="done", outcome=outcome)

    def _fail(self, job: Job, error: Exception) -> None:
        _log.error("A request failed", exc_info=error)
        message = f"The model failed ({type(error).__name__})."
        job.change(state="failed", error=as_error(message, "The server's own output says more."))

    def _remember(self, job: Job) -> None:
        self._jobs[job.id] = job
        ended = [key for key, kept in self._jobs.items() if kept.state not in ("waiting", "running")]
        for key in ended[: max(len(self._jobs) - MOST_FINISHED_JOBS, 0)]:
            del self._jobs[key]

    def _number(self) -> None:
        for position, job in enumerate(self._waiting, start=1):
            if job.position != position:
                job.change(position=position)


class Stopped(Exception):
    """The server ends: the work stops at its next report."""
