"""Facts about the machine and the software on it: its memory, this process's memory, and who uses its processor.

On Linux the resident set and the machine's memory are read from files that stay open (an eighth and a sixth of the time
that psutil takes), elsewhere by psutil. For leaks,
`heap_in_use` asks the C library's allocator what it has given out and not got back, PyTorch's CPU tensors among it. The
resident set tells little of this: freed memory stays resident and is given out again, so that a leak hides in it at
first, and one large call raises it for good.
"""

import ctypes
import gc
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from sigmascope.probes.accelerators import Accelerator, detect_accelerator, why_no_devices
from sigmascope.probes.reading import Reading, attempt, reasons
from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.run import HostFacts

try:
    import resource
except ImportError:  # Windows, and builds of Python without it
    _HAS_RESOURCE = False
else:
    _HAS_RESOURCE = True

LIBRARIES = (
    "sigmascope",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "xformers",
    "triton",
    "flash-attn",
    "sageattention",
    "bitsandbytes",
    "torchao",
    "optimum-quanto",
    "gguf",
)
"""Distributions whose version can change what a pipeline costs or makes."""
_HAS_PROC = sys.platform.startswith("linux")
_RAM: Final = ("ram_total_bytes", "ram_used_bytes", "ram_available_bytes")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
_TOTAL_AND_AVAILABLE: Final = re.compile(rb"^Mem(?:Total|Available): +(\d+) kB$", re.MULTILINE)
"""In /proc/meminfo, in this order, among its first lines."""

# Fields of the processor's times that are idle time, or are counted in others already.
_IDLE = ("idle", "iowait")
_COUNTED_ELSEWHERE = ("guest", "guest_nice")  # Linux has them in user and nice already


