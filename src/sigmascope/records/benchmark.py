"""What a benchmark ran: the settings of its cases, and what each repeat says of itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

BENCHMARK: Final = "benchmark"
"""The fact of a run under which a benchmark notes what it ran."""

OTHERS: Final = "others_cpu_share"
"""Of what it notes: the share of all processor threads that other programs used meanwhile, 0 to 1."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One setting that is measured by itself. None: the pipeline's own.

    Attributes:
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        batch: Pictures, or videos, that one generation makes.
        steps: Denoising steps.
        frames: Of a video.
    """

    width: int | None = None
    height: int | None = None
    batch: int = 1
    steps: int | None = None
    frames: int | None = None

    @property
    def label(self) -> str:
        """Such as "1024x1024-b1-s20": the beginning of its files' names, and what `compare` sorts runs by."""
        size = None if self.width is None or self.height is None else f"{self.width}x{self.height}"
        parts = (
            size,
            f"b{self.batch}",
            None if self.frames is None else f"f{self.frames}",
            None if self.steps is None else f"s{self.steps}",
        )
        return "-".join(part for part in parts if part is not None)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values, with the label as `work`."""
        return {"work": self.label, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Made:
    """What one generation gave. None: it cannot be told from what was given.

    Attributes:
        samples: Pictures, or videos.
        width: In pixels.
        height: In pixels.
        frames: Of each video.
    """

    samples: int
    width: int | None = None
    height: int | None = None
    frames: int | None = None


def others_of(facts: Mapping[str, Any]) -> float | None:
    """How busy others kept the processor during a run, of its facts; None: not known."""
    noted = facts.get(BENCHMARK)
    found = noted.get(OTHERS) if isinstance(noted, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def work_of(facts: Mapping[str, Any]) -> str:
    """What work a run did, of its facts: the label of its case; empty for a run that no benchmark made."""
    noted = facts.get(BENCHMARK)
    found = noted.get("work") if isinstance(noted, Mapping) else None
    return found if isinstance(found, str) else ""
