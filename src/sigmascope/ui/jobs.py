"""The line before the one model: requests wait their turn, and each client has at most one waiting.

All of a job's state changes on the event loop. The model runs in one worker thread, which tells the loop how
far it is, so that the server answers while it works.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sigmascope.errors import SigmascopeError
from sigmascope.ui.security import Refusal, as_error

_log = logging.getLogger(__name__)

State = Literal["waiting", "running", "done", "failed", "replaced"]
Report = Callable[[str, int, int], None]
"""(what is made: "base" or "result", steps done, steps in all); may raise `Stopped`."""
Work = Callable[[Report], dict[str, Any]]
"""Runs in the worker thread; told how to report, which may raise `Stopped`."""

REMEMBERED: Final = 256
"""Finished jobs whose outcome can still be asked for."""


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
    """Runs jobs one after another in the order they came.

    Args:
        limit: Jobs that may wait.
    """

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
            raise Refusal(404, "There is no such request any more.", "Ask again.")
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
        """Take no more jobs, stop the running one at its next step, and answer everybody who waits."""
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
        except SigmascopeError as error:
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
        for key in ended[: max(len(self._jobs) - REMEMBERED, 0)]:
            del self._jobs[key]

    def _number(self) -> None:
        for position, job in enumerate(self._waiting, start=1):
            if job.position != position:
                job.change(position=position)


class Stopped(Exception):
    """The server ends: the work stops at its next report."""
