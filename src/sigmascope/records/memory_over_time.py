"""Memory as a curve, from what a background thread saw during a stage."""

from dataclasses import dataclass
from typing import Final

from sigmascope.records.run import Stage
from sigmascope.records.structure import from_plain

MEMORY_OVER_TIME: Final = "memory_over_time"
"""The fact of an outermost stage in which `MemoryCurve` lies, by what it is of."""

PROCESS: Final = "process"
SYSTEM: Final = "system"


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
