"""What an attempt is expected to take, before it is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sigmascope.pipeline.strategies import Tiles
from sigmascope.pipeline.work import Work
from sigmascope.records.latents import Basis
from sigmascope.records.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Expected:
    """Peak bytes beyond what is in use when the attempt begins; None with the reason in `unavailable`."""

    nbytes: int | None = None
    basis: Basis | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def expected(work: Work, strategy: Strategy, tiles: Tiles | None) -> Expected:
    """What a strategy is expected to take."""
    return Expected()


def why_not_fitting(expectation: Expected, device: torch.device) -> str | None:
    """The reason with numbers, if a device cannot hold that much beside what it holds."""
    return None
