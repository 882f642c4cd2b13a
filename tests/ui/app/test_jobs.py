import asyncio
import threading
from typing import Any

import pytest
from tests.ui.lines import Gate, ended, with_line

from sigmascope.errors import NonFiniteError
from sigmascope.ui import lbm_page as jobs
from sigmascope.ui.lbm_model import Report
from sigmascope.ui.lbm_page import JobLine
from sigmascope.ui.security import Refusal


def test_jobs_run_one_after_another_in_the_order_they_came() -> None:
    async def scenario(line: JobLine) -> None:
        gate = Gate()
        await gate.occupy(line)
        jobs = [line.submit(name, gate.noting(name)) for name in "abc"]
        assert [job.position for job in jobs] == [1, 2, 3]
        gate.open.set()
        for job in jobs:
            await ended(line, job)
        assert gate.order == ["a", "b", "c"]
        assert [job.outcome for job in jobs] == [{"name": name} for name in "abc"]

    with_line(scenario)


def test_a_newer_request_takes_the_place_of_the_same_client_s_waiting_one() -> None:
    async def scenario(line: JobLine) -> None:
        gate = Gate()
        running = await gate.occupy(line)
        old = line.submit("a", gate.noting("a old"))
        other = line.submit("b", gate.noting("b"))
        new = line.submit("a", gate.noting("a new"))
        assert (old.state, new.position, other.position) == ("replaced", 1, 2)
        assert running.state == "running"
        gate.open.set()
        for job in (new, other):
            await ended(line, job)
        assert gate.order == ["a new", "b"]

    with_line(scenario)


def test_the_running_one_is_not_replaced() -> None:
    async def scenario(line: JobLine) -> None:
        gate = Gate()
        running = await gate.occupy(line)
        newer = line.submit("first", gate.noting("newer"))
        gate.open.set()
        await ended(line, newer)
        assert (running.state, newer.state) == ("done", "done")

    with_line(scenario)


def test_a_full_line_refuses_and_still_replaces() -> None:
    async def scenario(line: JobLine) -> None:
        gate = Gate()
        await gate.occupy(line)
        line.submit("a", gate.noting("a"))
        with pytest.raises(Refusal, match="1 requests are waiting") as caught:
            line.submit("b", gate.noting("b"))
        assert caught.value.status == 429
        assert line.submit("a", gate.noting("a new")).position == 1
        gate.open.set()

    with_line(scenario, limit=1)


def test_the_loop_answers_while_the_model_works_and_hears_how_far_it_is() -> None:
    async def scenario(line: JobLine) -> None:
        here, proceed = threading.get_ident(), threading.Event()
        seen: list[int] = []

        def work(report: Report) -> dict[str, Any]:
            seen.append(threading.get_ident())
            report("base", 1, 3)
            assert proceed.wait(20)
            return {}

        job = line.submit("a", work)
        while job.making is None:
            await line.wait_for_change(job, job.version, 5)
        assert (job.state, job.making, job.done, job.total) == ("running", "base", 1, 3)
        proceed.set()
        await ended(line, job)
        assert seen[0] != here

    with_line(scenario)


def test_a_failure_is_told_and_the_next_job_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(line: JobLine) -> None:
        def known(report: Report) -> dict[str, Any]:
            raise NonFiniteError("NaN in the latent.", hint="Use bf16.")

        def unknown(report: Report) -> dict[str, Any]:
            raise ZeroDivisionError("secret path")

        first, second = line.submit("a", known), line.submit("b", unknown)
        third = line.submit("c", lambda report: {})
        for job in (first, second, third):
            await ended(line, job)
        assert first.error == {"message": "NaN in the latent.", "hint": "Use bf16."}
        assert second.error is not None
        assert second.error["message"] == "The model failed (ZeroDivisionError)."
        assert third.state == "done"

    with_line(scenario)
    assert "secret path" in caplog.text  # the server's own output has it


def test_stopping_ends_the_running_job_at_its_next_step_and_answers_who_waits() -> None:
    async def scenario(line: JobLine) -> None:
        steps = []
        started, proceed = threading.Event(), threading.Event()

        def work(report: Report) -> dict[str, Any]:
            for step in range(1000):
                steps.append(step)
                started.set()
                assert proceed.wait(20)
                report("base", step, 1000)
            return {}

        job = line.submit("a", work)
        waiting = line.submit("b", lambda report: {})
        while not started.is_set():
            await asyncio.sleep(0.005)
        question = asyncio.create_task(line.wait_for_change(waiting, waiting.version, 60))
        await asyncio.sleep(0)
        line.stop()
        await question
        proceed.set()
        await ended(line, job)
        assert (job.state, steps, waiting.outcome) == ("failed", [0], None)
        with pytest.raises(Refusal, match="being stopped"):
            line.submit("c", lambda report: {})

    with_line(scenario)


def test_old_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_FINISHED_JOBS", 3)

    async def scenario(line: JobLine) -> None:
        first = line.submit("a", lambda report: {})
        await ended(line, first)
        for _ in range(3):
            await ended(line, line.submit("a", lambda report: {}))
        with pytest.raises(Refusal) as caught:
            line.get(first.id)
        assert caught.value.status == 404

    with_line(scenario)


def test_a_job_that_cannot_begin_has_failed_and_the_others_are_worked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(line: JobLine) -> None:
        def refuse() -> None:
            monkeypatch.undo()
            raise RuntimeError("planted")

        gate = Gate()
        gate.open.set()
        first, second = line.submit("a", gate.noting("a")), line.submit("b", gate.noting("b"))
        monkeypatch.setattr(line, "_number", refuse)
        for job in (first, second):
            await ended(line, job)
        assert (first.state, second.state) == ("failed", "done")

    with_line(scenario)
