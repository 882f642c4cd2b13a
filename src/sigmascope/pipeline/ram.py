"""How much RAM this process may still take: the machine's, or what is left of its container's."""

from dataclasses import dataclass
from pathlib import Path

from sigmascope.probes import system_memory
from sigmascope.probes.reading import attempt
from sigmascope.records.arithmetic import MIB

_CGROUP = Path("/sys/fs/cgroup")


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


def why_not_enough(needed_bytes: int, ram: Ram) -> str | None:
    """The reason with numbers, if RAM cannot hold that much."""
    if ram.free_bytes is None or needed_bytes <= ram.free_bytes:
        return None
    needed, free = needed_bytes / MIB, ram.free_bytes / MIB
    return f"it takes about {needed:,.0f} MB of RAM, and {ram.whose} has {free:,.0f} MB free"


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
