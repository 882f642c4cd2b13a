"""Ctrl-C in the middle of `Thread.start`, when the thread runs and nobody has learnt of it."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.own_threads import own_threads

from sigmascope import threads
from sigmascope.integrations.process_recording import PeriodicSaver
from sigmascope.monitor import Recorder
from sigmascope.monitor.live_line import LiveLine
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.threads import importing, unforked, was_forked_amid


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


@pytest.mark.parametrize("begins", [samples, shows, saves])
def test_ctrl_c_while_a_thread_starts_leaves_none(tmp_path: Path, begins: Callable[[Path], None]) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    earlier = own_threads()
    with patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        begins(tmp_path)
    deadline = time.monotonic() + 5
    while own_threads() - earlier and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own_threads() - earlier == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_imports_of_our_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that another thread was importing would stay half imported in the child."""
    monkeypatch.setattr(threads, "_MOST_FORK_SECONDS", 0.01)
    is_within, imported = threading.Event(), list[str]()

    def work() -> None:
        with unforked(), importing():
            is_within.set()
            time.sleep(0.2)
            imported.append("all of it")

    thread = threading.Thread(target=work)
    thread.start()
    is_within.wait(10)
    process = os.fork()
    if process == 0:
        with unforked():  # the child's lock is free
            os._exit(0 if imported and not was_forked_amid() else 1)
    assert os.waitpid(process, 0)[1] == 0
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("block", [unforked, importing])
def test_a_fork_does_not_wait_for_a_database_or_an_import_that_hangs(
    block: Callable[[], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_MOST_FORK_SECONDS", 0.01)
    monkeypatch.setattr(threads, "_MOST_IMPORT_SECONDS", 0.02)
    is_within, is_over = threading.Event(), threading.Event()

    def work() -> None:
        with unforked(), block():
            is_within.set()
            is_over.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    is_within.wait(10)
    process = os.fork()
    if process == 0:
        os._exit(0 if was_forked_amid() else 1)
    assert os.waitpid(process, 0)[1] == 0
    assert thread.is_alive()
    is_over.set()
    thread.join()
