"""The steps of a stage, one tuple per column."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Steps:
    """Columns of equal length, one entry a step.

    `started` counts from the beginning of the stage. A whole column that could not be measured is
    empty, with the reason in `unavailable`; a single reading that failed is `None`. `started` and
    `seconds` are always there.

    Raises:
        ValueError: A column is longer or shorter than `seconds`.
    """

    started: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    gpu_seconds: tuple[float | None, ...] = ()
    rss_bytes: tuple[int | None, ...] = ()
    allocated_bytes: tuple[int | None, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {
            "started": len(self.started),
            "gpu_seconds": len(self.gpu_seconds) or len(self),
            "rss_bytes": len(self.rss_bytes) or len(self),
            "allocated_bytes": len(self.allocated_bytes) or len(self),
        }
        for name, length in columns.items():
            if length != len(self):
                raise ValueError(f"the column {name} has {length} entries, seconds has {len(self)}")

    def __len__(self) -> int:
        return len(self.seconds)
