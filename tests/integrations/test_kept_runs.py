"""What is watched is kept: by a block, a decorator, a whole process, and a server's middleware."""

import asyncio
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.programs import plain, watched, write

import sigmascope
from sigmascope.history.keeper import finish
from sigmascope.history.store import KeptRun, open_store
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
from sigmascope.integrations.watch_settings import Settings
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.records.run import Run


def kept() -> list[tuple[KeptRun, Run]]:
    """The runs that are kept, the newest first."""
    finish()
    with open_store() as store:
        return [(run, store.record(run.number)) for run in store.runs()]


def test_a_block_is_kept_and_says_once_where(store_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with sigmascope.watch(sample_hz=None) as run, sigmascope.stage("denoising"):
        pass
    [(row, record)] = kept()
    assert row.source == "watch"
    assert record == run.record()
    assert (
        capfd.readouterr().err == f"Sigmascope: runs are kept in {store_file}; SIGMASCOPE_KEEP=0 keeps none\n"
    )


def test_a_block_without_stages_and_one_that_asks_for_it_are_not_kept(store_file: Path) -> None:
    with sigmascope.watch(sample_hz=None):
        pass
    with sigmascope.watch(sample_hz=None, keep_run=False), sigmascope.stage("denoising"):
        pass
    finish()
    assert not store_file.exists()


def test_each_call_of_a_decorated_function_is_kept_beside_what_the_listener_does(store_file: Path) -> None:
    heard: list[Run] = []

    @sigmascope.watch(sample_hz=None, on_run=heard.append)
    def work() -> None:
        with sigmascope.stage("denoising"):
            pass

    work()
    work()
    assert {record.id for _, record in kept()} == {run.id for run in heard}
    assert len(heard) == 2


@pytest.mark.parametrize("privacy", ["full", "hash", "none"])
def test_prompts_are_kept_as_the_watch_has_them(store_file: Path, privacy: Any) -> None:
    monitor = PerformanceMonitor()
    app = PerformanceMonitoringMiddleware(_generating(monitor, "a red fox"), prompts=privacy)
    asyncio.run(served(app))
    [(row, record)] = kept()
    assert row.source == "asgi"
    assert ("a red fox" in str(record)) is (privacy == "full")
    assert ("ab" * 32 in str(record)) is (privacy != "none")


def _generating(monitor: PerformanceMonitor, prompt: str) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        generation = monitor.monitor_generation("a model", num_steps=1)
        with generation, sigmascope.stage("denoising") as stage, sigmascope.step():
            stage.fact("prompts", {"prompt": {"sha256": "ab" * 32, "text": prompt}})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


async def served(app: Any) -> None:
    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None:
        pass

    await app({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)


def test_a_generation_of_no_request_or_in_another_s_record_is_not_kept_twice(store_file: Path) -> None:
    monitor = PerformanceMonitor()
    app = PerformanceMonitoringMiddleware(_generating(monitor, "x"))
    with monitor.monitor_generation("a model"):
        pass
    with sigmascope.watch(sample_hz=None) as run:
        asyncio.run(served(app))
    asyncio.run(served(PerformanceMonitoringMiddleware(_generating(monitor, "x"), keep_runs=False)))
    assert [(row.source, record.id) for row, record in kept()] == [("watch", run.record().id)]


def test_a_store_that_is_broken_leaves_the_host_as_it_was(
    store_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store_file.parent.mkdir()
    store_file.write_bytes(b"garbage" * 1000)
    with sigmascope.watch(sample_hz=None) as run, sigmascope.stage("denoising"):
        pass
    finish()
    [beside] = store_file.with_suffix(".unkept").iterdir()
    assert sigmascope.load_run(beside) == run.record()
    assert capfd.readouterr().err.count("Sigmascope: ") == 1


@pytest.mark.slow
class TestProcess:
    """Whole processes, which end while their runs are being kept."""

    WORK = "import sigmascope\nwith sigmascope.stage('denoising'):\n    pass\n"
    OWN = "import sigmascope\nwith sigmascope.watch() as run, sigmascope.stage('denoising'):\n    pass\n"

    def test_the_run_of_a_script_is_kept(self, store_file: Path, tmp_path: Path) -> None:
        write(tmp_path, "script.py", self.WORK)
        done = watched(["script.py"], tmp_path, Settings(quiet="1", launched="1", output="run.json"))
        assert done.code == 0, done.err
        [(row, record)] = kept()
        assert row.source == "process"
        assert record == sigmascope.load_run(tmp_path / "run.json")
        assert "runs are kept in" in done.told

    def test_a_script_s_own_watch_is_kept_at_its_end(self, store_file: Path, tmp_path: Path) -> None:
        write(tmp_path, "script.py", self.OWN)
        done = plain(["script.py"], tmp_path)
        assert (done.code, done.err) == (0, "")
        assert [row.source for row, _ in kept()] == ["watch"]

    @pytest.mark.parametrize(
        "end",
        ["raise ValueError", "raise SystemExit(3)", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)"],
    )
    def test_however_it_ends(self, end: str, store_file: Path, tmp_path: Path) -> None:
        write(tmp_path, "script.py", f"{self.WORK}{end}")
        watched(["script.py"], tmp_path, Settings(quiet="1", launched="1", output="run.json"))
        assert len(kept()) == 1

    def test_a_child_of_multiprocessing_keeps_what_it_watched(self, store_file: Path, tmp_path: Path) -> None:
        work = "".join(f"    {line}\n" for line in self.OWN.splitlines())
        end = "if __name__ == '__main__':\n    import multiprocessing as m\n    p = m.get_context('fork').Process(target=work)\n    p.start()\n    p.join()\n"
        write(tmp_path, "script.py", f"def work():\n{work}{end}")
        assert plain(["script.py"], tmp_path).code == 0
        assert len(kept()) == 1

    @pytest.mark.parametrize("keep", ["--no_keep", None])
    def test_it_is_not_kept_where_that_is_asked_for(
        self, keep: str | None, store_file: Path, tmp_path: Path
    ) -> None:
        write(tmp_path, "script.py", self.WORK)
        settings = Settings(quiet="1", launched="1", output="run.json", keep=keep and "0")
        more = {} if keep else {"SIGMASCOPE_KEEP": "0"}
        assert watched(["script.py"], tmp_path, settings, **more).code == 0
        assert not store_file.exists()
        assert os.listdir(tmp_path) != []  # noqa: PTH208
