"""Trainings in processes of their own: forks of the test's, which has imported everything already.

Two that train together do so over gloo. Nobody watches over them as torchrun would, so that what they do when one fails
is theirs.
"""

import faulthandler
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed

from sigmascope.lbm.training.checkpoints import find_checkpoints

SECONDS = 120


class Ended(NamedTuple):
    """How a process ended: its exit code (negative for a signal) and what it wrote on stderr."""

    code: int | None
    errors: str


def run_two(
    work: Callable[[int], object], folder: Path, environment: dict[str, str] | None = None
) -> list[Ended]:
    """Call `work` with 0 and with 1, each in a process of its own that finds the other; wait for both.

    A process that still runs after `SECONDS` is killed, and its code is None.
    """
    return run_team(work, 2, folder, environment)


def run_team(
    work: Callable[[int], object], count: int, folder: Path, environment: dict[str, str] | None = None
) -> list[Ended]:
    """As `run_two`, with `count` processes."""
    processes, files = start_team(work, count, folder, environment)
    for process in processes:
        process.join(SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return [Ended(code, file.read_text(encoding="utf-8")) for code, file in zip(codes, files, strict=True)]


def start_two(
    work: Callable[[int], object], folder: Path, environment: dict[str, str] | None = None
) -> tuple[list[ForkProcess], list[Path]]:
    """Start what `run_two` waits for: the processes, and the files of what they write."""
    return start_team(work, 2, folder, environment)


def start_team(
    work: Callable[[int], object], count: int, folder: Path, environment: dict[str, str] | None = None
) -> tuple[list[ForkProcess], list[Path]]:
    """As `start_two`, with `count` processes."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    processes, files = [], []
    for number in range(count):
        files.append(folder / f"errors-{number}.txt")
        own = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
        processes.append(start(work, files[-1], number, own))
    return processes, files


def start(
    work: Callable[[int], object], errors: Path, number: int = 0, environment: dict[str, str] | None = None
) -> ForkProcess:
    """Call `work` with a number in a process that writes all it says to `errors`."""
    process = multiprocessing.get_context("fork").Process(
        target=_run,
        args=(work, number, environment or {}, errors),
        daemon=True,  # it ends with a test that fails before it has waited for it
    )
    process.start()
    return process


def wait_for_checkpoint(folder: Path, step: int, processes: Sequence[ForkProcess]) -> None:
    """Wait until trainings that run have saved that step or a later one."""
    until = time.monotonic() + SECONDS
    while not any(int(path.name[-6:]) >= step for path in find_checkpoints(folder)):
        assert all(process.is_alive() for process in processes)
        assert time.monotonic() < until
        time.sleep(0.005)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _run(work: Callable[[int], object], number: int, environment: dict[str, str], errors: Path) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)  # the threads that the test's process has were not forked with it
    with errors.open("wb", buffering=0) as stream:
        os.dup2(stream.fileno(), sys.__stderr__.fileno() if sys.__stderr__ else 2)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # Where one hangs is told before it is killed. Not by `dump_traceback_later`: pytest has it running in the parent,
    # and its thread, for which it would wait here, was not forked.
    teller = threading.Timer(SECONDS - 10, faulthandler.dump_traceback, kwargs={"file": 2})
    teller.daemon = True
    teller.start()
    code = 1
    try:
        work(number)
        code = 0
    except SystemExit as error:  # the command line's
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - whatever ends it is told, Ctrl-C and exits too
        _tell(error)
    finally:
        with suppress(Exception):
            torch.distributed.destroy_process_group()
        os._exit(code)  # nothing of the test's own is to end twice


def _tell(error: BaseException) -> None:
    """What it is first: a test may leave room for no more."""
    for text in ("".join(traceback.format_exception_only(error)), "".join(traceback.format_exception(error))):
        os.write(2, text.encode())
