"""Metrics for Prometheus, read by prometheus-client's own parser."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.parser import text_string_to_metric_families
from tests.reports.metrics.runs import GIB, generation, hostile

from sigmascope.errors import ConfigError
from sigmascope.records.performance import RequestRecord
from sigmascope.reports.prometheus import Metrics, _AllProcesses, to_prometheus

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: str) -> dict[Sample, float]:
    return {
        (sample.name.removeprefix("sigmascope_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(read: dict[Sample, float], name: str, **labels: str) -> float | None:
    return read.get((name, tuple(sorted(labels.items()))))


def test_stages_steps_peaks_and_outcomes_are_there_in_seconds_and_bytes() -> None:
    read = samples(
        to_prometheus([generation(), generation(success=False, error="MemoryError: out of memory")])
    )
    of = {"pipeline": "FluxPipeline"}
    assert value(read, "stage_seconds_sum", **of, stage="denoising") == 3.5
    assert value(read, "stage_seconds_count", **of, stage="generation") == 2
    assert value(read, "stage_seconds_sum", **of, stage="generation") == 6.0
    assert value(read, "step_seconds_count", **of) == 6
    assert value(read, "step_seconds_bucket", **of, le="0.5") == 4
    assert value(read, "peak_memory_bytes", **of, device="cuda:0") == 5 * GIB
    assert value(read, "peak_memory_bytes", **of, device="process") == 2 * GIB
    assert value(read, "device_memory_bytes", device="cuda:0") == 24 * GIB
    for outcome in ("ok", "oom"):
        assert value(read, "generations_total", **of, outcome=outcome, route="unknown") == 1


def test_the_wait_in_the_queue_has_the_template_of_the_route() -> None:
    facts = {"seconds_before": {"queue": 4.0}, "route": "/draw/{style}"}
    read = samples(to_prometheus([generation(facts=facts)]))
    of = {"pipeline": "FluxPipeline", "route": "/draw/{style}"}
    assert value(read, "queue_wait_seconds_sum", **of) == 4.0
    assert value(read, "queue_wait_seconds_bucket", **of, le="2.5") == 0
    assert value(read, "generations_total", **of, outcome="ok") == 1


def test_a_peak_is_the_highest_so_far() -> None:
    metrics = Metrics()
    high, low = generation(), generation()
    [stage] = low.stages
    assert stage.peak is not None
    lower = replace(stage.peak, rss_bytes=1)
    for run in (high, replace(low, stages=(replace(stage, peak=lower),))):
        metrics.add_run(run)
    read = samples(metrics.text().decode())
    assert value(read, "peak_memory_bytes", pipeline="FluxPipeline", device="process") == 2 * GIB


def test_verdicts_on_loras_are_counted() -> None:
    read = samples(to_prometheus([generation(facts={"lora_application": {"effective": False}})]))
    assert value(read, "lora_verdicts_total", pipeline="FluxPipeline", verdict="no_effect") == 1


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_names_that_clients_invent_make_a_bounded_number_of_series_and_are_counted(count: int) -> None:
    metrics = Metrics()
    for number in range(count):
        metrics.add_run(hostile(number))
        if number == 300:
            after_300 = len(samples(metrics.text().decode()))
    text = metrics.text().decode()
    read = samples(text)
    assert len(read) == after_300  # hundreds more of invented names are no series more
    assert "fox" not in text
    assert "/home" not in text
    assert "id-" not in text
    assert value(read, "dropped_total", what="pipeline") == count - 50
    assert value(read, "dropped_total", what="stage") == 3 * count - 100
    stages = {dict(labels)["stage"] for name, labels in read if name == "stage_seconds_count"}
    assert "denoising" in stages  # a known name has its place, however late it comes
    assert len(stages) == 100 + len({"denoising", "generation", "other"})


def request(**kwargs: Any) -> RequestRecord:
    return replace(
        RequestRecord("id", "POST", "/draw/a red fox", "2026-03-01T10:00:00+00:00", 0.5, 0.1, 200, 1, 2, 1),
        **kwargs,
    )


def test_a_request_is_told_by_its_template() -> None:
    metrics = Metrics()
    metrics.add_request(request(route="/draw/{prompt}"))
    metrics.add_request(request())
    text = metrics.text().decode()
    read = samples(text)
    assert value(read, "requests_total", method="POST", status="200", route="/draw/{prompt}") == 1
    assert value(read, "requests_total", method="POST", status="200", route="unknown") == 1
    assert value(read, "request_seconds_sum", route="/draw/{prompt}") == 0.5
    assert "fox" not in text


def test_what_was_dropped_is_counted_once() -> None:
    metrics = Metrics()
    for dropped in (3, 3, 5):
        text = metrics.text(dropped={"runs": dropped}).decode()
    assert value(samples(text), "dropped_total", what="runs") == 5


def test_a_file_for_node_exporter_is_whole_and_all_may_read_it(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.add_run(generation())
    metrics.write(tmp_path / "sigmascope.prom")
    file = tmp_path / "sigmascope.prom"
    assert value(samples(file.read_text()), "step_seconds_count", pipeline="FluxPipeline") == 3
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["sigmascope.prom"]


@pytest.mark.parametrize("make", [Metrics, lambda: to_prometheus([])])
def test_a_folder_for_several_processes_that_is_missing_is_refused(
    make: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="PROMETHEUS_MULTIPROC_DIR"):
        make()


def test_names_and_units_are_as_prometheus_wants_them() -> None:
    for family in text_string_to_metric_families(to_prometheus([generation()])):
        kinds = {"histogram": ("_seconds",), "gauge": ("_bytes", "_in_flight", "_created")}
        if family.type in kinds:
            assert family.name.endswith(kinds[family.type]), family.name
        assert family.documentation or family.name.endswith("_created")


def count_into(folder: Path, file: str, name: str, count: float) -> Path:
    """As a worker does that counts into the folder of all."""
    kept = MmapedDict(str(folder / file))  # type: ignore[no-untyped-call]
    key = mmap_key(name.removesuffix("_total"), name, [], [], "Text.")
    kept.write_value(key, count, 0.0)  # type: ignore[no-untyped-call]
    kept.close()  # type: ignore[no-untyped-call]
    return folder / file


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    return tmp_path


def told(unreadable: set[str] | None = None) -> dict[Sample, float]:
    of_all = _AllProcesses(set() if unreadable is None else unreadable)
    return samples(generate_latest(of_all).decode())


def test_a_worker_that_was_killed_serves_no_requests(shared: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for process_id, count in ((os.getpid(), 2.0), (gone.pid, 3.0)):
        count_into(shared, f"gauge_livesum_{process_id}.db", "sigmascope_requests_in_flight", count)
        count_into(shared, f"gauge_max_{process_id}.db", "sigmascope_peak_memory_bytes", count)
    read = told()
    assert value(read, "requests_in_flight") == 2
    assert value(read, "peak_memory_bytes") == 3


def test_a_worker_that_was_killed_serves_no_requests_before_its_parent_asks(shared: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        count_into(shared, f"gauge_livesum_{worker.pid}.db", "sigmascope_requests_in_flight", 3.0)
        assert value(told(), "requests_in_flight") == 3
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        assert value(told(), "requests_in_flight") is None


@pytest.mark.parametrize("bad", [b"", b"\x10", b"\x00\x10\x00\x00" + b"\xff" * 60, None])
def test_a_file_that_cannot_be_read_costs_its_own_counts_alone(shared: Path, bad: bytes | None) -> None:
    count_into(shared, "counter_1.db", "sigmascope_disconnects_total", 4.0)
    file = count_into(shared, "counter_2.db", "sigmascope_disconnects_total", 7.0)
    file.write_bytes(file.read_bytes()[:40] if bad is None else bad)
    unreadable: set[str] = set()
    assert value(told(unreadable), "disconnects_total") == 4
    assert unreadable == ({str(file)} if bad != b"" else set())  # one that is empty is just being made


def test_what_the_host_counts_into_the_same_files_is_not_ours_to_serve(shared: Path) -> None:
    count_into(shared, "counter_1.db", "sigmascope_disconnects_total", 4.0)
    count_into(shared, "counter_1.db", "orders_total", 5.0)
    assert {name for name, _ in told()} == {"disconnects_total"}


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="gone, which is no folder any more"):
        told()
