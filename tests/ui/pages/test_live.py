"""Runs in progress: what a watched process says of itself, and what the page makes of it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.testclient import TestClient
from tests.reports.html.payloads import PAYLOADS
from tests.ui.pages.parsed import Parsed, faults_of

from sigmascope.history import live
from sigmascope.history.live import Announcer, LiveRun, live_runs
from sigmascope.history.location import live_folder
from sigmascope.monitor import Recorder
from sigmascope.ui.live_pages import LivePages

NOW = LiveRun(
    "abcd1234",
    "generate.py",
    "2026-03-01T12:00:00+00:00",
    90.0,
    stage="generation/denoising",
    stage_seconds=40.0,
    generations=2,
    steps=2500,
    planned=10_000,
    step_seconds=(0.01, 0.01, 0.03),
    peak_bytes=3 << 30,
    peak_of="cuda:0",
)


def written(url: str, told: LiveRun = NOW, **values: Any) -> Path:
    folder = live_folder(url)
    folder.mkdir(exist_ok=True)
    path = folder / f"{told.id[:4]}.json"
    here = {"process_id": os.getpid(), "host": socket.gethostname(), "told_at": time.time()}
    path.write_text(json.dumps({**asdict(told), **here, **values}), encoding="utf-8")
    return path


def test_a_run_in_progress_is_shown(browser: TestClient, url: str) -> None:
    written(url)
    answer = browser.get("/live")
    assert not faults_of(answer.text)
    page = Parsed(answer.text)
    assert page.cells_after("Steps", 2) == ["2,500 of 10,000", "25 %"]
    assert page.cells_after("A step", 2) == ["10.0 ms", "1 min 15 s"]  # 7,500 of 10 ms each
    assert page.cells_after("Time", 2) == ["1 min 30 s", "2 generations"]
    assert page.cells_after("Peak so far", 2) == ["3 GB", "cuda:0"]


def test_without_one_the_page_says_how_to_start(browser: TestClient) -> None:
    assert "No watched run is going on." in browser.get("/live").text


@pytest.mark.parametrize(
    "values",
    [
        {"told_at": time.time() - 3600, "host": "elsewhere"},
        {"process_id": 2**22 + 1},
        {"process_id": "x"},
        {"process_id": -1},
        {"process_id": 10**30},
        {"step_seconds": "x"},
        {"step_seconds": ["x"]},
        {"name": "x" * 70_000},
    ],
)
def test_a_file_that_tells_nothing_is_no_run(browser: TestClient, url: str, values: dict[str, Any]) -> None:
    written(url, **values)
    assert "No watched run is going on." in browser.get("/live").text


def test_the_file_of_a_process_that_is_gone_is_removed(url: str) -> None:
    path = written(url, process_id=2**22 + 1)
    assert live_runs(url) == []
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\0", '{"id": 1}'])
def test_a_damaged_file_is_no_run(browser: TestClient, url: str, text: str) -> None:
    written(url).write_text(text)
    assert browser.get("/live").status_code == 200
    assert live_runs(url) == []


def test_sixty_texts_of_strangers_stay_text(browser: TestClient, url: str) -> None:
    def page_of(text: str) -> Parsed:
        written(url, replace(NOW, id="abcd" + text, name=text, stage=text, peak_of=text, started_at=text))
        return Parsed(browser.get("/live").text)

    expected = page_of("harmless").elements
    for text in PAYLOADS:
        page = page_of(text)
        assert page.elements == expected, text
        assert any(text in shown for shown in page.texts), text


def test_events_tell_of_each_change_and_end_with_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.ui.live_pages.SECONDS", 0.001)
    pages = LivePages(url)

    async def scenario() -> list[str]:
        seen = []
        async for event in pages._stream():
            if not event.startswith("data: "):
                continue
            runs = json.loads(event.removeprefix("data: "))
            seen.append(",".join(run["steps"] for run in runs))
            if len(seen) == 1:
                path = written(url)
            elif len(seen) == 2:
                written(url, replace(NOW, steps=10_000))
            elif len(seen) == 3:
                path.unlink()
            else:
                pages.stop()
        return seen

    assert anyio.run(scenario) == ["", "2,500 of 10,000", "10,000 of 10,000", ""]


# What the watched process writes


@pytest.fixture
def announcer(store_file: Path) -> Iterator[Announcer]:
    made = Announcer()
    yield made
    made.end()


def files(store_file: Path) -> list[Path]:
    return list(store_file.with_suffix(".live").glob("*"))


def test_a_recorder_says_how_far_it_is(
    announcer: Announcer, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 3600.0)  # told here and now, by the test
    ticks = iter(range(0, 10**12, 500_000_000))
    recorder = Recorder("long", None, clock=lambda: next(ticks))
    number = announcer.add(recorder.progress)
    announcer.tell()
    assert files(store_file) == []  # nothing is open yet
    with recorder.stage("generation"):
        with recorder.stage("model_sampling") as schedule:
            schedule.fact("timesteps", list(range(300)))
        with recorder.stage("denoising"):
            for _ in range(200):
                with recorder.step():
                    pass
            announcer.tell()
            (told,) = live_runs(f"sqlite:///{store_file}")
            (file,) = files(store_file)
            assert file.stat().st_mode & 0o777 == 0o600
            assert len(file.read_bytes()) < 8000
    assert (told.id, told.name, told.stage) == (recorder.id, "long", "generation/denoising")
    assert (told.steps, told.planned, told.generations) == (200, 300, 0)
    assert told.step_seconds == recorder.run().stages[0].children[1].steps.seconds[-120:]
    announcer.remove(number)
    announcer.tell()
    assert files(store_file) == []


def test_nothing_is_written_where_no_run_is_kept(store_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGMASCOPE_KEEP", "0")
    assert live.announce(lambda: NOW) is None
    live.withdraw(None)
    assert files(store_file) == []


def test_a_look_that_fails_harms_nobody_else(
    announcer: Announcer, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 3600.0)

    def fail() -> LiveRun:
        raise ValueError("a guest")

    announcer.add(fail)
    announcer.add(lambda: NOW)
    announcer.tell()
    assert len(live_runs(f"sqlite:///{store_file}")) == 1


def test_the_end_of_the_process_removes_all_files(
    announcer: Announcer, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 3600.0)
    announcer.add(lambda: NOW)
    announcer.tell()
    assert len(files(store_file)) == 1
    announcer.end()
    announcer.tell()
    assert files(store_file) == []


def test_the_thread_ends_after_the_last_run(
    announcer: Announcer, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "SECONDS", 0.001)
    number = announcer.add(lambda: NOW)
    thread = announcer._thread
    assert thread is not None
    announcer.remove(number)
    thread.join(20)
    assert not thread.is_alive()
    assert announcer._thread is None
    announcer.add(lambda: NOW)
    assert announcer._thread is not None