def host_facts(accelerator: Accelerator | None = None) -> HostFacts:
    """CPU, RAM, system, Python, library versions and accelerators. Never raises, imports no library.

    Args:
        accelerator: What to ask about devices; None finds out (`detect_accelerator`).
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    readings: dict[str, Reading[Any]] = {
        "cpu_model": attempt(_cpu_model),
        "cpu_count_logical": _processor_count(psutil.cpu_count),
        "cpu_count_physical": _processor_count(lambda: psutil.cpu_count(logical=False)),
        "ram_total_bytes": attempt(lambda: int(psutil.virtual_memory().total)),
        "os": attempt(platform.platform),
        "python_version": attempt(platform.python_version),
    }
    unavailable = reasons(readings)
    devices = accelerator.devices()
    if not devices:
        unavailable["accelerators"] = why_no_devices(accelerator)
    return HostFacts(
        **{name: reading.value for name, reading in readings.items()},
        libraries=_library_versions(),
        accelerators=tuple(accelerator.facts(device) for device in devices),
        unavailable=unavailable,
    )


def place_in_group() -> dict[str, Any] | None:
    """Which of several processes this one is, and on which machine; None: it works alone, or nobody says.

    `torch.distributed` says it once it is initialized, before that the variables that torchrun and accelerate set. Nothing
    is sent to other processes. Never raises.
    """
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, size = int(distributed.get_rank()), int(distributed.get_world_size())
        else:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if size > 1 and 0 <= rank < size:
            return {"rank": rank, "world_size": size, "machine": _machine_name()}
    return None


@cache
def _machine_name() -> str:
    return platform.node()


def _cpu_model() -> str:
    """The processor's name as its maker writes it.

    Raises:
        LookupError: The system does not tell.
    """
    if platform.system() == "Linux":
        return _cpu_model_of_linux(Path("/proc/cpuinfo").read_text())
    if platform.system() == "Darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    name = platform.processor()
    if not name:
        raise LookupError("the system does not name its processor")
    return name


def _cpu_model_of_linux(cpuinfo: str) -> str:
    """x86 says "model name"; Arm boards say "Model" or "Hardware", Arm servers nothing."""
    fields = dict(reversed([_cpuinfo_field(line) for line in cpuinfo.splitlines() if ":" in line]))
    for name in ("model name", "Model", "Hardware", "cpu model", "cpu"):
        if fields.get(name):
            return fields[name]
    raise LookupError("/proc/cpuinfo does not name the processor")


def _cpuinfo_field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _processor_count(count: Callable[[], int | None]) -> Reading[int]:
    reading = attempt(count)
    if reading.value is None:
        return Reading(None, reading.reason or "the system does not report it")
    return Reading(reading.value)


def _library_versions() -> dict[str, str]:
    """Versions from the installed metadata; ComfyUI, which is not installed, from what is loaded."""
    versions = {}
    for name in LIBRARIES:
        version = attempt(lambda name=name: metadata.version(name)).value  # type: ignore[misc]
        if version is not None:
            versions[name] = version
    comfyui = getattr(sys.modules.get("comfyui_version"), "__version__", None)
    return versions if comfyui is None else versions | {"comfyui": str(comfyui)}


@dataclass(frozen=True, slots=True)
class CpuMoment:
    """What was used up to a moment. Seconds of one processor thread.

    Attributes:
        at: On the clock that never goes back.
        machine: By everybody, and by what runs beside this machine on the same host (steal).
        own: By this process, all of its threads.
        children: By the processes that it started, and those that they did; None: not known.
    """

    at: float
    machine: float
    own: float
    children: float | None = None


def cpu_moment() -> Reading[CpuMoment]:
    """What was used up to now (some 50 µs). Never raises."""
    return attempt(_read_cpu_moment)


def _read_cpu_moment() -> CpuMoment:
    times = psutil.cpu_times()._asdict()
    machine = sum(value for name, value in times.items() if name not in (*_IDLE, *_COUNTED_ELSEWHERE))
    return CpuMoment(time.monotonic(), machine, time.process_time(), attempt(_seconds_of_children).value)


def _seconds_of_children() -> float:
    """Processor time of the processes that this one started, and of theirs, those that are over too."""
    over = os.times()
    seconds = over.children_user + over.children_system
    waiting, seen = _children_of(os.getpid()), set[int]()
    while waiting:
        child = waiting.pop()
        if child not in seen:
            seen.add(child)
            with suppress(OSError, ValueError, IndexError):  # it has just ended
                seconds += _seconds_of(child)
                waiting += _children_of(child)
    return seconds


def _children_of(process: int) -> list[int]:
    """The processes that one has started and that run, by any of its threads."""
    if not _HAS_PROC:
        return [child.pid for child in psutil.Process(process).children()]
    folder = f"/proc/{process}/task"
    lists = (Path(folder, thread, "children").read_bytes() for thread in os.listdir(folder))  # noqa: PTH208 - a third of its time
    return [int(child) for children in lists for child in children.split()]


def _seconds_of(process: int) -> float:
    """Processor time of a process, and of its children that are over."""
    if not _HAS_PROC:
        times = psutil.Process(process).cpu_times()
        return float(times.user + times.system)
    fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class DiskMoment:
    """What this process had read from disks up to a moment. None: the system does not report it.

    Attributes:
        page_faults: Major ones: pages of memory that had to be read from a file, such as mapped weights, or from swap.
        read_bytes: By any way, page faults included.
    """

    page_faults: int | None = None
    read_bytes: int | None = None


def disk_moment() -> DiskMoment:
    """What this process has read from disks up to now (some 50 µs). Never raises."""
    faults = attempt(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_majflt) if _HAS_RESOURCE else None
    read = attempt(lambda: int(psutil.Process().io_counters().read_bytes))
    return DiskMoment(None if faults is None else faults.value, read.value)


@dataclass(frozen=True, slots=True)
class RuntimeMoment:
    """Counts of what Python and PyTorch did by themselves up to a moment. None: not reported.

    Attributes:
        collections: Full ones of Python's garbage collector, each of which looks at every container there is.
        compiled_graphs: By torch.compile.
        cached_graphs: Of these, how many its cache on disk held.
    """

    collections: int | None = None
    compiled_graphs: int | None = None
    cached_graphs: int | None = None


def runtime_moment() -> RuntimeMoment:
    """What Python and PyTorch did by themselves up to now (2 µs). Never raises, and imports nothing."""
    collections = attempt(lambda: int(gc.get_stats()[-1]["collections"]))
    compiler = sys.modules.get("torch._dynamo.utils")  # what has compiled nothing has not loaded it
    graphs = attempt(
        lambda: int((compiler.counters.get("stats") or {}).get("unique_graphs", 0)) if compiler else 0
    )
    cached = attempt(lambda: _graphs_from_cache(compiler.counters) if compiler else 0)
    return RuntimeMoment(collections.value, graphs.value, cached.value)


def _graphs_from_cache(counters: Any) -> int:
    """How many graphs caches on disk held: AOTAutograd's, which has inductor's in it, or inductor's alone."""
    hits = ((counters.get(name) or {}).get(f"{cache}_cache_hit", 0) for name, cache in _CACHES)
    return max(map(int, hits))


_CACHES: Final = (("aot_autograd", "autograd"), ("inductor", "fxgraph"))


def others_share(before: CpuMoment, after: CpuMoment) -> float | None:
    """The share of all processor threads that others used in between, 0 to 1; None if no time passed.

    The system counts in hundredths of a second: over less than a second the share is rough.
    """
    room = (after.at - before.at) * (os.cpu_count() or 1)
    if room <= 0:
        return None
    used = (after.machine - before.machine) - (after.own - before.own)
    return min(max(used / room, 0.0), 1.0)


class OpenFile:
    """A file of the system's that says something else each time that it is read, and stays open.

    Attributes:
        number: The open file; None: not open yet; -1: it cannot be read.
    """

    number: int | None = None

    def __init__(self, path: str) -> None:
        self._path = path
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Open it anew when it is read: in a forked child the open file shows its parent."""
        vars(self).pop("number", None)

    def read(self, nbytes: int = 512) -> bytes:
        """Its first bytes: the hot path.

        Raises:
            OSError: It is not there, or the program has closed the file.
        """
        number = self.number
        return os.pread(self._opened() if number is None else number, nbytes, 0)

    def _opened(self) -> int:
        opened = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        number: int = vars(self).setdefault("number", opened)
        if number != opened:  # another thread was first
            os.close(opened)
        return number

    def give_up(self) -> None:
        """Read it no more in this process."""
        self.number = -1


_TWO_NUMBERS: Final = 48
"""Bytes that hold two of the system's numbers, 20 digits at most each, and the beginning of a third."""
_statm, _meminfo = OpenFile("/proc/self/statm"), OpenFile("/proc/meminfo")


