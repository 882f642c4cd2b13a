"""What the checks measure, for the table at the end of `make gpu-check`."""

from collections.abc import Mapping
from typing import Final

import torch

Figure = float | int | str | None

FIGURES: Final[dict[str, dict[str, Figure]]] = {}
"""By what was measured: names and values."""


def measured(what: str, **values: Figure) -> None:
    """Put figures into the table."""
    FIGURES[what] = values


def about_the_device() -> dict[str, str | None]:
    """Which card and which software the figures are of."""
    there = torch.cuda.is_available()
    return {
        "name": torch.cuda.get_device_name() if there else "the CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": str(_cudnn_version()) if there else None,
    }


def _cudnn_version() -> int | None:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def as_table(figures: Mapping[str, Mapping[str, Figure]]) -> str:
    """A line for each figure."""
    width = max(len(what) for what in figures)
    lines = []
    for what, values in figures.items():
        told = ", ".join(f"{name} {_shown(value)}" for name, value in values.items())
        lines.append(f"{what:<{width}}  {told}")
    return "\n".join(lines)


def _shown(value: Figure) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
