"""One of two processes fails or is gone: the other ends by itself, soon, and says why."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest
from tests.lbm.training.small_run import SmallRun
from tests.lbm.training.two_processes import run_two

from sigmascope.lbm.training.checkpoints import find_checkpoints
from sigmascope.lbm.training.metrics import Listeners, StepLog
from sigmascope.lbm.training.train import train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked, over gloo")

SOON = 30.0
"""Seconds on a busy machine; the time-out of a process group is half an hour."""


def out_of_disk(step: int) -> Callable[[StepLog], None]:
    """From that step on the system refuses files of more than 4 kB, as `ulimit -f` does."""

    def on_log(log: StepLog) -> None:
        if log.step == step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # EFBIG in place of the end of the process
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    return on_log


@pytest.mark.slow
def test_a_full_disk_of_the_main_process_ends_both_and_keeps_the_last_checkpoint(small_run: SmallRun) -> None:
    settings = small_run.settings(max_steps=50, save_interval=2, device="cpu")

    def work(number: int) -> None:
        train(settings, listeners=Listeners(on_log=out_of_disk(3)))

    before = time.monotonic()
    main, other = run_two(work, small_run.folder)
    assert time.monotonic() - before < SOON
    assert main.code == 1
    assert "WriteError" in main.errors
    assert "checkpoint-000003: the checkpoint cannot be written" in main.errors
    assert other.code == 1
    assert "OtherProcessError: process 0 of 2 failed:" in other.errors
    assert "checkpoint-000003: the checkpoint cannot be written" in other.errors
    assert [path.name for path in find_checkpoints(small_run.out)] == ["checkpoint-000002"]
    resumed = train(small_run.settings(max_steps=3, batch_size=4))
    assert (resumed.resumed_from, resumed.step) == (2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_is_killed_ends_the_other(small_run: SmallRun, killed: int) -> None:
    settings = small_run.settings(max_steps=5000, save_interval=2)

    def work(number: int) -> None:
        if number == killed:
            kill_after(small_run)
        train(settings)

    before = time.monotonic()
    ended = run_two(work, small_run.folder)
    assert time.monotonic() - before < SOON
    assert ended[killed].code == -signal.SIGKILL
    survivor = ended[1 - killed]
    assert survivor.code == 1
    first = survivor.errors.splitlines()[0]
    assert "OtherProcessError: another of the 2 processes of this training has ended (" in first
    assert ".cc" not in first
    assert find_checkpoints(small_run.out)


def kill_after(run: SmallRun) -> None:
    """End this process from a thread of its own once there is a checkpoint."""

    def watch() -> None:
        while not find_checkpoints(run.out):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def test_a_base_that_one_process_does_not_have_ends_both(small_run: SmallRun) -> None:
    missing = small_run.settings(base_model_path=str(small_run.folder / "nothing.safetensors"), max_steps=2)
    there = small_run.settings(max_steps=2)
    main, other = run_two(lambda number: train(missing if number else there), small_run.folder)
    assert "OtherProcessError: process 1 of 2 failed:" in main.errors
    assert "nothing.safetensors" in main.errors
    assert "CheckpointError" in other.errors
    assert (main.code, other.code) == (1, 1)
