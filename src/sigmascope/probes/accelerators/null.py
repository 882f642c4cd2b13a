"""The accelerator of a machine that has none."""

from collections.abc import Mapping
from dataclasses import dataclass

from sigmascope.probes.accelerators.protocol import AcceleratorEvent, AllocatorBytes
from sigmascope.records.host import AcceleratorFacts
from sigmascope.records.memory import AcceleratorMemory

MEMORY_FIELDS = ("allocated_bytes", "reserved_bytes", "total_bytes", "free_bytes", "driver_used_bytes")
FACT_FIELDS = ("name", "total_bytes", "driver_version", "compute_capability")


@dataclass(frozen=True, slots=True)
class NullAccelerator:
    """No device; every fact is None for the same reason."""

    absence: str = "no accelerator"
    kind: str = "cpu"

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
