"""Scenarios on a line of jobs that works."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from sigmascope.ui.lbm_model import Report
from sigmascope.ui.lbm_page import Job, JobLine, Work


def with_line(scenario: Callable[[JobLine], Awaitable[None]], limit: int = 8) -> None:
    """Run a scenario on a line that works."""

    async def run() -> None:
        line = JobLine(limit)
        working = asyncio.create_task(line.run())
        try:
            async with asyncio.timeout(20):
                await scenario(line)
        finally:
            line.stop()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    asyncio.run(run())


async def ended(line: JobLine, job: Job) -> Job:
    while job.state in ("waiting", "running"):
        await line.wait_for_change(job, job.version, 5)
        await asyncio.sleep(0)  # a line that is stopped does not let anybody wait
    return job


class Gate:
    """Work that stays in the model until it is let go; `order` says who worked when."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.order: list[str] = []

    def held(self, report: Report) -> dict[str, Any]:
        self.entered.set()
        assert self.open.wait(20)
        return {}

    def noting(self, name: str) -> Work:
        def work(report: Report) -> dict[str, Any]:
            self.order.append(name)
            return {"name": name}

        return work

    async def occupy(self, line: JobLine) -> Job:
        job = line.submit("first", self.held)
        while not self.entered.is_set():
            await asyncio.sleep(0.005)
        return job
