"""What a probe costs: each way of reading the resident set, and the facts of a tensor.

    python benchmarks/probe_costs.py

Prints the median of several rounds in microseconds of processor time a call (so that other work on the
machine hardly counts), and how many times dearer each is than the cheapest way of its group.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from sigmascope.probes import memory_snapshot, process_rss_bytes, tensor_facts
from sigmascope.probes.accelerators import NullAccelerator

_ROUNDS = 5
_ROUND_SECONDS = 0.05
_SHAPES = ((1, 4, 64, 64), (1, 77, 2048), (1, 3, 1024, 1024))


def main() -> None:
    """Print the table of each group."""
    torch.set_num_threads(1)
    compare("resident set of this process", rss_readers())
    null = NullAccelerator()
    compare("memory of the machine", {"memory_snapshot": lambda: memory_snapshot(null)})
    for shape in _SHAPES:
        compare(f"facts of a float32 tensor {shape}", tensor_readers(torch.randn(shape)))


def rss_readers() -> dict[str, Callable[[], object]]:
    """Ways to read the resident set."""
    process = psutil.Process()
    readers: dict[str, Callable[[], object]] = {"process_rss_bytes (ours)": process_rss_bytes}
    if sys.platform.startswith("linux"):
        descriptor = os.open("/proc/self/statm", os.O_RDONLY)
        readers["pread on a kept descriptor"] = lambda: int(os.pread(descriptor, 128, 0).split()[1]) * 4096
        readers["open and read each time"] = read_statm
    readers["psutil memory_info on a kept Process"] = lambda: process.memory_info().rss
    readers["psutil memory_info on a new Process"] = lambda: psutil.Process().memory_info().rss
    return readers


def read_statm() -> int:
    """Open `/proc/self/statm`, read and parse it."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * 4096


def tensor_readers(tensor: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to learn of a tensor."""
    return {
        "tensor_facts without statistics": lambda: tensor_facts(tensor, statistics=False),
        "tensor_facts": lambda: tensor_facts(tensor),
        "aminmax, mean, std in float32": lambda: float32_statistics(tensor),
        "isfinite().all() alone": lambda: bool(tensor.isfinite().all()),
    }


def float32_statistics(tensor: torch.Tensor) -> list[float]:
    """The plain way, without float64 and without counting NaN and Inf."""
    low, high = torch.aminmax(tensor)
    return [low.item(), high.item(), tensor.mean().item(), tensor.std().item()]


def compare(title: str, readers: dict[str, Callable[[], object]]) -> None:
    """Time each reader and print the group."""
    costs = {name: microseconds(read) for name, read in readers.items()}
    cheapest = min(costs.values())
    print(f"\n{title}")
    for name, cost in costs.items():
        print(f"  {name:<40} {cost:>12.2f} µs  {cost / cheapest:>8.1f}x")


def microseconds(read: Callable[[], object]) -> float:
    """Median over rounds of the mean processor time of a call."""
    calls = calls_per_round(read)
    return statistics.median(timed(read, calls) / calls * 1e6 for _ in range(_ROUNDS))


def calls_per_round(read: Callable[[], object]) -> int:
    """How many calls fill a round."""
    calls = 1
    while (seconds := timed(read, calls)) < _ROUND_SECONDS / 4:
        calls *= 4
    return max(1, int(calls * _ROUND_SECONDS / seconds))


def timed(read: Callable[[], object], calls: int) -> float:
    """Seconds of this thread's processor time that `calls` calls take."""
    start = time.thread_time()
    for _ in range(calls):
        read()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
