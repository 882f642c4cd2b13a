"""Pipelines and watches inside generators, which may be left in the middle, dropped, or closed elsewhere."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor, nn

import sigmascope
from sigmascope.integrations.diffusers.pipeline_call import RUNS_LATER
from sigmascope.monitor.recorder import current_recorder


class Denoiser(nn.Module):
    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample + timestep


class Whole:
    """A pipeline of nobody's."""

    def __init__(self) -> None:
        self.unet = Denoiser()

    @property
    def components(self) -> dict[str, Any]:
        return {"unet": self.unet}

    def __call__(self, steps: int) -> Tensor:
        return list(self.each(steps))[-1]

    def each(self, steps: int) -> Iterator[Tensor]:
        sample = torch.zeros(1, 4)
        for step in range(steps):
            sample = self.unet(sample, torch.tensor(float(step)))
            yield sample


class Streaming(Whole):
    """One whose call gives its latents one by one."""

    def __call__(self, steps: int) -> Iterator[Tensor]:  # type: ignore[override]
        yield from self.each(steps)


class Asynchronous(Whole):
    async def __call__(self, steps: int) -> Tensor:  # type: ignore[override]
        return super().__call__(steps)


def steps_of(run: Any) -> list[int]:
    return [len(stage.steps) for stage in run.walk() if stage.name == "denoising"]


def test_a_call_that_gives_a_generator_says_so_and_its_steps_are_there() -> None:
    pipe = Streaming()
    with sigmascope.watch(pipe) as run:
        samples = list(pipe(3))
    assert torch.equal(samples[-1], Whole()(3))
    assert run.stage("generation").facts["runs_later"] == RUNS_LATER
    assert steps_of(run) == [3]


def test_a_call_that_gives_a_coroutine_says_so_too() -> None:
    pipe = Asynchronous()
    with sigmascope.watch(pipe) as run:
        assert torch.equal(asyncio.run(pipe(3)), Whole()(3))
    assert run.stage("generation").facts["runs_later"] == RUNS_LATER


@pytest.mark.parametrize("dropped", [True, False])
def test_a_generator_that_is_abandoned_ends_where_another_call_begins(dropped: bool) -> None:
    stream, whole = Streaming(), Whole()
    before = marks(stream.unet, whole.unet)
    with sigmascope.watch(stream, whole) as run:
        generator = stream(5)
        next(generator), next(generator)
        if dropped:
            del generator
            gc.collect()
        whole(4)
    assert steps_of(run) == [2, 4]
    assert [stage.name for stage in run.stages] == ["generation", "denoising", "generation"]
    assert run.complete
    assert marks(stream.unet, whole.unet) == before
    assert left_behind() == []


def watching(pipe: Whole) -> Iterator[Any]:
    with sigmascope.watch(pipe) as run:
        yield run
        raise AssertionError("nobody comes here")


@pytest.mark.parametrize("how", ["another thread", "the garbage collector"])
def test_a_watch_in_a_generator_that_is_closed_leaves_nothing(how: str) -> None:
    pipe = Whole()
    before = marks(pipe.unet)
    generator = watching(pipe)
    run = next(generator)
    pipe(2)
    if how == "another thread":
        thread = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
    else:
        del generator
        gc.collect()
    pipe(3)
    assert steps_of(run) == [2]
    assert not run.complete
    assert current_recorder() is None
    assert marks(pipe.unet) == before
    assert left_behind() == []


async def watching_asynchronously(pipe: Whole) -> AsyncIterator[Any]:
    with sigmascope.watch(pipe) as run:
        yield run


def test_a_watch_in_an_asynchronous_generator_may_be_closed_by_another_task() -> None:
    pipe = Whole()

    async def both() -> Any:
        generator = watching_asynchronously(pipe)
        run = await anext(generator)
        pipe(2)
        await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
        pipe(3)
        return run

    assert steps_of(asyncio.run(both())) == [2]
    assert left_behind() == []
