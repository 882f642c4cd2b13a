"""The page of `sigmascope lbm serve`: a picture in, base and LoRA result side by side, with what each took.

Each method of `Page` answers one address. Results are kept in memory (`lbm_model.Recent`); nothing is written to disk.

Requests wait in line before the one model (`JobLine`), each client with at most one. All of a job's state changes on
the event loop. The model runs in one worker thread, which tells the loop how far it is, so that the server answers
while it works.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sigmascope.__about__ import __version__
from sigmascope.errors import SigmascopeError
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.ui.app import Part, page_of
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
    Kept,
    Limits,
    Refusal,
    Room,
    as_error,
    promised_bytes,
    received,
)

_log = logging.getLogger(__name__)

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


def lbm_part(served: ServedModel, limits: Limits | None = None) -> Part:
    """The page of one model."""
    page = Page(served, limits or Limits())

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        working = asyncio.create_task(page.line.run())
        yield
        page.line.stop()
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working

    return Part(
        title="LBM",
        path="lbm",
        routes=(
            Route("/lbm", page.index),
            Route("/api/about", page.about),
            Route("/api/pictures", page.add_picture, methods=["POST"]),
            Route("/api/scenes/{number}", page.add_scene, methods=["POST"]),
            Route("/api/pictures/{picture}.png", page.picture),
            Route("/api/jobs", page.add_job, methods=["POST"]),
            Route("/api/jobs/{job}", page.job),
            Route("/api/results/{result}/picture.png", page.result_picture),
            Route("/api/results/{result}/run.json", page.result_run),
        ),
        running=running,
        stop=page.line.stop,
        is_busy=lambda: page.line.busy,
    )


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

    async def index(self, request: Request) -> Response:
        """The page itself."""
        about = await run_in_threadpool(self._about)
        return await page_of(request, "lbm.html.jinja", about=about)

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
            with self._receiving.reserved(promised_bytes(request, limit, refusal)):
                data = await received(request, limit, refusal, self.limits)
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
        wish = read_wish(await received(request, MOST_JOB_BYTES, too_long, self.limits), self.limits)
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
