"""What is known of memory at one moment, between two moments, and at its highest.

Bytes inside; MiB only at the border (`MemoryImpact.as_dict`, SPEC section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AcceleratorMemory:
    """One accelerator device at one moment. `None` facts have their reason in `unavailable`."""

    device: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver_used_bytes: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """System RAM, this process, and every accelerator at one moment.

    `current_device` is the accelerator that work went to by default.
    """

    ram_total_bytes: int | None = None
    ram_used_bytes: int | None = None
    ram_available_bytes: int | None = None
    process_rss_bytes: int | None = None
    accelerators: tuple[AcceleratorMemory, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    current_device: str | None = None


@dataclass(frozen=True, slots=True)
class AcceleratorPeak:
    """Highest memory seen on one device, with seconds since the stage began."""

    device: str
    allocated_bytes: int | None = None
    allocated_at_seconds: float | None = None
    reserved_bytes: int | None = None
    reserved_at_seconds: float | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Highest memory seen while a stage was open, with seconds since the stage began."""

    rss_bytes: int | None = None
    rss_at_seconds: float | None = None
    accelerators: tuple[AcceleratorPeak, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryImpact:
    """Memory before and after a stage."""

    baseline: MemorySnapshot
    current: MemorySnapshot
