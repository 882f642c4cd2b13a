"""When memory ran out: letting go of what the failed attempt held, and the RAM that is left.

The RAM left is the machine's, or that of the container (control group) if it has less.
"""

import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sigmascope.probes import system_memory
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import MIB

_CGROUP = Path("/sys/fs/cgroup")


def let_go(error: BaseException, outer: BaseException | None = None) -> None:
    """Drop what an error holds: the local variables of all frames that it went through, and these frames.

    Args:
        error: Caught, and done with.
        outer: What was being handled already when the attempt began. It and what lies behind it are
            somebody else's, and stay.
    """
    for link in list(_chain(error, outer)):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException, outer: BaseException | None) -> Iterator[BaseException]:
    """The error and all that it was raised from or while handling, up to `outer`."""
    seen: set[int] = set() if outer is None else {id(link) for link in _chain(outer, None)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def free_memory(*devices: torch.device) -> None:
    """Collect garbage, then give the devices' cached blocks back to them. Never raises."""
    gc.collect()
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        empty_cache = getattr(getattr(torch, kind, None), "empty_cache", None)
        if empty_cache is not None:
            attempt(empty_cache)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that was queued; of no effect for the CPU.

    Whoever only queues work is done with it before the device, and hears of its errors later.
    """
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class Ram:
    """Bytes that are free, and whose they are; None if that cannot be read."""

    free_bytes: int | None
    whose: str = "this machine"


def free_ram(cgroup: Path = _CGROUP) -> Ram:
    """The smaller of what the machine and this process's control group have left.

    Args:
        cgroup: Where the group's files are (Linux, version 2).
    """
    machine = system_memory().ram_available_bytes
    group = attempt(lambda: _left_in(cgroup)).value
    if group is not None and (machine is None or group < machine):
        return Ram(group, "this container")
    return Ram(machine)


def _left_in(cgroup: Path) -> int | None:
    limit = (cgroup / "memory.max").read_text().strip()
    if limit == "max":
        return None
    used = int((cgroup / "memory.current").read_text())
    return max(int(limit) - used + _reclaimable(cgroup), 0)


def _reclaimable(cgroup: Path) -> int:
    """Cached files, which the kernel drops when memory is wanted."""
    lines = (cgroup / "memory.stat").read_text().splitlines()
    numbers = dict(line.split(maxsplit=1) for line in lines)
    return int(numbers.get("inactive_file", 0)) + int(numbers.get("active_file", 0))


def why_not_enough(needed_bytes: int, ram: Ram) -> str | None:
    """The reason with numbers, if RAM cannot hold that much."""
    if ram.free_bytes is None or needed_bytes <= ram.free_bytes:
        return None
    needed, free = needed_bytes / MIB, ram.free_bytes / MIB
    return f"it takes about {needed:,.0f} MB of RAM, and {ram.whose} has {free:,.0f} MB free"
