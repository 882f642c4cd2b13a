"""What a background thread saw during a stage: how busy each accelerator was, and memory as a curve.

Both are facts of the stage. Beside how busy a device was stand how warm it was and whether it was held back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sigmascope.records.run import Stage
from sigmascope.records.serialization import from_plain

UTILIZATION: Final = "utilization"
"""The fact of a stage in which `DeviceUtilization` lies, by device."""

MEMORY_OVER_TIME: Final = "memory_over_time"
"""The fact of an outermost stage in which `MemoryCurve` lies, by what it is of."""

PROCESS: Final = "process"
SYSTEM: Final = "system"
"""What curves are of, beside devices."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """The mean of a figure over a stage's samples, and its highest with seconds since the stage began."""

    mean: float
    highest: float
    highest_at_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceUtilization:
    """One device during one stage, from samples five times a second.

    A sample of business is the driver's mean over its last period (a sixth of a second to a second), so that the
    first of a stage may tell of what was right before it.

    Attributes:
        device: As torch names it.
        samples: How many.
        busy_percent: Share of time in which a kernel ran. 100 says that it never waited, not that it was used well.
        memory_busy_percent: Share of time in which device memory was read or written.
        temperature_celsius: Of the chip.
        power_watts: Of the board.
        heat_percent: Share of samples in which heat lowered the clocks.
        power_cap_percent: Share of samples in which the limit on power did.
        at_seconds: When the entries of `busy_series` begin, since the stage began.
        busy_series: Business over time, at most 256 entries: of a long stage each is a mean of several samples.
        unavailable: Why a figure is None.
    """

    device: str
    samples: int = 0
    busy_percent: Gauge | None = None
    memory_busy_percent: Gauge | None = None
    temperature_celsius: Gauge | None = None
    power_watts: Gauge | None = None
    heat_percent: float | None = None
    power_cap_percent: float | None = None
    at_seconds: tuple[float, ...] = ()
    busy_series: tuple[float, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


def utilization_of(stage: Stage) -> dict[str, DeviceUtilization]:
    """What is known of the accelerators' business during a stage, by device; empty: see `stage.unavailable`.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    plain = stage.facts.get(UTILIZATION) or {}
    return {device: from_plain(one, DeviceUtilization, UTILIZATION) for device, one in plain.items()}


def readable_utilization(stage: Stage) -> list[DeviceUtilization]:
    """The same for what shows a record: nothing where the fact of that name is a caller's own, or damaged."""
    try:
        return list(utilization_of(stage).values())
    except (AttributeError, TypeError, ValueError):
        return []


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Readings, at most ten a second; of a long stage each entry is the highest of several, at most 256 in all.

    Attributes:
        at_seconds: When each was read, since the stage began.
        nbytes: Resident bytes of the process, bytes of RAM that the machine uses, or bytes that PyTorch's allocator has
            given out on a device.

    Raises:
        ValueError: The two are not equally long.
    """

    at_seconds: tuple[float, ...]
    nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.at_seconds) != len(self.nbytes):
            raise ValueError(f"there are {len(self.at_seconds)} times and {len(self.nbytes)} readings")


def memory_over_time(stage: Stage) -> dict[str, MemoryCurve]:
    """The curves of an outermost stage: of the "process", the "system", and each device by its name.

    Args:
        stage: One that was opened outside of all others. Those inside have none of their own, and give nothing.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    plain = stage.facts.get(MEMORY_OVER_TIME) or {}
    return {name: from_plain(one, MemoryCurve, MEMORY_OVER_TIME) for name, one in plain.items()}


def readable_curves(stage: Stage) -> dict[str, MemoryCurve]:
    """The same for what shows a record: nothing where the fact of that name is a caller's own, or damaged."""
    try:
        return memory_over_time(stage)
    except (AttributeError, TypeError, ValueError):
        return {}
