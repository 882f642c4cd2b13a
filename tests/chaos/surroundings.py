"""All that a monitor could leave behind in a process, as one value to compare before and after."""

import gc
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.integrations.diffusers.marks import left_behind, marks
from torch.nn.modules import module as torch_module

from sigmascope.monitor import peaks
from sigmascope.monitor.recorder import CURRENT
from sigmascope.probes import process_rss_bytes, system_memory
from sigmascope.probes.processor import processor_moment

_PATIENCE_SECONDS = 3.0
"""A sampler's thread ends at its next look at the clock."""


def surroundings(*things: object) -> dict[str, object]:
    """What is there now, by what it is.

    Args:
        *things: Pipelines and other objects that are watched; their classes are looked at too.
    """
    gc.collect()
    process_rss_bytes()
    processor_moment()
    system_memory()  # each keeps a file open, another one in each process
    return {
        **marks(*things),
        "what the watching holds": left_behind(),
        "the current recorder": CURRENT.get(),
        "readers of accelerators": [reader.listeners for reader in peaks._readers.values()],
        "finders": [id(one) for one in sys.meta_path],
        "hooks of Python": (
            sys.excepthook,
            threading.excepthook,
            sys.gettrace(),
            sys.getprofile(),
            sys.unraisablehook,
        ),
        "hooks of torch": {
            name: list(held)
            for name, held in vars(torch_module).items()
            if name.startswith("_global_") and held
        },
        "settings of torch": (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_num_threads(),
            torch.backends.cudnn.allow_tf32,
        ),
        "handlers of signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "filters of warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": _descriptors(),
        "lock of peaks": _is_free(peaks.LOCK),
    }


def _descriptors() -> list[tuple[str, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.append((name, os.readlink(f"/proc/self/fd/{name}")))  # noqa: PTH115
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


def _is_free(lock: Any) -> bool:
    """Whether another thread could take it."""
    taken: list[bool] = []

    def take() -> None:
        if lock.acquire(timeout=1):
            lock.release()
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)


def check_as_before(before: dict[str, object], look: Callable[[], dict[str, object]]) -> None:
    """Require that the surroundings are as they were, or soon are.

    Raises:
        AssertionError: Names what differs.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        now = look()
        different = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if not different:
            return
        if time.monotonic() > deadline:
            for name in different:
                print(f"{name}: {before.get(name)} and then {now.get(name)}")  # noqa: T201
            raise AssertionError(f"left behind: {', '.join(different)}")
        time.sleep(0.01)
