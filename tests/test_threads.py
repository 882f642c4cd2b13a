"""Ctrl-C in the middle of `Thread.start`, when the thread runs and nobody has learnt of it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from sigmascope.integrations.process_recording import PeriodicSaver
from sigmascope.monitor import Recorder
from sigmascope.monitor.live_line import LiveLine
from sigmascope.records.performance import PerformanceMetrics


class Shown:
    metrics = PerformanceMetrics()

    def live_text(self) -> str:
        return ""


def samples(_folder: Path) -> None:
    with Recorder(sample_hz=10.0).stage("denoising"):
        pass


def shows(_folder: Path) -> None:
    LiveLine().add(Shown())


def saves(folder: Path) -> None:
    PeriodicSaver(lambda: Recorder().run(), folder / "run.json").start()


def left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sigmascope")]


@pytest.mark.parametrize("begins", [samples, shows, saves])
def test_ctrl_c_while_a_thread_starts_leaves_none(tmp_path: Path, begins: Callable[[Path], None]) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        begins(tmp_path)
    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left() == []
    assert list(tmp_path.iterdir()) == []
