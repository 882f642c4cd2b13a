import gc
import io
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from sigmascope.monitor.live_line import LiveLine
from sigmascope.monitor.performance import PerformanceMonitor

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeClock


class Stream(io.StringIO):
    """A stream that tells when it was written to, and may be a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert happened()


def live_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sigmascope-live"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.setenv("TERM", "xterm")
    return Stream(is_terminal=True)


@pytest.fixture
def file() -> Stream:
    return Stream(is_terminal=False)


def monitor_on(stream: Stream, clock: "FakeClock", plain_every_seconds: float = 1e6) -> PerformanceMonitor:
    live = LiveLine(stream, hz=200.0, plain_every_seconds=plain_every_seconds)
    return PerformanceMonitor(5.0, live=live, clock=clock, sample_hz=None, on_warning=lambda _: None)


def step(monitor: PerformanceMonitor, clock: "FakeClock", seconds: float) -> None:
    monitor.start_step_timing()
    clock.pass_seconds(seconds)
    monitor.end_step_timing()


def test_a_terminal_shows_where_the_generation_is(terminal: Stream, clock: "FakeClock") -> None:
    monitor = monitor_on(terminal, clock)
    with monitor.monitor_generation("FLUX", num_steps=4):
        step(monitor, clock, 2.0)
        shown = "\rFLUX 1/4 · 2.00 s a step · 2.00 s of 8.00 s, target 5.00 s missed"
        wait_until(lambda: shown in terminal.getvalue())


def test_time_goes_on_between_steps_and_the_projection_waits(terminal: Stream, clock: "FakeClock") -> None:
    monitor = monitor_on(terminal, clock)
    with monitor.monitor_generation("FLUX", num_steps=4):
        step(monitor, clock, 1.0)
        clock.pass_seconds(0.5)
        wait_until(lambda: "1.50 s of 4.00 s, target 5.00 s " in terminal.getvalue())


def test_each_drawing_covers_the_last_and_gives_the_cursor_back(terminal: Stream, clock: "FakeClock") -> None:
    with monitor_on(terminal, clock).monitor_generation("FLUX"):
        wait_until(lambda: terminal.getvalue().count("\r") >= 4)
    drawings = terminal.getvalue().split("\r")
    assert {len(one) for one in drawings if one.strip() and not one.endswith("\n")} == {79}


def test_one_line_stays_when_it_is_over(terminal: Stream, clock: "FakeClock") -> None:
    with monitor_on(terminal, clock).monitor_generation("FLUX"):
        clock.pass_seconds(2.5)
    last = terminal.getvalue().rpartition("\r")[2]
    assert last == "FLUX: 2.50 s, meets the target of 5.00 s (score 100.0)".ljust(79) + "\n"


def test_a_file_gets_one_line_a_generation(file: Stream, clock: "FakeClock") -> None:
    monitor = monitor_on(file, clock)
    for name in ("one", "two"):
        with monitor.monitor_generation(name):
            clock.pass_seconds(10.0)
    assert file.getvalue() == (
        "one: 10.00 s, misses the target of 5.00 s (score 50.0)\n"
        "two: 10.00 s, misses the target of 5.00 s (score 50.0)\n"
    )


def test_a_file_gets_a_line_now_and_then_of_a_long_one(file: Stream, clock: "FakeClock") -> None:
    with monitor_on(file, clock, plain_every_seconds=0.01).monitor_generation("long"):
        wait_until(lambda: file.getvalue().count("long · 0.00 s, target 5.00 s\n") >= 2)
    assert "\r" not in file.getvalue()


def test_a_dumb_terminal_is_written_to_as_a_file(
    terminal: Stream, clock: "FakeClock", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with monitor_on(terminal, clock).monitor_generation("FLUX"):
        pass
    assert "\r" not in terminal.getvalue()


def test_generations_of_many_threads_share_the_line(terminal: Stream, clock: "FakeClock") -> None:
    monitor = monitor_on(terminal, clock)
    all_in = threading.Barrier(4, timeout=20)

    def work(index: int) -> None:
        with monitor.monitor_generation(f"m{index}"):
            all_in.wait()
            wait_until(lambda: "3 running: m" in terminal.getvalue())
            all_in.wait()

    with ThreadPoolExecutor(3) as pool:
        working = [pool.submit(work, index) for index in range(3)]
        all_in.wait()
        assert len(live_threads()) == 1
        all_in.wait()
        for one in working:
            one.result()
    assert terminal.getvalue().count("meets the target") == 3
    assert live_threads() == []


def test_an_error_passes_and_is_shown(file: Stream, clock: "FakeClock") -> None:
    @monitor_on(file, clock).monitor_generation("FLUX")
    def interrupted() -> None:
        clock.pass_seconds(1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.getvalue() == "FLUX: ended after 1.00 s by KeyboardInterrupt\n"
    assert live_threads() == []


def test_a_stream_that_fails_hurts_nobody_and_is_logged_once(
    clock: "FakeClock", caplog: pytest.LogCaptureFixture
) -> None:
    closed = Stream(is_terminal=False)
    closed.close()
    monitor = monitor_on(closed, clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with monitor.monitor_generation():
                clock.pass_seconds(0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "The live line cannot be shown: ValueError: I/O operation on closed file"
    ]
    assert live_threads() == []


class BlockedStream(Stream):
    """A terminal that somebody stopped with Ctrl-S."""

    def __init__(self) -> None:
        super().__init__(is_terminal=False)
        self.may_go_on = threading.Event()

    def write(self, text: str) -> int:
        self.may_go_on.wait(20)
        return super().write(text)


def test_a_stream_that_takes_nothing_holds_the_host_up_once(
    clock: "FakeClock", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.monitor.live_line._JOIN_SECONDS", 0.05)
    blocked = BlockedStream()
    monitor = monitor_on(blocked, clock)
    for _ in range(3):
        with monitor.monitor_generation():
            pass
    assert len(live_threads()) == 1
    blocked.may_go_on.set()
    wait_until(lambda: live_threads() == [])
    assert blocked.getvalue().count("\n") == 1


def test_it_keeps_no_generation_alive(file: Stream, clock: "FakeClock") -> None:
    live = LiveLine(file, hz=200.0)
    monitor = PerformanceMonitor(live=live, clock=clock, sample_hz=None)
    with monitor.monitor_generation():
        kept = weakref.ref(live._open[0])
    monitor.reset_metrics()
    gc.collect()
    assert kept() is None


def test_it_is_off_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with PerformanceMonitor(sample_hz=None).monitor_generation():
        assert live_threads() == []
    assert capsys.readouterr() == ("", "")


def test_asked_for_it_writes_to_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with PerformanceMonitor(sample_hz=None, live=True).monitor_generation("FLUX"):
        pass
    out, err = capsys.readouterr()
    assert out == ""
    assert "FLUX: " in err
    assert live_threads() == []


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no pseudo-terminals")
def test_it_draws_on_a_real_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs, "w") as stderr:
        monitor = PerformanceMonitor(live=LiveLine(stderr, hz=100.0), sample_hz=None)
        with monitor.monitor_generation("FLUX", num_steps=2):
            for _ in range(2):
                monitor.start_step_timing()
                time.sleep(0.1)
                monitor.end_step_timing()
        os.set_blocking(ours, False)
        shown = b"".join(
            iter(lambda: terminal.read(65536) or b"", b"")
        ).decode()  # a read gives 4 KiB at most
    assert "\rFLUX 1/2 · " in shown
    assert "meets the target of 5.00 s (score 100.0)" in shown
