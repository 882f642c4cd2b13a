"""Apple's GPUs."""

from collections.abc import Mapping

import torch

from sigmascope.probes.accelerators.protocol import AcceleratorEvent, AllocatorBytes
from sigmascope.probes.reading import Reading, attempt, reasons
from sigmascope.records.host import AcceleratorFacts
from sigmascope.records.memory import AcceleratorMemory

_NO_PEAK = "torch keeps no peak for MPS; sample the current use"
_UNIFIED = "MPS shares the machine's RAM and has no figure of its own"


class MpsAccelerator:
    """The one device of a Mac. `reserved` is what the Metal driver holds for this process, caches included.

    Attributes:
        untimed: Why there are no events.
    """

    kind = "mps"
    absence: str | None = None
    untimed = "torch waits for all queued work of MPS to tell the time between two events"

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
        readings = _read()
        readings["total_bytes"] = attempt(lambda: int(torch.mps.recommended_max_memory()))
        return AcceleratorMemory(
            device,
            readings["allocated_bytes"].value,
            readings["reserved_bytes"].value,
            readings["total_bytes"].value,
            unavailable=reasons(readings) | dict.fromkeys(("free_bytes", "driver_used_bytes"), _UNIFIED),
        )

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """What is allocated and reserved now; peaks are unknown."""
        readings = _read()
        return AllocatorBytes(readings["allocated_bytes"].value, readings["reserved_bytes"].value, None, None)

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None."""
        missing = {name.removesuffix("_bytes"): reason for name, reason in reasons(_read()).items()}
        return missing | dict.fromkeys(("peak_allocated", "peak_reserved"), _NO_PEAK)

    def reset_peak(self, device: str) -> str | None:
        """There is no peak to reset: gives the reason."""
        return _NO_PEAK

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """None: see `untimed`."""
        return None

    def facts(self, device: str) -> AcceleratorFacts:
        """Name (from torch where it has one) and memory; the driver is part of macOS."""
        name = attempt(lambda: str(torch.backends.mps.get_name()))
        total = attempt(lambda: int(torch.mps.recommended_max_memory()))
        readings: dict[str, Reading[str] | Reading[int]] = {"name": name, "total_bytes": total}
        unavailable = {n: reading.reason for n, reading in readings.items() if reading.reason is not None}
        unavailable["driver_version"] = "the driver is part of macOS"
        unavailable["compute_capability"] = "Apple devices have none"
        return AcceleratorFacts(device, name.value, total.value, unavailable=unavailable)


def _read() -> dict[str, Reading[int]]:
    return {
        "allocated_bytes": attempt(lambda: int(torch.mps.current_allocated_memory())),
        "reserved_bytes": attempt(lambda: int(torch.mps.driver_allocated_memory())),
    }
