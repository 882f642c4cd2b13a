"""What the processor gave this process between two moments, and what it was made to wait for.

A machine that does other work makes a pipeline slower without the pipeline's doing: its own processor time stays the same,
and the rest is waiting. Linux tells each thread how long it was ready to run and had no processor
(Documentation/scheduler/sched-stats.rst, `/proc/<pid>/schedstat`), and each control group how long its quota held it back
(Documentation/admin-guide/cgroup-v2.rst, `cpu.stat`).
"""

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from sigmascope.probes.host import OpenFile
from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.performance import ProcessorUse

try:
    import resource
except ImportError:  # Windows, and builds of Python without it
    _HAS_RESOURCE = False
else:
    _HAS_RESOURCE = True

_GROUPS: Final = Path("/sys/fs/cgroup")
_OTHER_THREAD: Final = "it began and ended on two threads"
_NOT_REPORTED: Final = "the system does not report it"
_NOTHING: Final[Reading[Any]] = Reading(None, _NOT_REPORTED)
_THROTTLED: Final = re.compile(rb"^throttled_(usec|time) (\d+)$", re.MULTILINE)
"""Of version 2 in microseconds, of version 1 in nanoseconds."""
_NO_QUOTA: Final = "no control group with a cpu.stat was found"


@dataclass(frozen=True, slots=True)
class ProcessorMoment:
    """Counts up to a moment.

    Attributes:
        own_ns: Processor time of this process, all of its threads, in nanoseconds.
        thread: The calling one.
        waited_ns: How long that thread was ready to run and had no processor.
        throttled_ns: How long the process's control group was held back.
        minor_faults: Of the process.
        major_faults: The same.
    """

    own_ns: int
    thread: int
    waited_ns: Reading[int]
    throttled_ns: Reading[int]
    minor_faults: Reading[int]
    major_faults: Reading[int]


def processor_moment() -> ProcessorMoment:
    """The counts up to now (some 25 µs). Never raises."""
    usage = attempt(lambda: resource.getrusage(resource.RUSAGE_SELF)) if _HAS_RESOURCE else _NOTHING
    return ProcessorMoment(
        time.process_time_ns(),
        threading.get_ident(),
        attempt(_read_wait) if sys.platform.startswith("linux") else _NOTHING,
        _throttled(),
        Reading(usage.value.ru_minflt) if usage.value else Reading(None, usage.reason),
        Reading(usage.value.ru_majflt) if usage.value else Reading(None, usage.reason),
    )


def _read_wait() -> int:
    return int(_text_of("/proc/thread-self/schedstat").split()[1])


def _text_of(path: str) -> bytes:
    """A short file of the system's; a third of the time of `Path.read_bytes`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def _throttled() -> Reading[int]:
    found = _file_of_quota()
    file = found.value
    return Reading(None, found.reason) if file is None else attempt(lambda: _throttled_ns(file.read()))


@cache
def _file_of_quota() -> Reading[OpenFile]:
    """Where this process reads how long it was held back, looked for once, and open from then on."""

    def find() -> OpenFile:
        path = statistics_of_group()
        throttled_ns(path)
        return OpenFile(str(path))

    return attempt(find)


def statistics_of_group(groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> Path:
    """The `cpu.stat` of the control group whose quota holds for this process, of version 2 or of version 1's `cpu` controller.

    That is the process's own, or the next one around it that has a quota, such as a pod's or a slice's; its own where none has.

    Raises:
        OSError: There is none. Inside a container its own group is the root of what it sees.
    """
    for line in membership.read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        root = groups if not controllers else groups / controllers
        if not controllers or "cpu" in controllers.split(","):
            own = root / place.lstrip("/")
            known = [
                folder
                for folder in (own, *own.parents)
                if folder.is_relative_to(root) and (folder / "cpu.stat").is_file()
            ]
            if known:
                return next(filter(_has_quota, known), known[0]) / "cpu.stat"
    raise FileNotFoundError(_NO_QUOTA)


def _has_quota(group: Path) -> bool:
    """Whether a control group limits the processor time of what is in it."""
    for name, unlimited in (("cpu.max", b"max"), ("cpu.cfs_quota_us", b"-1")):
        with suppress(OSError):
            return not _text_of(str(group / name)).startswith(unlimited)
    return False


def throttled_ns(statistics: Path) -> int:
    """How long a control group was held back by its quota, in nanoseconds.

    Raises:
        OSError: The file cannot be read, or has no such count, as a group without a quota has none.
    """
    try:
        return _throttled_ns(_text_of(str(statistics)))
    except ValueError:
        raise OSError(f"{statistics} has no throttled_usec: no quota is set") from None


def _throttled_ns(statistics: bytes) -> int:
    """The same of what the file says.

    Raises:
        ValueError: It has no such count.
    """
    found = _THROTTLED.search(statistics)
    if found is None:
        raise ValueError("there is no throttled_usec")
    return int(found[2]) * (1000 if found[1] == b"usec" else 1)


def processor_use(before: ProcessorMoment, after: ProcessorMoment) -> tuple[ProcessorUse, Mapping[str, str]]:
    """What was used between two moments; and of what is not known, by the name of the field, why."""
    is_one_thread = before.thread == after.thread
    counts = {
        "waited_seconds": (
            before.waited_ns,
            after.waited_ns if is_one_thread else Reading(None, _OTHER_THREAD),
        ),
        "throttled_seconds": (before.throttled_ns, after.throttled_ns),
        "minor_faults": (before.minor_faults, after.minor_faults),
        "major_faults": (before.major_faults, after.major_faults),
    }
    passed = {
        name: None if first.value is None or last.value is None else max(last.value - first.value, 0)
        for name, (first, last) in counts.items()
    }
    unavailable = {
        name: last.reason or first.reason or _NOT_REPORTED
        for name, (first, last) in counts.items()
        if passed[name] is None
    }
    waited, throttled = passed["waited_seconds"], passed["throttled_seconds"]
    use = ProcessorUse(
        own_seconds=max(after.own_ns - before.own_ns, 0) / 1e9,
        waited_seconds=None if waited is None else waited / 1e9,
        throttled_seconds=None if throttled is None else throttled / 1e9,
        minor_faults=passed["minor_faults"],
        major_faults=passed["major_faults"],
    )
    return use, unavailable