def process_rss_bytes() -> int | None:
    """Resident set size of this process in bytes; None where `process_rss` would give a reason.

    Made for hot paths. Linux counts pages per thread in batches, so the figure may lag by some pages.
    """
    if _HAS_PROC:
        try:
            return int(_statm.read(_TWO_NUMBERS).split(None, 2)[1]) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):  # a system without /proc; or the program closed the file
            _statm.give_up()
    return _rss_by_psutil().value


def process_rss() -> Reading[int]:
    """Resident set size of this process in bytes, or the reason why it cannot be read."""
    nbytes = process_rss_bytes()
    return _rss_by_psutil() if nbytes is None else Reading(nbytes)


def _rss_by_psutil() -> Reading[int]:
    return attempt(lambda: int(psutil.Process().memory_info().rss))


def process_peak_rss_bytes() -> int | None:
    """The largest resident set that this process has had so far, in bytes; None where the system does not report it.

    At first it may be too large, because Linux counts what the process was before it executed this program. Growth is
    exact: the process has just reached that size.
    """
    if sys.platform == "win32" or not _HAS_RESOURCE:
        peak = getattr(psutil.Process().memory_info(), "peak_wset", None)
        return None if peak is None else int(peak)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) or None


class _Ram(NamedTuple):
    """Bytes of the machine's memory, and why they are not known."""

    total: int | None
    used: int | None
    available: int | None
    reason: str | None = None


def system_memory() -> MemorySnapshot:
    """RAM of the machine (total, used, available in bytes); the other fields stay empty."""
    ram = _ram()
    return MemorySnapshot(
        ram_total_bytes=ram.total,
        ram_used_bytes=ram.used,
        ram_available_bytes=ram.available,
        unavailable=_unavailable(ram),
    )


def _unavailable(ram: _Ram) -> dict[str, str]:
    return {} if ram.reason is None else dict.fromkeys(_RAM, ram.reason)


def _ram() -> _Ram:
    if _HAS_PROC:
        try:
            return _ram_of_linux(_meminfo.read())
        except (OSError, ValueError):  # as above, or a kernel or container whose figures make no sense
            _meminfo.give_up()
    reading = attempt(psutil.virtual_memory)
    memory = reading.value
    if memory is None:
        return _Ram(None, None, None, reading.reason or "unknown")
    return _Ram(int(memory.total), int(memory.used), int(memory.available))


def _ram_of_linux(meminfo: bytes) -> _Ram:
    """Used is what is not available, as psutil has it since version 7.

    Raises:
        ValueError: The two figures are not there (Linux before 3.14), or make no sense, as in some containers.
    """
    total_kib, available_kib = _TOTAL_AND_AVAILABLE.findall(meminfo)
    total, available = int(total_kib) * 1024, int(available_kib) * 1024
    if not 0 < available <= total:
        raise ValueError(f"{available} of {total} bytes of RAM are available")
    return _Ram(total, total - available, available)


def memory_snapshot(accelerator: Accelerator | None = None) -> MemorySnapshot:
    """Memory of the machine, of this process and of every accelerator device, now.

    Args:
        accelerator: What to ask about devices; None finds out (`detect_accelerator`).
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    ram, rss = _ram(), process_rss_bytes()
    unavailable = _unavailable(ram)
    if rss is None:
        unavailable["process_rss_bytes"] = _rss_by_psutil().reason or "unknown"
    devices = accelerator.devices()
    if not devices:
        unavailable["accelerators"] = why_no_devices(accelerator)
    return MemorySnapshot(
        ram_total_bytes=ram.total,
        ram_used_bytes=ram.used,
        ram_available_bytes=ram.available,
        process_rss_bytes=rss,
        accelerators=tuple(accelerator.memory(device) for device in devices),
        current_device=accelerator.current_device(),
        unavailable=unavailable,
    )


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h, since 2.33)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def heap_in_use() -> Reading[int]:
    """Bytes that malloc has given out, with those of its own mappings; or why it cannot be asked.

    It takes about 0.1 ms, so it is not for hot paths. Memory of other allocators is not in it.
    """
    return attempt(_heap_bytes)


def _heap_bytes() -> int:
    information = _mallinfo2()()
    return int(information.uordblks) + int(information.hblkhd)


def trim_heap(above: int) -> None:
    """Return malloc's free memory to the system, if it is more than this many bytes.

    Tensors of many sizes that come and go leave gaps that together may be larger than what is in use. It takes about
    0.1 ms where there is nothing to do, and does nothing where malloc is not glibc's.
    """

    def trim() -> None:
        if _mallinfo2()().fordblks > above:
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))

    attempt(trim)


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    """The function of the running process's C library; other systems than Linux with glibc have none."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _Mallinfo2
    function.argtypes = ()
    found: Callable[[], _Mallinfo2] = function
    return found
