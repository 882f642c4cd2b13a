"""Processes that are forked off in the middle of a watch."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate
from torch import Tensor, nn

import sigmascope
from sigmascope.integrations.imports import FINDER
from sigmascope.monitor import hooks
from sigmascope.records.run import Run

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.skipif(
        torch.get_num_threads() > 1,
        reason="OpenMP's threads are not forked along, and PyTorch waits for them: set OMP_NUM_THREADS=1",
    ),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def exit_code_of_child(work: Callable[[], bool]) -> int:
    """0: the work was done and gave True; below 0: the signal that ended a child that hung."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_child_of_a_watched_process_generates_the_same_and_the_parent_s_record_is_whole(
    pipeline: Any, unwatched: Tensor
) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
        code = exit_code_of_child(lambda: torch.equal(generate(pipeline, "sd15"), unwatched))
        generate(pipeline, "sd15", num_inference_steps=3)
    assert code == 0
    assert [len(stage.steps) for stage in run.walk() if stage.name == "denoising"] == [2, 3]
    assert run.complete


def test_a_child_that_is_forked_while_another_thread_puts_a_watch_on_does_not_wait_for_it(
    pipeline: Any,
) -> None:
    holds, free = threading.Event(), threading.Event()

    def hold() -> None:
        with hooks._LOCK, FINDER._lock:
            holds.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()

    def watched() -> bool:
        with sigmascope.watch() as run:
            generate(pipeline, "sd15")
        return len(run.stage("denoising").steps) == 2

    try:
        assert exit_code_of_child(watched) == 0
    finally:
        free.set()
        thread.join()


def test_a_child_that_leaves_the_block_tells_nobody_of_its_parent_s_run(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def tell(run: Run) -> None:
        with told.open("a") as file:
            file.write(f"{run.id} {os.getpid()}\n")

    child = -1
    try:
        with sigmascope.watch(nn.Linear(1, 1), on_run=tell) as run:
            child = os.fork()
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)
    assert told.read_text() == f"{run.id} {os.getpid()}\n"
