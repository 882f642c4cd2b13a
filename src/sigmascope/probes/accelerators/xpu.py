"""Intel GPUs."""

from typing import Any, Final

import torch

from sigmascope.probes.accelerators.accelerator import (
    ELSEWHERE,
    CachingAccelerator,
    NullAccelerator,
    device_index,
)
from sigmascope.probes.reading import Reading, attempt, reasons
from sigmascope.records.run import AcceleratorFacts
from sigmascope.threads import has_hands_off


class XpuAccelerator(CachingAccelerator):
    """Intel GPUs; torch's functions for them mirror CUDA's."""

    def __init__(self) -> None:
        super().__init__("xpu", torch.xpu)

    def facts(self, device: str) -> AcceleratorFacts:
        """Name, memory and driver; nothing before the host has initialised the device."""
        if not self.is_initialized():
            return NullAccelerator("xpu is not initialised in this process").facts(device)
        if has_hands_off():
            return NullAccelerator(ELSEWHERE).facts(device)
        found: Reading[Any] = attempt(lambda: torch.xpu.get_device_properties(device_index(device)))
        properties = found.value
        if properties is None:
            return NullAccelerator(found.reason or "unknown").facts(device)
        driver = attempt(lambda: str(properties.driver_version))
        unavailable = {
            "compute_capability": "Intel devices have no compute capability",
            **reasons({"driver_version": driver}),
        }
        name, total = str(properties.name), int(properties.total_memory)
        return AcceleratorFacts(device, name, total, driver.value, unavailable=unavailable)


ACCELERATOR: Final = XpuAccelerator
