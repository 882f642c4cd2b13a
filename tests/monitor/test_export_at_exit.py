"""A whole process that exports: what is left is sent as it ends, and a receiver that does not answer keeps it no longer than said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.reports.metrics.receivers import Received, attributes, grpc_receiver, http_receiver

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import sigmascope
monitor = sigmascope.PerformanceMonitor(sample_hz=None)
for _ in range(3):
    with monitor.monitor_generation("pocket"), sigmascope.stage("denoising"), sigmascope.step():
        pass
print("done", flush=True)
sys.exit(7)
"""
FORKS = """
import multiprocessing, sigmascope
monitor = sigmascope.PerformanceMonitor(sample_hz=None)
def work():
    with monitor.monitor_generation("pocket"):
        pass
work()
children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(2)]
[child.start() for child in children]
[child.join() for child in children]
raise SystemExit(7)
"""


def run(program: str, endpoint: str, protocol: str, folder: Path) -> float:
    """How long the process took after its work was done."""
    environment = {
        **os.environ,
        "SIGMASCOPE_OTLP": "1",
        "SIGMASCOPE_TEXTFILE": str(folder / "runs.prom"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 7, said
        assert "Traceback" not in said
        return time.monotonic() - began


def generations(got: Received) -> int:
    return sum(point.as_int for _, point in got.points("sigmascope.generations"))


def test_what_is_left_is_sent_as_the_process_ends_by_http(tmp_path: Path) -> None:
    with http_receiver() as (endpoint, got):
        run(PROGRAM, endpoint, "http/protobuf", tmp_path)
    assert sum(span.name == "generate_content pocket" for span in got.spans) == 3
    assert generations(got) == 3
    text = (tmp_path / "runs.prom").read_text()
    assert 'sigmascope_step_seconds_count{pipeline="pocket"} 3.0' in text


def test_what_is_left_is_sent_as_the_process_ends_by_grpc(tmp_path: Path) -> None:
    with grpc_receiver() as (endpoint, got):
        run(PROGRAM, endpoint, "grpc", tmp_path)
    assert generations(got) == 3
    assert {attributes(span).get("sigmascope.outcome") for span in got.spans if not span.parent_span_id} == {
        "ok"
    }


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_receiver_that_does_not_answer_keeps_a_process_five_seconds(protocol: str, tmp_path: Path) -> None:
    receiver = http_receiver if protocol == "http/protobuf" else grpc_receiver
    with receiver(delay=30.0) as (endpoint, _):
        took = run(PROGRAM, endpoint, protocol, tmp_path)
    assert took < 15  # five, and Python's own end on a busy machine


@pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "SIGKILL"), reason="no fork here")
def test_children_that_are_forked_send_their_own_runs_as_instances_of_their_own(tmp_path: Path) -> None:
    with http_receiver() as (endpoint, got):
        run(FORKS, endpoint, "http/protobuf", tmp_path)
    assert sum(span.name == "generate_content pocket" for span in got.spans) == 3
    assert len({resource["service.instance.id"] for resource in got.resources}) == 3
