"""Functions of every kind stay of their kind under the decorator, and have a run for each call."""

import asyncio
import inspect
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tests.integrations.diffusers.marks import left_behind

import sigmascope
from sigmascope.integrations.diffusers.watch import Watch
from sigmascope.records.run import Run


@pytest.fixture
def runs() -> list[Run]:
    return []


@pytest.fixture
def watched(runs: list[Run]) -> Watch:
    return sigmascope.watch(sample_hz=None, on_run=runs.append)


def names(run: Run) -> list[str]:
    return [stage.name for stage in run.stages]


def test_a_generator_has_a_run_that_ends_with_it(watched: Watch, runs: list[Run]) -> None:
    @watched
    def frames() -> Any:
        told = []
        for number in range(2):
            with sigmascope.stage(f"frame {number}"):
                pass
            told.append((yield number))
        return " ".join(told)

    generator = frames()
    assert (next(generator), generator.send("a"), len(runs)) == (0, 1, 0)
    with pytest.raises(StopIteration) as end:
        generator.send("b")
    assert end.value.value == "a b"
    assert [names(run) for run in runs] == [["frame 0", "frame 1"]]
    assert runs[0].complete
    assert left_behind() == []


def test_a_generator_is_told_what_is_thrown_and_that_it_is_closed(watched: Watch, runs: list[Run]) -> None:
    @watched
    def frames() -> Any:
        try:
            yield "first"
        except KeyError:
            yield "handled"
        yield "last"

    generator = frames()
    assert (next(generator), generator.throw(KeyError("x"))) == ("first", "handled")
    generator.close()
    assert len(runs) == 1
    assert left_behind() == []


def test_an_asynchronous_generator_has_a_run_and_stays_one(watched: Watch, runs: list[Run]) -> None:
    closed = []

    @watched
    async def frames(count: int) -> AsyncGenerator[str, str]:
        told = ""
        try:
            for number in range(count):
                with sigmascope.stage(f"frame {number}"):
                    await asyncio.sleep(0)
                try:
                    told = yield f"{number}{told}"
                except KeyError:
                    told = " handled"
        finally:
            closed.append(count)

    async def use() -> None:
        assert [one async for one in frames(2)] == ["0", "1None"]
        generator = frames(9)
        given = [await anext(generator), await generator.asend("a"), await generator.athrow(KeyError("x"))]
        assert given == ["0", "1a", "2 handled"]
        await generator.aclose()

    assert inspect.isasyncgenfunction(frames)
    asyncio.run(use())
    assert closed == [2, 9]
    assert [names(run) for run in runs] == [["frame 0", "frame 1"], ["frame 0", "frame 1", "frame 2"]]
    assert left_behind() == []


def test_what_an_asynchronous_generator_raises_passes(watched: Watch, runs: list[Run]) -> None:
    @watched
    async def frames() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("theirs")

    async def use() -> list[int]:
        return [one async for one in frames()]

    with pytest.raises(ValueError, match="theirs"):
        asyncio.run(use())
    assert [run.complete for run in runs] == [False]
