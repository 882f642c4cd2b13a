"""Metal, the one device of a Mac."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch

from sigmascope.probes.accelerators.accelerator import (
    ELSEWHERE,
    ONLY_NVIDIA,
    AcceleratorEvent,
    AllocatorBytes,
)
from sigmascope.probes.reading import Reading, T, attempt, reasons
from sigmascope.records.memory import AcceleratorMemory
from sigmascope.records.run import AcceleratorFacts
from sigmascope.threads import has_hands_off

_NO_MPS_PEAK = "PyTorch records no peak for MPS; sample the current use"
_MPS_SHARES_RAM = "MPS shares the machine's RAM and has no separate figure"


class MpsAccelerator:
    """The one device of a Mac. `reserved` is what the Metal driver holds for this process, caches included."""

    kind = "mps"
    absence: str | None = None
    untimed = "on MPS, PyTorch waits for all queued work to time two events"
    no_utilization = ONLY_NVIDIA
    has_float64: ClassVar[bool] = False
    has_streams: ClassVar[bool] = False

    def why_absent(self) -> str | None:
        """Metal that cannot be used."""
        usable = attempt(torch.backends.mps.is_available).value
        return None if usable else "no accelerator: Metal is not usable here"

    def device_count(self) -> int:
        """One."""
        return 1

    def devices(self) -> list[str]:
        """Its only name."""
        return ["mps:0"]

    def current_device(self) -> str | None:
        """The only one."""
        return "mps:0"

    def memory(self, device: str) -> AcceleratorMemory:
        """Allocated, reserved, and as total the working set that Metal recommends at most."""
        readings = _mps_bytes()
        readings["total_bytes"] = _largest_working_set()
        return AcceleratorMemory(
            device,
            readings["allocated_bytes"].value,
            readings["reserved_bytes"].value,
            readings["total_bytes"].value,
            unavailable=reasons(readings)
            | dict.fromkeys(("free_bytes", "driver_used_bytes"), _MPS_SHARES_RAM),
        )

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """What is allocated and reserved now; peaks are unknown."""
        readings = _mps_bytes()
        return AllocatorBytes(readings["allocated_bytes"].value, readings["reserved_bytes"].value, None, None)

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None."""
        missing = {name.removesuffix("_bytes"): reason for name, reason in reasons(_mps_bytes()).items()}
        return missing | dict.fromkeys(("peak_allocated", "peak_reserved"), _NO_MPS_PEAK)

    def reset_peak(self, device: str) -> str | None:
        """Give the reason: MPS has no peak to reset."""
        return _NO_MPS_PEAK

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """None: see `untimed`."""
        return None

    def facts(self, device: str) -> AcceleratorFacts:
        """Name (from torch where it has one) and memory; the driver is part of macOS."""
        readings: dict[str, Reading[Any]] = {
            "name": _from_metal(lambda: str(torch.backends.mps.get_name())),
            "total_bytes": _largest_working_set(),
            "driver_version": Reading(None, "the driver is part of macOS"),
            "compute_capability": Reading(None, "Apple devices have no compute capability"),
        }
        facts = {name: reading.value for name, reading in readings.items()}
        return AcceleratorFacts(device, **facts, unavailable=reasons(readings))


def _mps_bytes() -> dict[str, Reading[int]]:
    return {
        "allocated_bytes": attempt(lambda: int(torch.mps.current_allocated_memory())),  # PyTorch's own count
        "reserved_bytes": _from_metal(lambda: int(torch.mps.driver_allocated_memory())),
    }


def _largest_working_set() -> Reading[int]:
    return _from_metal(lambda: int(torch.mps.recommended_max_memory()))


def _from_metal(read: Callable[[], T]) -> Reading[T]:
    return Reading(None, ELSEWHERE) if has_hands_off() else attempt(read)


ACCELERATOR: Final = MpsAccelerator
