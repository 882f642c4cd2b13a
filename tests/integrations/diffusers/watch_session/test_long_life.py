"""A watch that lives long: nothing of it grows with the calls, the threads and the things that it sees."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sigmascope
from sigmascope.errors import ConfigError
from sigmascope.integrations.diffusers.watch_session import OPEN_SESSIONS, Session
from sigmascope.monitor import hooks


class Scheduler:
    timesteps = (1.0, 0.0)

    def set_timesteps(self, steps: int) -> None:
        pass

    def step(self, sample: torch.Tensor) -> torch.Tensor:
        return sample


class Pipeline:
    """One layer, called twice; a new scheduler for each call, as servers have it that let clients choose."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {"unet": nn.Linear(2, 2), "scheduler": Scheduler()}

    def __call__(self, prompt: str = "a fox") -> torch.Tensor:
        self.components["scheduler"].set_timesteps(2)
        sample = torch.ones(1, 2)
        for _ in range(2):
            sample = self.components["scheduler"].step(self.components["unet"](sample))
        return sample


def session_now() -> Session:
    return OPEN_SESSIONS[-1]


def test_a_watch_keeps_the_last_generations_in_full_and_counts_the_others() -> None:
    pipeline = Pipeline()
    with sigmascope.watch(pipeline, sample_hz=None, keep_generations=4) as run, torch.no_grad():
        for _ in range(11):
            pipeline()
    assert [stage.name for stage in run.stages] == ["generation"] * 4
    assert run.folded.generations == 7
    steps = {path: sums.steps for path, sums in run.folded.stages.items() if sums.steps}
    assert steps == {"generation/denoising": 14}
    assert [finding.evidence for finding in run.findings if finding.id == "record.folded"] == [
        {"kept": 4, "folded_generations": 7}
    ]


@pytest.mark.slow
def test_a_watch_of_no_limit_keeps_all() -> None:
    pipeline = Pipeline()
    with sigmascope.watch(pipeline, sample_hz=None, keep_generations=None) as run, torch.no_grad():
        for _ in range(102):
            pipeline()
    assert (len(run.stages), run.folded) == (102, None)


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_generations_that_is_none_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match="keep_generations"):
        sigmascope.watch(keep_generations=number)


@pytest.fixture
def garbage_waits() -> Iterator[None]:
    """Garbage is collected when the test says so: what is alive when a watch looks is then the same each time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("garbage_waits")
def test_what_is_no_more_is_forgotten() -> None:
    pipeline = Pipeline()
    gone: list[Any] = []
    with sigmascope.watch(pipeline, sample_hz=None, keep_generations=1), torch.no_grad():
        session = session_now()
        for _ in range(300):
            # all are alive at once, so that none gets the `id` of another
            gone.append((pipeline.components["unet"], pipeline.components["scheduler"]))
            pipeline.components |= {"unet": nn.Linear(2, 2), "scheduler": Scheduler()}
            pipeline()
            if len(gone) == 60:
                gone.clear()
                gc.collect()
        known = [len(one._undo) + sum(map(len, one._heard.values())) for one in session.observers]
        steps = [stage.children[-1].steps for stage in session.record().stages]
    assert sum(known) < 300
    assert [len(one) for one in steps] == [2]
    assert hooks._METHOD_HOOKS == {}


def loop(denoiser: nn.Module) -> None:
    with torch.no_grad():
        for _ in range(3):
            denoiser(torch.ones(1, 2))


def in_a_thread(act: Any, *args: Any) -> None:
    thread = threading.Thread(target=act, args=args)
    thread.start()
    thread.join()


def test_a_denoising_that_a_thread_left_open_is_closed_when_the_thread_is_no_more() -> None:
    denoiser = nn.Linear(2, 2)
    with sigmascope.watch(denoiser, sample_hz=None, keep_generations=2) as run:
        for _ in range(9):
            in_a_thread(loop, denoiser)
        in_a_thread(loop, denoiser)
        now = session_now().record()
        assert len(session_now().stacks) <= 1
        open_now = ["end" in stage.unavailable for stage in now.stages]
    assert open_now.count(True) == 1
    assert [(stage.name, len(stage.steps), stage.success) for stage in run.stages] == [
        ("denoising", 3, True)
    ] * 2
    assert run.folded.stages["denoising"].steps == 24


GROWS = """
import psutil, torch
import sigmascope
from tests.integrations.diffusers.watch_session.test_long_life import Pipeline
pipeline = Pipeline()
def level(calls):
    for _ in range(calls):
        pipeline()
    return psutil.Process().memory_info().rss / 2**20
with sigmascope.watch(pipeline) as run, torch.no_grad():
    level(300)
    first, second = level(1700), level(2000)
print(second - first, run.folded.generations, len(run.stages))
"""


@pytest.mark.slow
def test_the_process_holds_no_more_after_4000_calls_than_after_2000() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWS], capture_output=True, text=True, check=True, timeout=300
    )
    grown, folded, full = done.stdout.split()
    assert float(grown) < 3.0  # 20 MiB where all are kept
    assert (folded, full) == ("3900", "100")
