"""What a watch costs a process that lives long: resident memory, threads, open files and time a call, as it goes on.

    python benchmarks/long_life.py [--calls 2000] [--way watch|server|process] [--keep 100]

A pipeline of one small layer and four steps, about 0.1 ms of work, is called again and again; a line at each tenth of
the calls. `watch` is `sigmascope.watch(pipe)`, `server` the ASGI middleware with a watch of every pipeline and a
`PerformanceMonitor` in it, `process` the recording that `SIGMASCOPE=1` makes, with its files in a folder that is
removed. At the end stands what is left on disk.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import sigmascope


class Scheduler:
    """Steps without arithmetic."""

    timesteps = (3.0, 2.0, 1.0, 0.0)

    def set_timesteps(self, steps: int) -> None:
        """Have a schedule."""

    def step(self, sample: torch.Tensor) -> torch.Tensor:
        """Make a step."""
        return sample


class Pipeline:
    """One layer, called four times."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {"unet": nn.Linear(4, 4), "scheduler": Scheduler()}

    def register_modules(self) -> None:
        """What tells a pipeline from another callable."""

    @torch.no_grad()
    def __call__(self, prompt: str, generator: torch.Generator | None = None) -> torch.Tensor:
        """Make a latent."""
        unet, scheduler = self.components["unet"], self.components["scheduler"]
        scheduler.set_timesteps(4)
        sample = torch.ones(1, 4)
        for _ in scheduler.timesteps:
            sample = scheduler.step(unet(sample))
        return sample


def levels(calls: int, call: Callable[[], object]) -> list[tuple[int, float, int, int, float]]:
    """At each tenth of the calls: how many, MiB resident, threads, open files, and milliseconds a call since."""
    process, found = psutil.Process(), []
    for tenth in range(1, 11):
        made = calls // 10
        began = time.perf_counter()
        for _ in range(made):
            call()
        spent = (time.perf_counter() - began) / made
        resident = process.memory_info().rss / 2**20
        found.append((tenth * made, resident, process.num_threads(), process.num_fds(), spent * 1e3))
        print(
            "{:>7} calls {:8.1f} MiB {:3} threads {:3} files {:8.3f} ms a call".format(*found[-1]), flush=True
        )
    return found


def by_watch(calls: int, options: dict[str, Any]) -> None:
    """Under `sigmascope.watch`."""
    pipeline = Pipeline()
    with sigmascope.watch(pipeline, **options) as run:
        levels(calls, lambda: pipeline("a fox", generator=torch.Generator().manual_seed(1)))
    print(len(run.stages), "stages in full")


def by_server(calls: int, options: dict[str, Any]) -> None:
    """Behind the ASGI middleware."""
    from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware

    pipeline, monitor = Pipeline(), sigmascope.PerformanceMonitor(sample_hz=None)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with monitor.monitor_generation("tiny", num_steps=4):
            await asyncio.to_thread(pipeline, "a fox")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def nothing(*_: Any) -> Any:
        return {"type": "http.request"}

    served = PerformanceMonitoringMiddleware(app)
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    loop = asyncio.new_event_loop()
    with sigmascope.watch(pipeline, **options):
        levels(calls, lambda: loop.run_until_complete(served(dict(scope), nothing, nothing)))
    loop.close()


def by_process(calls: int, options: dict[str, Any]) -> None:
    """Under the recording of a whole process."""
    from sigmascope.integrations.autostart import say
    from sigmascope.integrations.process_recording import Recording
    from sigmascope.integrations.watch_settings import Settings

    pipeline = Pipeline()
    told = {name: str(value) for name, value in options.items()}
    with tempfile.TemporaryDirectory() as folder:
        recording = Recording(Settings(output="run.json", quiet="1", **told), folder, say)
        recording._watch._sessions[-1].watch_class(Pipeline)  # it is none of diffusers'
        levels(calls, lambda: pipeline("a fox"))
        recording.end()
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            print(f"{path.relative_to(folder)}: {path.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    """Measure one way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--way", choices=("watch", "server", "process"), default="watch")
    parser.add_argument("--keep", type=int, help="generations that are kept in full")
    given = parser.parse_args()
    options = {} if given.keep is None else {"keep_generations": given.keep}
    {"watch": by_watch, "server": by_server, "process": by_process}[given.way](given.calls, options)


if __name__ == "__main__":
    main()
