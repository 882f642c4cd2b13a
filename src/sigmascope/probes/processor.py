"""What the processor gave this process between two moments, and what it was made to wait for.

A machine that does other work makes a pipeline slower without the pipeline's doing: its own processor time stays the same,
and the rest is waiting. Linux tells each thread how long it was ready to run and had no processor
(Documentation/scheduler/sched-stats.rst, `/proc/<pid>/schedstat`), and each control group how long its quota held it back
(Documentation/admin-guide/cgroup-v2.rst, `cpu.stat`). No system tells a process that it was stopped (SIGSTOP, Ctrl-Z, a debugger)
or frozen (a container that was paused): `STANDSTILL` sees it by a thread that was not woken.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
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
_NOBODY_LOOKED: Final = "no thread of the watch looked meanwhile (sample_hz)"
_LEAST_STOP_NS: Final = 1_000_000_000
_MOST_IN_A_STOP: Final = 0.1
"""Of the time between two looks: what threads may have done before and after the stop."""
_MANY_PAGES: Final = 100
"""So many pages read from a disk may be what a thread waited for."""


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
        at_ns: When it was, by `time.perf_counter_ns`.
        stopped_ns: How long the process was seen to be stopped.
        looks: How often a thread has looked for that.
    """

    own_ns: int
    thread: int
    waited_ns: Reading[int]
    throttled_ns: Reading[int]
    minor_faults: Reading[int]
    major_faults: Reading[int]
    at_ns: int = 0
    stopped_ns: int = 0
    looks: int = 0


def processor_moment() -> ProcessorMoment:
    """The counts up to now (some 25 µs). Never raises."""
    moment = _counts()
    STANDSTILL.is_there(moment)
    return replace(moment, stopped_ns=STANDSTILL.nanoseconds, looks=STANDSTILL.looks)


def _counts() -> ProcessorMoment:
    usage = attempt(lambda: resource.getrusage(resource.RUSAGE_SELF)) if _HAS_RESOURCE else _NOTHING
    return ProcessorMoment(
        time.process_time_ns(),
        threading.get_ident(),
        attempt(_read_wait) if sys.platform.startswith("linux") else _NOTHING,
        _throttled(),
        Reading(usage.value.ru_minflt) if usage.value else Reading(None, usage.reason),
        Reading(usage.value.ru_majflt) if usage.value else Reading(None, usage.reason),
        time.perf_counter_ns(),
    )


class Standstill:
    """How long this process as a whole did not run, seen by a thread that looks several times a second, as long as it does.

    Where it looks a second too late, and meanwhile no thread of the process used a processor, waited for one, was held back by a
    quota or had pages read from a disk, none could run.

    Attributes:
        nanoseconds: How long so far.
        looks: How often the thread has looked.
    """

    def __init__(self, counts: Callable[[], ProcessorMoment] = _counts) -> None:
        self._counts = counts
        self.forget()

    def forget(self) -> None:
        """Start anew, for a forked child."""
        self._lock = threading.RLock()  # a handler of the host's signals may come in
        self._last: ProcessorMoment | None = None
        self._pause_ns = 0
        self.nanoseconds = 0
        self.looks = 0

    def look(self, pause_seconds: float = 0.0) -> None:
        """Take that the thread runs now, and means to look again after so many seconds. Never raises."""
        with self._lock:
            self._take(self._counts())
            self._pause_ns = round(1e9 * pause_seconds)
            self.looks += 1

    def look_no_more(self) -> None:
        """Take that the thread looks no longer: what comes now is not known."""
        self._last = None

    def is_there(self, moment: ProcessorMoment) -> None:
        """Take that another thread runs now, which may be woken before the one that looks."""
        last = self._last
        if last is not None and self._is_late(last, moment):
            with self._lock:
                if self._last is last:
                    self._take(moment)
                    self.looks += 1

    def _is_late(self, last: ProcessorMoment, moment: ProcessorMoment) -> bool:
        return moment.at_ns - last.at_ns - self._pause_ns >= _LEAST_STOP_NS

    def _take(self, moment: ProcessorMoment) -> None:
        last, self._last = self._last, moment
        if last is not None and self._is_late(last, moment):
            self.nanoseconds += _stopped_between(last, moment, self._pause_ns)


def _stopped_between(last: ProcessorMoment, moment: ProcessorMoment, pause_ns: int) -> int:
    """How much of the time between two looks the process was stopped: nearly all of it, or none."""
    passed = moment.at_ns - last.at_ns - pause_ns
    counts = [(last.throttled_ns, moment.throttled_ns)]
    counts += [(last.waited_ns, moment.waited_ns)] if last.thread == moment.thread else []
    held = moment.own_ns - last.own_ns
    held += sum(
        max(after.value - before.value, 0)
        for before, after in counts
        if before.value is not None and after.value is not None
    )
    read = (moment.major_faults.value or 0) - (last.major_faults.value or 0)
    return passed - held if held <= _MOST_IN_A_STOP * passed and read < _MANY_PAGES else 0


STANDSTILL: Final = Standstill()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STANDSTILL.forget)


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
    is_known = after.looks > before.looks or after.at_ns - before.at_ns < _LEAST_STOP_NS
    if not is_known:
        unavailable["stopped_seconds"] = _NOBODY_LOOKED
    waited, throttled = passed["waited_seconds"], passed["throttled_seconds"]
    use = ProcessorUse(
        own_seconds=max(after.own_ns - before.own_ns, 0) / 1e9,
        waited_seconds=None if waited is None else waited / 1e9,
        throttled_seconds=None if throttled is None else throttled / 1e9,
        stopped_seconds=max(after.stopped_ns - before.stopped_ns, 0) / 1e9 if is_known else None,
        minor_faults=passed["minor_faults"],
        major_faults=passed["major_faults"],
    )
    return use, unavailable
