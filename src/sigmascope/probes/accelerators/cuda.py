"""CUDA and HIP devices, before the host has used them too: NVML is asked then."""

import os
import re
from pathlib import Path
from typing import Any, Final

import torch

from sigmascope.probes.accelerators.accelerator import (
    ELSEWHERE,
    UNKNOWN,
    AllocatorBytes,
    CachingAccelerator,
    device_index,
    is_capturing,
)
from sigmascope.probes.nvml import identify, nvml_memory, read_nvml
from sigmascope.probes.reading import Reading, attempt
from sigmascope.records.run import AcceleratorFacts
from sigmascope.threads import has_hands_off

_NVIDIA_VERSION_FILE = Path("/proc/driver/nvidia/version")
_AMD_VERSION_FILE = Path("/sys/module/amdgpu/version")
_NO_CACHING_VARIABLES = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
UNCACHED: Final = "without caching (PYTORCH_NO_CUDA_MEMORY_CACHING) PyTorch counts no allocations"
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class CudaAccelerator(CachingAccelerator):
    """CUDA and HIP devices."""

    no_utilization: str | None = None

    def __init__(self) -> None:
        super().__init__("cuda", torch.cuda)
        self._counted: dict[tuple[str | None, ...], Reading[int]] = {}

    def facts(self, device: str) -> AcceleratorFacts:
        """Name, memory, driver and compute capability; from NVML before the host has initialised CUDA."""
        nvml = read_nvml(device)
        driver = _driver_version(nvml.driver_version)
        unavailable = {} if driver.reason is None else {"driver_version": driver.reason}
        if has_hands_off() or not self.is_initialized():
            why = ELSEWHERE if self.is_initialized() else "CUDA is not initialised in this process"
            unavailable["compute_capability"] = why
            for name in ("name", "total_bytes"):
                if name in nvml.unavailable:
                    unavailable[name] = f"{why}; NVML: {nvml.unavailable[name]}"
            return AcceleratorFacts(
                device, nvml.name, nvml.total_bytes, driver.value, unavailable=unavailable
            )
        properties: Reading[Any] = attempt(lambda: torch.cuda.get_device_properties(device_index(device)))
        if properties.value is None:
            reason = properties.reason or "unknown"
            unavailable |= dict.fromkeys(("name", "total_bytes", "compute_capability"), reason)
            return AcceleratorFacts(device, driver_version=driver.value, unavailable=unavailable)
        return AcceleratorFacts(
            device,
            str(properties.value.name),
            int(properties.value.total_memory),
            driver.value,
            capability_of(properties.value),
            unavailable,
        )

    def _free_and_total(self, device: str) -> Reading[tuple[int, int]]:
        own = super()._free_and_total(device)
        if own.value is not None:
            return own
        nvml = nvml_memory(device)
        return nvml if nvml.value is not None else Reading(None, f"{own.reason}; NVML: {nvml.reason}")

    def _count_without_initialising(self) -> int:
        """What NVML or AMD SMI count; -1 if neither can. `torch.cuda.device_count` would ask CUDA then.

        They are asked anew only when what is visible changes: loading them takes a tenth of a millisecond and more.
        """
        visible = tuple(os.environ.get(name) for name in _VISIBILITY_VARIABLES)
        if visible not in self._counted:
            name = "_device_count_amdsmi" if torch.version.hip else "_device_count_nvml"
            self._counted[visible] = attempt(lambda: int(getattr(torch.cuda, name)()))
        count = self._counted[visible].value
        return -1 if count is None else count

    def _has_context(self, index: int) -> bool:
        ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        has_context = True if ask is None else bool(ask(index))
        if has_context and not is_capturing(self.kind):
            attempt(lambda: identify(index))
        return has_context

    def _figures(self, index: int) -> AllocatorBytes:
        if has_hands_off() and _is_driver_s_allocator():
            return UNKNOWN  # PyTorch counts what its own allocator does; of the driver's it asks the driver
        figures = super()._figures(index)
        return UNKNOWN if figures.reserved == 0 and _is_uncached() else figures

    def _why_no_statistics(self, device: str) -> str:
        if _is_uncached():
            return UNCACHED
        if _is_driver_s_allocator() and not has_hands_off():
            return "the cudaMallocAsync allocator does not report it"
        return super()._why_no_statistics(device)


def _is_driver_s_allocator() -> bool:
    return attempt(torch.cuda.get_allocator_backend).value == "cudaMallocAsync"


def _is_uncached() -> bool:
    """Whether the host has switched caching off: PyTorch counts no allocation then, and its statistics stay 0."""
    return any(os.environ.get(name) for name in _NO_CACHING_VARIABLES)


def _driver_version(from_nvml: str | None) -> Reading[str]:
    """Version of the kernel driver: NVML's word, or what the loaded module says of itself."""
    if from_nvml is not None:
        return Reading(from_nvml)
    if torch.version.hip:
        return attempt(lambda: _AMD_VERSION_FILE.read_text().strip())
    text = attempt(_NVIDIA_VERSION_FILE.read_text)
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text.value or "")
    return (
        Reading(version[1])
        if version
        else Reading(None, text.reason or "the driver's version file names no version")
    )


def capability_of(properties: Any) -> str:
    """The compute capability of an NVIDIA device, such as "8.9"; the architecture of an AMD device."""
    if torch.version.hip:
        return str(properties.gcnArchName)
    return f"{properties.major}.{properties.minor}"


ACCELERATOR: Final = CudaAccelerator
