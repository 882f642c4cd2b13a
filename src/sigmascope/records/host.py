"""The machine and the software that a run was made on."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """One accelerator device."""

    device: str
    name: str | None = None
    total_bytes: int | None = None
    driver_version: str | None = None
    compute_capability: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """CPU, RAM, system, Python, library versions, and every accelerator."""

    cpu_model: str | None = None
    cpu_count_logical: int | None = None
    cpu_count_physical: int | None = None
    ram_total_bytes: int | None = None
    os: str | None = None
    python_version: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    accelerators: tuple[AcceleratorFacts, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
