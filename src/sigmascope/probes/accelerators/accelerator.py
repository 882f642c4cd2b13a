"""The interface of an accelerator, the one that stands for none, and the base of those with allocator statistics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

import torch

from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, describe
from sigmascope.records.memory import AcceleratorMemory
from sigmascope.records.run import AcceleratorFacts
from sigmascope.threads import has_hands_off

ONLY_NVIDIA: Final = "utilisation is read through NVML, which supports only NVIDIA devices"
ELSEWHERE: Final = "the device is asked only by the thread that the program works in"
CAPTURED: Final = "a graph was being captured"

# Fields that are unavailable together.
MEMORY_FIELDS = ("allocated_bytes", "reserved_bytes", "total_bytes", "free_bytes", "driver_used_bytes")
FACT_FIELDS = ("name", "total_bytes", "driver_version", "compute_capability")


class AllocatorBytes(NamedTuple):
    """PyTorch's allocator on one device, in bytes. None: unknown, see `Accelerator.unavailable`."""

    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None


NOTHING = AllocatorBytes(0, 0, 0, 0)
UNKNOWN = AllocatorBytes(None, None, None, None)


@runtime_checkable
class AcceleratorEvent(Protocol):
    """A mark on a device's stream of work. Nothing here waits for the device, and nothing raises.

    Attributes:
        stream: Which of the device's streams it was recorded on; None: unknown.
    """

    stream: int | None

    def record(self) -> bool:
        """Set the mark after the work queued so far; False if it could not be set. May be repeated."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def elapsed_seconds(self, end: Any) -> float | None:
        """Device time from this mark to `end`, another of the same kind; None unless both are passed."""
        ...


@runtime_checkable
class Accelerator(Protocol):
    """One kind of accelerator and all its devices, named as torch names them ("cuda:0").

    No method raises, waits for the device, or initialises it: a monitor is a guest. None calls the driver where
    `sigmascope.threads.has_hands_off()`. What cannot be told has a reason.
    """

    @property
    def kind(self) -> str:
        """Device type as torch has it: "cuda" (HIP too), "xpu", "mps"; "cpu" when there is no accelerator."""
        ...

    @property
    def absence(self) -> str | None:
        """Why there is no accelerator, when there is none."""
        ...

    @property
    def untimed(self) -> str | None:
        """Why `new_event` never gives an event; None: it does."""
        ...

    @property
    def no_utilization(self) -> str | None:
        """Why it is unknown how busy a device is; None: NVML says it."""
        ...

    def device_count(self) -> int:
        """Devices visible to this process."""
        ...

    def devices(self) -> list[str]:
        """Their names, in order."""
        ...

    def current_device(self) -> str | None:
        """The device that work goes to by default; None when there is none."""
        ...

    def memory(self, device: str) -> AcceleratorMemory:
        """Memory on `device` now: the allocator's view and the driver's."""
        ...

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """Only the allocator's figures, read as cheaply as possible. Peaks are since `reset_peak`."""
        ...

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None, by field name."""
        ...

    def reset_peak(self, device: str) -> str | None:
        """Start peaks anew from the current use. Gives the reason if that is not possible."""
        ...

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """A mark for timing on `device` (None: the current one); None if there is no such thing."""
        ...

    def facts(self, device: str) -> AcceleratorFacts:
        """Name, memory, driver and generation of `device`."""
        ...


@runtime_checkable
class DetectedAccelerator(Accelerator, Protocol):
    """An accelerator that `detect_accelerator` may choose.

    To add one, write a file of this folder, named as torch names the device type, in which `ACCELERATOR` is the class, and
    put its name into `_FILES` of `detection.py`.

    Attributes:
        has_float64: Whether its devices compute in float64.
        has_streams: Whether they copy while they compute.
    """

    has_float64: ClassVar[bool]
    has_streams: ClassVar[bool]

    def why_absent(self) -> str | None:
        """Why it is certain that no device is there; None: one may be."""
        ...


@dataclass(frozen=True, slots=True)
class NullAccelerator:
    """No device; every fact is None for the same reason."""

    absence: str = "no accelerator"
    kind: str = "cpu"
    untimed: str | None = None
    no_utilization: str | None = None

    def device_count(self) -> int:
        """Zero."""
        return 0

    def devices(self) -> list[str]:
        """None of them."""
        return []

    def current_device(self) -> str | None:
        """None: work goes to the CPU."""
        return None

    def memory(self, device: str) -> AcceleratorMemory:
        """Every figure unavailable."""
        return AcceleratorMemory(device, unavailable=dict.fromkeys(MEMORY_FIELDS, self.absence))

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """Every figure unknown."""
        return AllocatorBytes(None, None, None, None)

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The one reason, for every figure."""
        return dict.fromkeys(AllocatorBytes._fields, self.absence)

    def reset_peak(self, device: str) -> str | None:
        """Nothing to reset: gives the reason."""
        return self.absence

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """No events without a device."""
        return None

    def facts(self, device: str) -> AcceleratorFacts:
        """Every fact unavailable."""
        return AcceleratorFacts(device, unavailable=dict.fromkeys(FACT_FIELDS, self.absence))


