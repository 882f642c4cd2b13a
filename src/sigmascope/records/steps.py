"""The steps of a stage, one tuple per column."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Steps:
    """Columns of equal length, one entry a step.

    `started` counts from the beginning of the stage. A whole column that could not be measured is
    empty, with the reason in `unavailable`; a single reading that failed is `None`.
    """

    started: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    gpu_seconds: tuple[float | None, ...] = ()
    rss_bytes: tuple[int | None, ...] = ()
    allocated_bytes: tuple[int | None, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seconds)
