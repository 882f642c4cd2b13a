"""What a pipeline runs on, as far as choices depend on it."""

from dataclasses import dataclass
from typing import Final

import torch

from sigmascope import units
from sigmascope.probes import memory_snapshot
from sigmascope.probes.accelerators import Accelerator, detect_accelerator
from sigmascope.probes.reading import attempt

_BFLOAT16: Final = (8, 0)
_FLOAT8: Final = (8, 9)
"""Compute capabilities from which tensor cores multiply these (CUDA C++ Programming Guide, table of features)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, or the CPU. None: unknown.

    May be made by hand, to plan for a machine that is not at hand.

    Attributes:
        device: As torch calls it.
        name: Of the device.
        total_bytes: Its memory.
        free_bytes: Of that, what nobody uses now; None: not read, and then all of it counts.
        capability: (major, minor) of an NVIDIA device.
        ram_available_bytes: RAM that can be taken now.
        cpu_bfloat16: Whether the CPU multiplies bfloat16 (AMX or AVX512-BF16).
        absence: Why there is no accelerator.
    """

    device: str = "cpu"
    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    ram_available_bytes: int | None = None
    cpu_bfloat16: bool = False
    absence: str | None = None

    @property
    def kind(self) -> str:
        """The device's type: "cuda", "xpu", "mps", "cpu"."""
        return self.device.partition(":")[0]

    @property
    def is_accelerator(self) -> bool:
        """Whether it is not the CPU."""
        return self.kind != "cpu"

    def multiplies_bfloat16(self) -> bool:
        """Whether bfloat16 is fast on it; an NVIDIA device that does not tell counts as a recent one."""
        if not self.is_accelerator:
            return self.cpu_bfloat16
        return self.capability is None or self.capability >= _BFLOAT16

    def multiplies_float8(self) -> bool:
        """Whether its tensor cores multiply float8; unknown counts as no."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= _FLOAT8

    def __str__(self) -> str:
        if not self.is_accelerator:
            return f"the CPU ({self.absence})" if self.absence else "the CPU"
        named = self.device if self.name is None else f"{self.device} ({self.name})"
        return f"{named}, {units.mib(self.total_bytes)} MB"


def read_hardware(device: str | None = None, accelerator: Accelerator | None = None) -> Hardware:
    """The device that a pipeline is to run on. Never raises, and does not wake the device.

    Args:
        device: Such as "cuda:1" or "cpu"; None: what torch would use.
        accelerator: Where to read devices; None finds out.
    """
    accelerator = detect_accelerator() if accelerator is None else accelerator
    snapshot = memory_snapshot(accelerator)
    ram = snapshot.ram_available_bytes
    found = accelerator.current_device() if device is None else _numbered(device)
    if found is None or found.startswith("cpu"):
        absence = accelerator.absence if device is None else None
        return Hardware(
            "cpu", ram_available_bytes=ram, cpu_bfloat16=_cpu_multiplies_bfloat16(), absence=absence
        )
    facts, memory = accelerator.facts(found), snapshot.accelerator(found)
    return Hardware(
        found,
        facts.name,
        facts.total_bytes or memory.total_bytes,
        _free(memory.free_bytes, memory.reserved_bytes, memory.allocated_bytes),
        _capability(facts.compute_capability),
        ram,
    )


def _numbered(device: str) -> str:
    return device if ":" in device or device == "cpu" else f"{device}:0"


def _free(free: int | None, reserved: int | None, allocated: int | None) -> int | None:
    """What the allocator holds without using it is as good as free."""
    return None if free is None else free + max(0, (reserved or 0) - (allocated or 0))


def _capability(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _cpu_multiplies_bfloat16() -> bool:
    found = attempt(lambda: dict(torch.cpu.get_capabilities()))
    return any((found.value or {}).get(name) for name in ("amx_bf16", "avx512_bf16"))
