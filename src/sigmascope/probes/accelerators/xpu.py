"""Intel devices."""

from typing import Any

import torch

from sigmascope.probes.accelerators.caching import CachingAccelerator, device_index
from sigmascope.probes.accelerators.null import FACT_FIELDS
from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.host import AcceleratorFacts


class XpuAccelerator(CachingAccelerator):
    """Intel GPUs; torch's functions for them mirror CUDA's."""

    def __init__(self) -> None:
        super().__init__("xpu", torch.xpu, "_xpu_memoryStats")

    def facts(self, device: str) -> AcceleratorFacts:
        """Name, memory and driver; nothing before the host has initialised the device."""
        if not self.is_initialized():
            return _nothing_known(device, "xpu is not initialised in this process")
        reading: Reading[Any] = attempt(lambda: torch.xpu.get_device_properties(device_index(device)))
        properties = reading.value
        if properties is None:
            return _nothing_known(device, reading.reason or "unknown")
        driver = attempt(lambda: str(properties.driver_version))
        unavailable = {"compute_capability": "Intel devices have none"}
        if driver.reason is not None:
            unavailable["driver_version"] = driver.reason
        return AcceleratorFacts(
            device,
            str(properties.name),
            int(properties.total_memory),
            driver.value,
            unavailable=unavailable,
        )


def _nothing_known(device: str, reason: str) -> AcceleratorFacts:
    return AcceleratorFacts(device, unavailable=dict.fromkeys(FACT_FIELDS, reason))
