"""What Sigmascope asks of an accelerator, whatever its maker."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from sigmascope.records.host import AcceleratorFacts
from sigmascope.records.memory import AcceleratorMemory


class AllocatorBytes(NamedTuple):
    """PyTorch's allocator on one device, in bytes. None: unknown, see `Accelerator.unavailable`."""

    allocated: int | None
    reserved: int | None
    peak_allocated: int | None
    peak_reserved: int | None


@runtime_checkable
class AcceleratorEvent(Protocol):
    """A mark on a device's stream of work. Nothing here waits for the device, and nothing raises."""

    def record(self) -> bool:
        """Set the mark after the work queued so far; False if it could not be set. May be repeated."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def elapsed_seconds(self, end: Any) -> float | None:
        """Device time from this mark to `end`, another of the same kind; None unless both are passed."""
        ...


@runtime_checkable
class Accelerator(Protocol):
    """One kind of accelerator and all its devices, named as torch names them ("cuda:0").

    No method raises, waits for the device, or initialises it: a monitor is a guest. One that has no events may have an
    attribute `untimed` that says why.
    """

    @property
    def kind(self) -> str:
        """Device type as torch has it: "cuda" (HIP too), "xpu", "mps"; "cpu" when there is no accelerator."""
        ...

    @property
    def absence(self) -> str | None:
        """Why there is no accelerator, when there is none."""
        ...

    def device_count(self) -> int:
        """Devices visible to this process."""
        ...

    def devices(self) -> list[str]:
        """Their names, in order."""
        ...

    def current_device(self) -> str | None:
        """The device that work goes to by default; None when there is none."""
        ...

    def memory(self, device: str) -> AcceleratorMemory:
        """Memory on `device` now: the allocator's view and the driver's."""
        ...

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        """The allocator's figures alone, as cheap as they come. Peaks are since `reset_peak`."""
        ...

    def unavailable(self, device: str) -> Mapping[str, str]:
        """The reason for each field of `allocated_and_peak` that is None, by field name."""
        ...

    def reset_peak(self, device: str) -> str | None:
        """Start peaks anew from the current use. Gives the reason if that is not possible."""
        ...

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        """A mark for timing on `device` (None: the current one); None if there is no such thing."""
        ...

    def facts(self, device: str) -> AcceleratorFacts:
        """Name, memory, driver and generation of `device`."""
        ...


def why_no_devices(accelerator: Accelerator) -> str:
    """The reason to record when `accelerator.devices()` is empty."""
    waiting = f"the devices of {accelerator.kind} cannot be counted before this process uses one"
    return accelerator.absence or waiting
