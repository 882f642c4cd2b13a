"""Processes that count into one folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.reports.metrics.test_prometheus import samples, value

pytestmark = pytest.mark.slow
LATE = """
import os, sys
import prometheus_client
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from sigmascope.reports.prometheus import Metrics
Metrics()
"""
COUNTS = """
import sys
from tests.reports.metrics.runs import generation
from sigmascope.monitor.publishing import PUBLISHER, counted_metrics, export_runs, publish
from sigmascope.reports.prometheus import metrics_of_process
first, second = counted_metrics(), counted_metrics()  # two middlewares of one process
with export_runs(textfile=sys.argv[1] + ".prom"):
    for _ in range(5):
        publish(generation())
    PUBLISHER.drain(10.0)
print(first.text(3).decode())
"""


def run(program: str, folder: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, **more}
    words = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def test_several_parts_of_a_process_and_several_processes_count_each_run_once(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for processes in (1, 2, 3):
        done = run(COUNTS, tmp_path / "all", PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "all"))
        assert done.returncode == 0, done.stderr
        for text in (done.stdout, (tmp_path / "all.prom").read_text()):
            read = samples(text)
            of = {"pipeline": "FluxPipeline"}
            assert value(read, "generations_total", **of, outcome="ok", route="unknown") == 5 * processes
            assert value(read, "step_seconds_count", **of) == 15 * processes
            assert value(read, "peak_memory_bytes", **of, device="cuda:0") == 5 * 2**30


def test_a_folder_that_is_named_too_late_is_refused(tmp_path: Path) -> None:
    done = run(LATE, tmp_path)
    assert done.returncode != 0
    assert "after prometheus_client was imported" in done.stderr


SERVES = """
import asyncio, os, shutil, sys
from pathlib import Path
from sigmascope.errors import ConfigError
from sigmascope.integrations.asgi import PerformanceMonitoringMiddleware
folder = Path(sys.argv[1])
(folder / f"counter_{os.getpid()}.db").write_bytes(bytes([99]) + bytes(40))
async def app(scope, receive, send): ...
try:
    PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
except ConfigError as refused:
    print(refused, refused.hint)
(folder / f"counter_{os.getpid()}.db").unlink()
watched = PerformanceMonitoringMiddleware(app, metrics_path="/metrics")
shutil.rmtree(folder)
async def send(message): print(message)
asyncio.run(watched({"type": "http", "path": "/metrics", "method": "GET"}, None, send))
"""


def test_files_that_cannot_be_used_are_refused_and_a_scrape_says_that_the_folder_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "all").mkdir()
    done = run(SERVES, tmp_path / "all", PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "all"))
    assert done.returncode == 0, done.stderr
    refused, start, body = done.stdout.splitlines()
    assert "Metrics cannot be counted in" in refused
    assert "Empty it before the server starts" in refused
    assert "503" in start
    assert "which is no folder any more" in body
