"""Several watches, pipelines and threads at once."""

import asyncio
import threading
from functools import partialmethod
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.integrations.diffusers.marks import left_behind, marks
from tests.integrations.diffusers.watch.test_own_ways import Loop
from torch import Tensor

import sigmascope
from sigmascope.records.run import Run


def names(run: Any) -> list[str]:
    return [stage.name for stage in run.stages]


def in_threads(*work: Any) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_two_threads_with_a_watch_each_have_a_record_each(unwatched: Tensor) -> None:
    runs: dict[int, Run] = {}
    images: dict[int, Tensor] = {}
    # Not made in the threads, which share PyTorch's random numbers.
    pipelines = {steps: make_pipeline("sd15") for steps in (2, 5)}

    def work(steps: int) -> None:
        with sigmascope.watch(pipelines[steps]) as run:
            images[steps] = generate(pipelines[steps], "sd15", num_inference_steps=steps)
        runs[steps] = run.record()

    in_threads(lambda: work(2), lambda: work(5))
    assert {steps: len(run.stage("denoising").steps) for steps, run in runs.items()} == {2: 2, 5: 5}
    assert all(names(run) == ["generation"] for run in runs.values())
    assert torch.equal(images[2], unwatched)
    assert left_behind() == []


def test_threads_that_share_a_pipeline_do_not_hear_each_other(pipeline: Any) -> None:
    runs: list[Run] = []
    ready = threading.Barrier(2, timeout=60)

    def work() -> None:
        with sigmascope.watch(pipeline) as run:
            ready.wait()
            pipeline.encode_prompt("a fox", "cpu", 1, False)
            ready.wait()
        runs.append(run.record())

    before = marks(pipeline)
    in_threads(work, work)
    assert [names(run) for run in runs] == [["text_encoding"]] * 2
    assert marks(pipeline) == before


def test_a_thread_without_a_watch_belongs_to_the_watch_of_its_pipeline(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        in_threads(lambda: generate(pipeline, "sd15"))
        in_threads(lambda: generate(pipeline, "sd15"))
    assert names(run) == ["generation", "generation"]
    assert [len(s.steps) for s in run.walk() if s.name == "denoising"] == [2, 2]


def test_watches_of_two_pipelines_may_lie_inside_each_other(pipeline: Any) -> None:
    other = make_pipeline("flux")
    with sigmascope.watch(pipeline) as outer, sigmascope.watch(other) as inner:
        generate(pipeline, "sd15")
        generate(other, "flux")
    assert names(outer) == names(inner) == ["generation"]
    assert inner.stage("generation").facts["pipeline"]["class_name"] == "FluxPipeline"


def test_two_watches_of_one_pipeline_have_the_same_stages(pipeline: Any) -> None:
    before = marks(pipeline)
    with sigmascope.watch() as outer:
        generate(pipeline, "sd15")
        with sigmascope.watch(pipeline) as inner:
            generate(pipeline, "sd15")
    assert names(outer) == ["generation", "generation"]
    assert names(inner) == ["generation"]
    assert len(inner.stage("denoising").steps) == 2
    assert marks(pipeline) == before
    assert left_behind() == []


def test_watches_may_end_in_any_order(pipeline: Any, unwatched: Tensor) -> None:
    before = marks(pipeline)
    first, second = sigmascope.watch(pipeline), sigmascope.watch(pipeline)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    image = generate(pipeline, "sd15")
    second.__exit__(None, None, None)
    assert (names(first), names(second)) == ([], ["generation"])
    assert torch.equal(image, unwatched)
    assert marks(pipeline) == before


def test_a_pipeline_that_calls_another_has_its_generation_inside(pipeline: Any) -> None:
    inner = make_pipeline("flux")

    def refine(_pipeline: Any, step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            generate(inner, "flux")
        return tensors

    with sigmascope.watch(pipeline, inner) as run:
        generate(pipeline, "sd15", num_inference_steps=3, callback_on_step_end=refine)
    assert names(run) == ["generation"]
    found = [stage for stage in run.walk() if stage.name == "denoising"]
    assert [len(stage.steps) for stage in found] == [3, 2]
    assert [list(stage.facts["denoiser_calls"]) for stage in found] == [["unet"], ["transformer"]]


def test_tasks_have_a_record_each() -> None:
    async def work(steps: int) -> int:
        pipeline = make_pipeline("sd15")
        with sigmascope.watch(pipeline) as run:
            await asyncio.sleep(0)
            generate(pipeline, "sd15", num_inference_steps=steps)
            await asyncio.sleep(0)
        return len(run.stage("denoising").steps)

    async def both() -> list[int]:
        return list(await asyncio.gather(work(1), work(3)))

    assert asyncio.run(both()) == [1, 3]


class FewSteps(Loop):
    """A pipeline whose call is no function."""

    __call__ = partialmethod(Loop.__call__, steps=2)


def test_a_class_whose_call_is_no_function_is_left_alone_and_the_others_are_heard() -> None:
    odd, usual = FewSteps(), Loop()
    with sigmascope.watch(odd, usual) as run:
        assert torch.equal(odd(), usual(2))
    assert names(run) == ["model_sampling", "denoising", "generation"]
    assert [len(stage.steps) for stage in (run.stages[1], run.stage("generation").children[-1])] == [2, 2]
    assert run.unavailable == {
        "watch.calls of FewSteps": "TypeError: __call__ is a partialmethod, not a function"
    }
    assert isinstance(vars(FewSteps)["__call__"], partialmethod)
    assert left_behind() == []
