"""Times of stages and steps whose edges are on other streams."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from sigmascope.monitor import Recorder

pytestmark = pytest.mark.gpu

PRODUCTS = 20
SIDE = 4096


class Work:
    """Some tens of milliseconds of products, and how long they take alone."""

    def __init__(self, device: torch.device) -> None:
        self.matrix = torch.randn(SIDE, SIDE, device=device)
        self.run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - began

    def run(self) -> None:
        for _ in range(PRODUCTS):
            torch.mm(self.matrix, self.matrix)


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def on_a_side_stream() -> Iterator[torch.cuda.Stream]:
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


def told(seconds: float | None, wall: float, reason: str | None) -> None:
    """A time is none, with its reason, or one that the wall clock agrees with."""
    if seconds is None:
        assert reason
        return
    assert 0.0 <= seconds <= wall + 2e-3, (seconds, wall)


def test_a_stage_that_is_wholly_on_a_side_stream_has_its_time(cuda: torch.device) -> None:
    work = Work(cuda)
    recorder = Recorder(sample_hz=None)
    with on_a_side_stream():
        began = time.perf_counter()
        with recorder.stage("denoising"), recorder.step():
            work.run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    stage = recorder.run().stages[0]
    assert stage.facts["device_seconds"] == pytest.approx(wall, rel=0.2)
    assert stage.steps.gpu_seconds[0] == pytest.approx(wall, rel=0.2)
    assert 0.5 * work.seconds < wall


@pytest.mark.parametrize("waits", [True, False], ids=["stream waits", "streams side by side"])
def test_edges_on_two_streams_give_no_time_that_cannot_be(waits: bool, cuda: torch.device) -> None:
    """The stage begins on the host's stream, which is busy, and ends on another one, or the other way round."""
    work = Work(cuda)
    for begins_at_the_side in (False, True):
        recorder = Recorder(sample_hz=None)
        side = new_stream()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work.run()  # what the current stream has ahead of it
        first, second = (
            (side, torch.cuda.current_stream()) if begins_at_the_side else (torch.cuda.current_stream(), side)
        )
        stage, step = recorder.stage("denoising"), recorder.step()
        with torch.cuda.stream(first):
            stage.__enter__()
            step.__enter__()
            work.run()
        if waits:
            second.wait_stream(first)
        with torch.cuda.stream(second):
            work.run()
            step.__exit__(None, None, None)
            stage.__exit__(None, None, None)
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
        found = recorder.run().stages[0]
        told(found.steps.gpu_seconds[0], wall, found.steps.unavailable.get("gpu_seconds"))
        told(found.facts.get("device_seconds"), wall, found.unavailable.get("device_seconds"))
        if waits and found.steps.gpu_seconds[0] is not None:  # two runs of the work, one after the other
            assert found.steps.gpu_seconds[0] >= 1.5 * work.seconds * 0.8
