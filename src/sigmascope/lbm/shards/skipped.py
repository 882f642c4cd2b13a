"""What could not be used of the training data: counted, and the first few named."""

import logging
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger(__name__)

NAMED = 20
"""So many skipped samples are named in the report."""
LOGGED = 5
"""So many are logged when they are met; the rest only count."""


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that was left out, or the rest of a shard that could not be read (`key` is None), and why."""

    shard: str
    key: str | None
    reason: str

    def __str__(self) -> str:
        place = self.shard if self.key is None else f"{self.shard}, sample {self.key}"
        return f"{place}: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"shard": self.shard, "key": self.key, "reason": self.reason}


@dataclass
class SkippedSamples:
    """Every sample that was left out, counted once however many epochs met it.

    Attributes:
        first: The first few, as they were met.
    """

    first: list[SkippedSample] = field(default_factory=list)
    _known: set[tuple[str, str | None]] = field(default_factory=set, repr=False)

    @property
    def count(self) -> int:
        """How many different samples were left out."""
        return len(self._known)

    def add(self, sample: SkippedSample) -> None:
        """Count a sample unless it is known, and log it while there are few."""
        if (sample.shard, sample.key) in self._known:
            return
        self._known.add((sample.shard, sample.key))
        if len(self.first) < NAMED:
            self.first.append(sample)
        if self.count <= LOGGED:
            _log.warning("Skipped %s", sample)
        if self.count == LOGGED:
            _log.warning("Further samples that cannot be used are counted, not named.")

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"count": self.count, "first": [sample.as_dict() for sample in self.first]}
