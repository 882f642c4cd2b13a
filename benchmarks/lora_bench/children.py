"""Work in a process of its own, so that its peak of memory is its own too."""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

import psutil

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Finished(Generic[T]):
    """What a process gave back, and the most memory that it held.

    Attributes:
        value: The job's result.
        peak_bytes: Largest resident set of the process, the interpreter and PyTorch included.
    """

    value: T
    peak_bytes: int


def in_child(job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Finished[T]:
    """Run an importable function in a fresh interpreter and wait for it; its exceptions come over."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        value, peak = pool.submit(_measured, job, args, kwargs).result()
    return Finished(value, peak)


def _measured(job: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[T, int]:
    value = job(*args, **kwargs)
    return value, peak_bytes()


def peak_bytes() -> int:
    """The largest resident set that this process has had.

    Linux's own count for this address space is preferred: `ru_maxrss` also remembers what the parent held when it
    started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        info = psutil.Process().memory_info()
        return int(getattr(info, "peak_wset", info.rss))

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
