"""Where an epoch's stream stands, as plain numbers that a checkpoint can keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmascope.errors import ConfigError


@dataclass(frozen=True)
class DataPosition:
    """How far one process has come in one epoch.

    Attributes:
        epoch: From 0.
        samples: How many samples of the epoch's stream (of all processes) have been dealt with.
        pending: Numbers of those among them that still wait for their batch to fill.
    """

    epoch: int
    samples: int
    pending: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"epoch": self.epoch, "samples": self.samples, "pending": list(self.pending)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "DataPosition":
        """Read what `to_dict` gave.

        Raises:
            ConfigError: It is something else.
        """
        try:
            numbers = [data["epoch"], data["samples"], *data["pending"]]
        except (KeyError, TypeError) as error:
            raise _no_position(data) from error
        if any(type(number) is not int or number < 0 for number in numbers):
            raise _no_position(data)
        epoch, samples, *pending = numbers
        if any(number >= samples for number in pending):
            raise _no_position(data)
        return cls(epoch, samples, tuple(pending))


def dealt_anew(positions: Sequence[DataPosition], process: int, processes: int) -> DataPosition:
    """Where one process begins when an epoch that some processes have begun goes on with another number of them.

    Every sample that none of them has used comes to one process, and none that has been used comes again.

    Args:
        positions: Of the processes before, in order, at the same step.
        process: The one that asks, from 0.
        processes: How many share the rest.
    """
    shared, reached = len(positions), max(position.samples for position in positions)
    behind = range(min(position.samples for position in positions), reached)
    left = {number for number in behind if number >= positions[number % shared].samples}
    left.update(number for position in positions for number in position.pending)
    mine = sorted(number for number in left if number % processes == process)
    return DataPosition(positions[0].epoch, reached, tuple(mine))


def _no_position(data: object) -> ConfigError:
    return ConfigError(
        f"data position: expected epoch, samples and pending (numbers below samples), got {data!r:.200}.",
        hint="Take it from a checkpoint of this version, or begin the epoch anew.",
    )
