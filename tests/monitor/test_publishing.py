"""Runs on their way to those who export them: nobody waits, nothing is lost without being counted, nothing fails."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.reports.metrics.receivers import until
from tests.reports.metrics.runs import generation

from sigmascope.errors import ConfigError
from sigmascope.monitor import publishing
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.publishing import (
    MOST_WAITING,
    Published,
    Publisher,
    export_runs,
    publication,
    publish,
)
from sigmascope.monitor.recorder import Recorder


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    """One of its own, in place of the process's."""
    own = Publisher()
    monkeypatch.setattr(publishing, "PUBLISHER", own)
    yield own
    own.drain(5.0)


def heard_by(publisher: Publisher) -> list[Published]:
    heard: list[Published] = []
    publisher.listen(heard.append)
    return heard


def test_a_listener_hears_of_a_run_on_another_thread_which_ends(publisher: Publisher) -> None:
    threads: list[threading.Thread] = []
    publisher.listen(lambda _: threads.append(threading.current_thread()))
    publish(generation())
    until(lambda: threads)
    assert threads[0] is not threading.current_thread()
    until(lambda: not threads[0].is_alive())
    publish(generation())  # and another one begins
    until(lambda: len(threads) == 2)


def test_where_nobody_listens_no_record_is_made(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "run_of", lambda *_: pytest.fail("a record was made"))
    recorder = Recorder()
    with recorder.stage("generation") as stage:
        pass
    publication(recorder, stage)()


def test_a_listener_that_fails_hurts_neither_host_nor_others(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Published) -> None:
        raise OSError("no space is left")

    publisher.listen(fails)
    heard = heard_by(publisher)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            publish(generation())
        until(lambda: len(heard) == 3)
        publisher.drain(5.0)
    assert publisher.failed == 3
    assert [record.message for record in caplog.records] == [
        "sigmascope: a run was not exported (OSError: no space is left)"
    ]


def test_runs_that_find_the_queue_full_are_dropped_and_counted(publisher: Publisher) -> None:
    heard, goes_on = [], threading.Event()

    def waits(published: Published) -> None:
        goes_on.wait(10)
        heard.append(published)

    publisher.listen(waits)
    run = generation()
    publish(run)
    until(lambda: not publisher._waiting)  # it is being heard
    for _ in range(MOST_WAITING + 7):
        publish(run)
    assert publisher.dropped == 7
    goes_on.set()
    until(lambda: len(heard) == MOST_WAITING + 1)


def test_a_generation_inside_another_is_handed_over_with_it(publisher: Publisher) -> None:
    heard = heard_by(publisher)
    monitor = PerformanceMonitor(sample_hz=None)
    with monitor.monitor_generation("outer"), monitor.monitor_generation("inner"):
        pass
    publisher.drain(5.0)
    until(lambda: heard)
    assert [[stage.name for stage in published.run.walk()] for published in heard] == [
        ["generation", "generation"]
    ]


def test_a_listener_that_leaves_hears_no_more(publisher: Publisher) -> None:
    heard: list[Published] = []
    leave = publisher.listen(heard.append)
    leave()
    publish(generation())
    publisher.drain(5.0)
    assert not heard


def test_at_the_end_all_is_heard_and_each_listener_ends_in_bounded_time(publisher: Publisher) -> None:
    heard: list[Published] = []
    ends: list[float] = []
    publisher.listen(heard.append, end=ends.append)
    publish(generation())
    publisher.finish(2.0)
    assert len(heard) == 1
    assert 0 < ends[0] <= 2.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_in_the_middle_hands_on_its_own_runs_alone(publisher: Publisher) -> None:
    heard = heard_by(publisher)
    publisher._counting.acquire()  # a thread is handing on just now, and will never do so in the child
    publish(generation())
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        publisher.begin_anew()
        publish(generation())
        publisher.drain(5.0)
        os.write(writing, b"%d" % len(heard))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 9) == b"1"
    publisher._counting.release()


def test_a_textfile_is_written_when_nothing_waits_any_more(publisher: Publisher, tmp_path: Path) -> None:
    with export_runs(textfile=tmp_path / "runs.prom") as export:
        for _ in range(3):
            publish(generation())
        publisher.drain(5.0)
        assert (
            'sigmascope_step_seconds_count{pipeline="FluxPipeline"} 9.0'
            in (tmp_path / "runs.prom").read_text()
        )
        assert export.dropped()["runs"] == 0
    publish(generation())
    publisher.drain(5.0)
    assert "9.0" in (tmp_path / "runs.prom").read_text()


def test_another_ending_than_node_exporter_reads_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.prom"):
        export_runs(textfile=tmp_path / "runs.txt")


def test_the_environment_lets_a_file_listen(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGMASCOPE_TEXTFILE", str(tmp_path / "runs.prom"))
    with PerformanceMonitor(sample_hz=None).monitor_generation("pocket"):
        pass
    publisher.drain(5.0)
    until((tmp_path / "runs.prom").exists)
    text = (tmp_path / "runs.prom").read_text()
    assert 'sigmascope_generations_total{outcome="ok",pipeline="pocket",route="unknown"} 1.0' in text


def test_an_environment_that_cannot_be_followed_is_told_once_and_hurts_nobody(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SIGMASCOPE_TEXTFILE", "runs.txt")
    monitor = PerformanceMonitor(sample_hz=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with monitor.monitor_generation("pocket"):
                pass
        until(lambda: publisher._has_looked)
    assert ["runs are not exported" in record.message for record in caplog.records] == [True]