class CachingAccelerator:
    """Base of the accelerators that keep allocator statistics.

    A process that has not initialised the device has allocated nothing there: those figures are 0, and
    that is known. The driver's figures stay unknown then, since asking would initialise the device,
    which takes memory and makes later forks of the host fail.

    Args:
        kind: torch's device type.
        backend: Its module in torch, such as `torch.cuda`.
    """

    absence: str | None = None
    untimed: str | None = None
    no_utilization: str | None = ONLY_NVIDIA
    has_float64: ClassVar[bool] = True
    has_streams: ClassVar[bool] = True

    def __init__(self, kind: str, backend: ModuleType) -> None:
        self.kind = kind
        self._backend: Any = backend
        # Asked at each event, so without a detour; an older torch has no graphs on XPU.
        self._capturing: Callable[[], bool] = getattr(backend, "is_current_stream_capturing", lambda: False)
        self._known_count: int | None = None
        self._used: set[int] = set()
        self._current: int | None = None

    def is_initialized(self) -> bool:
        """Whether the host has used the device in this process."""
        return bool(attempt(self._backend.is_initialized).value)

    def device_count(self) -> int:
        """Devices visible to this process; 0 also when that cannot be known without initialising."""
        return max(0, self._count() or 0)

    def why_absent(self) -> str | None:
        """The reason if the number of devices is certainly 0; None if it is unknown so far."""
        return f"no accelerator: {self.kind.upper()} sees no device" if self._count() == 0 else None

    def devices(self) -> list[str]:
        """Names such as "cuda:0"."""
        return [f"{self.kind}:{index}" for index in range(self.device_count())]

    def current_device(self) -> str | None:
        """The device that work goes to by default: the first, until the host has chosen."""
        if not self.is_initialized():
            return f"{self.kind}:0" if self.device_count() else None
        if not has_hands_off():  # each thread has its own
            self._current = attempt(self._backend.current_device).value
        return None if self._current is None else f"{self.kind}:{self._current}"

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """The allocator's figures, read once; all 0 while the host has not used the device."""
        try:
            if not self._backend.is_initialized():
                return NOTHING
            is_used = self._is_known_used(device_index(device))
            if is_used is None:
                return UNKNOWN
            return self._figures(device_index(device)) if is_used else NOTHING
        except PROBE_ERRORS:
            return UNKNOWN

    def _figures(self, index: int) -> AllocatorBytes:
        statistics = self._backend.memory_stats_as_nested_dict(index)
        allocated, reserved = statistics["allocated_bytes"]["all"], statistics["reserved_bytes"]["all"]
        return consistent(allocated["current"], reserved["current"], allocated["peak"], reserved["peak"])

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None."""
        missing = [n for n, value in self.allocated_and_peak(device)._asdict().items() if value is None]
        return dict.fromkeys(missing, self._why_no_statistics(device)) if missing else {}

    def memory(self, device: str) -> AcceleratorMemory:
        """The allocator's and the driver's view of `device`, in bytes."""
        figures = self.allocated_and_peak(device)
        gaps = self.unavailable(device)
        names = {"allocated": "allocated_bytes", "reserved": "reserved_bytes"}
        unavailable = {names[name]: reason for name, reason in gaps.items() if name in names}
        driver = self._free_and_total(device)
        if driver.value is None:
            fields = ("total_bytes", "free_bytes", "driver_used_bytes")
            unavailable |= dict.fromkeys(fields, driver.reason or "unknown")
            return AcceleratorMemory(device, figures.allocated, figures.reserved, unavailable=unavailable)
        free, total = driver.value
        return AcceleratorMemory(
            device, figures.allocated, figures.reserved, total, free, total - free, unavailable=unavailable
        )

    def reset_peak(self, device: str) -> str | None:
        """Start the allocator's peaks anew. The host's own `max_memory_allocated` starts anew with them."""
        try:
            if self._backend.is_initialized() and self._is_known_used(device_index(device)):
                self._backend.reset_peak_memory_stats(device_index(device))
        except PROBE_ERRORS as error:
            return describe(error)
        return None

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """A timing mark on the stream that the host works on; None before the host used the device."""
        device = self.current_device() if device is None else device
        if has_hands_off() or device is None or not self._is_used(device):  # recording would create a context
            return None
        index = device_index(device)
        event = attempt(lambda: self._backend.Event(enable_timing=True)).value
        if event is None:
            return None
        return TimingEvent(event, lambda: self._backend.current_stream(index), self._capturing)

    def _free_and_total(self, device: str) -> Reading[tuple[int, int]]:
        if not self.is_initialized():
            return Reading(None, f"{self.kind} is not initialised in this process")
        if has_hands_off():
            return Reading(None, ELSEWHERE)
        if not self._is_used(device):
            return Reading(None, f"this process does not use {device}")
        if attempt(self._capturing).value:
            return Reading(None, CAPTURED)
        return attempt(lambda: _int_pair(self._backend.mem_get_info(device_index(device))))

    def _count(self) -> int | None:
        """Number of devices; negative or None when that is not known yet."""
        if not has_hands_off():
            count = self._backend.device_count if self.is_initialized() else self._count_without_initialising
            self._known_count = attempt(lambda: int(count())).value  # which a host may have made errors
        return self._known_count

    def _count_without_initialising(self) -> int:
        return int(self._backend.device_count())

    def _is_used(self, device: str) -> bool:
        used = attempt(lambda: self._is_known_used(device_index(device))).value
        return self.is_initialized() and used is True

    def _is_known_used(self, index: int) -> bool | None:
        """Whether this process uses a device, which it never ceases to; None: only the driver could tell, off its thread."""
        if index in self._used:
            return True
        if has_hands_off():
            return None
        if self._has_context(index):
            self._used.add(index)
        return index in self._used

    def _has_context(self, index: int) -> bool:
        """Whether asking the driver about this device would not create a context on it."""
        return True

    def _why_no_statistics(self, device: str) -> str:
        if has_hands_off():
            return ELSEWHERE
        reading = attempt(lambda: self._figures(device_index(device)))
        return reading.reason or "the allocator's figures contradict each other"


def device_index(device: str) -> int:
    """The index in a name such as "cuda:1"; 0 where there is none."""
    return int(device.partition(":")[2] or 0)


def consistent(allocated: int, reserved: int, peak_allocated: int, peak_reserved: int) -> AllocatorBytes:
    """Drop figures that cannot be true.

    An allocator that does not keep a statistic (cudaMallocAsync, some of them) reports 0. A peak below
    the current use, or a reservation below the allocation, gives that away.
    """
    floor = max(allocated, reserved, peak_allocated)
    return AllocatorBytes(
        allocated,
        reserved if reserved >= allocated else None,
        peak_allocated if peak_allocated >= allocated else None,
        peak_reserved if peak_reserved >= floor else None,
    )


def _int_pair(pair: tuple[int, int]) -> tuple[int, int]:
    free, total = pair
    return int(free), int(total)


class TimingEvent:
    """A torch event with timing enabled (`torch.cuda.Event` and its like).

    While a graph is being captured nothing is recorded or queried: the mark would become part of the
    graph, and a query would end the capture with an error.
    """

    __slots__ = ("_capturing", "_current_stream", "_event", "_set", "stream")

    def __init__(self, event: Any, current_stream: Callable[[], Any], capturing: Callable[[], bool]) -> None:
        self._event = event
        self._current_stream = current_stream
        self._capturing = capturing
        self._set = False
        self.stream: int | None = None

    def record(self) -> bool:
        """Set the mark after the work queued so far; False if it could not be set."""
        try:
            self._set = not self._capturing()
            if self._set:
                stream = self._current_stream()
                self._event.record(stream)
                self.stream = stream.stream_id
        except PROBE_ERRORS:
            self._set = False
        return self._set

    def query(self) -> bool:
        """Whether the device has passed the mark. Does not wait."""
        try:
            return self._set and not has_hands_off() and not self._capturing() and bool(self._event.query())
        except PROBE_ERRORS:
            return False

    def elapsed_seconds(self, end: "TimingEvent") -> float | None:
        """Device time from this mark to `end`; None unless both are set and passed."""
        if not (self.query() and end.query()):
            return None
        try:
            return float(self._event.elapsed_time(end._event)) / 1e3
        except PROBE_ERRORS:
            return None


def is_capturing(kind: str) -> bool:
    """Whether the current stream of a device type is being captured into a graph. Never raises or initialises it.

    Args:
        kind: As torch calls it, such as "cuda"; types without graphs capture nothing.
    """
    backend: Any = getattr(torch, kind, None)
    return isinstance(backend, ModuleType) and attempt(lambda: _is_backend_capturing(backend)).value is True


def _is_backend_capturing(backend: Any) -> bool:
    return bool(backend.is_initialized() and backend.is_current_stream_capturing())
