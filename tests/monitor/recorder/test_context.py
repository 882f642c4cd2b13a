import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator

import torch

from sigmascope.monitor import Recorder, current_recorder, stage, step
from sigmascope.records.run import Stage


def tree(stages: tuple[Stage, ...]) -> dict[str, object]:
    return {found.name: tree(found.children) for found in stages}


def test_without_a_recorder_stages_and_steps_do_nothing() -> None:
    assert current_recorder() is None
    with stage("denoising") as watched, step():
        watched.fact("seed", 1)
        watched.tensor("latent", torch.zeros(1))
        watched.module("vae", torch.nn.Identity())
    assert current_recorder() is None


def test_the_recorder_whose_block_this_is_is_current(recorder: Recorder) -> None:
    with recorder:
        assert current_recorder() is recorder
        with Recorder(sample_hz=None) as inner:
            assert current_recorder() is inner
        assert current_recorder() is recorder
    assert current_recorder() is None


def test_a_stage_makes_its_recorder_current(recorder: Recorder) -> None:
    with recorder.stage("outer"), stage("inner"):
        assert current_recorder() is recorder
    assert tree(recorder.run().stages) == {"outer": {"inner": {}}}


def test_library_code_records_on_the_current_recorder(recorder: Recorder) -> None:
    with recorder, stage("denoising") as watched, step():
        watched.fact("seed", 7)
    [denoising] = recorder.run().stages
    assert (denoising.name, len(denoising.steps), denoising.facts["seed"]) == ("denoising", 1, 7)


def test_two_recorders_keep_their_own_stages_apart() -> None:
    first, second = Recorder(sample_hz=None), Recorder(sample_hz=None)
    with first.stage("a"), second.stage("b"), first.stage("c"), second.step():
        pass
    assert tree(first.run().stages) == {"a": {"c": {}}}
    assert tree(second.run().stages) == {"b": {}}
    assert len(second.run().stages[0].steps) == 1


def test_threads_have_stages_of_their_own(recorder: Recorder) -> None:
    both_open = threading.Barrier(2)

    def work(name: str) -> None:
        with recorder.stage(name):
            both_open.wait(30)
            with recorder.stage(f"inside {name}"), recorder.step():
                both_open.wait(30)

    with recorder.stage("main"):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert tree(recorder.run().stages) == {
        "main": {},
        "left": {"inside left": {}},
        "right": {"inside right": {}},
    }


def test_a_thread_in_a_copied_context_nests_in_the_stage_it_was_copied_in(recorder: Recorder) -> None:
    def work() -> None:
        with stage("in thread"):
            pass

    with recorder.stage("main"):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,))
        thread.start()
        thread.join(60)
    assert tree(recorder.run().stages) == {"main": {"in thread": {}}}


def test_tasks_nest_in_the_stage_that_created_them_and_apart_from_each_other(recorder: Recorder) -> None:
    async def generate(name: str) -> None:
        with stage(name):
            await asyncio.sleep(0)
            with stage(f"inside {name}"), step():
                await asyncio.sleep(0)

    async def serve() -> None:
        with recorder.stage("request"):
            await asyncio.gather(generate("left"), generate("right"))

    asyncio.run(serve())
    stages = recorder.run().stages
    assert tree(stages) == {"request": {"left": {"inside left": {}}, "right": {"inside right": {}}}}
    assert [len(found.steps) for found in stages[0].walk()] == [0, 0, 1, 0, 1]


def test_a_task_that_outlives_its_stage_goes_on_outside_it(recorder: Recorder) -> None:
    async def late(may_go: asyncio.Event) -> None:
        await may_go.wait()
        with recorder.stage("late"):
            pass

    async def serve() -> None:
        may_go = asyncio.Event()
        with recorder.stage("request"):
            task = asyncio.create_task(late(may_go))
            await asyncio.sleep(0)
        may_go.set()
        await task

    asyncio.run(serve())
    assert tree(recorder.run().stages) == {"request": {}, "late": {}}


def test_stages_may_close_in_any_order(recorder: Recorder) -> None:
    first, second = recorder.stage("first"), recorder.stage("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with recorder.stage("third"):
        pass
    second.__exit__(None, None, None)
    with recorder.stage("fourth"):
        pass
    assert tree(recorder.run().stages) == {"first": {"second": {"third": {}}}, "fourth": {}}
    assert current_recorder() is None


def test_a_stage_may_close_in_another_context_than_it_was_opened_in(recorder: Recorder) -> None:
    async def images() -> AsyncIterator[int]:
        with recorder.stage("streaming"):
            yield 1

    generator = images()
    contextvars.copy_context().run(lambda: asyncio.run(anext(generator)))  # type: ignore[arg-type]
    asyncio.run(generator.aclose())  # type: ignore[attr-defined]
    [streaming] = recorder.run().stages
    assert "end" not in streaming.unavailable
    assert current_recorder() is None
