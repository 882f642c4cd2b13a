"""What two LoRAs on one model share, in figures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KeyOverlap:
    """Two changes of one weight.

    Attributes:
        key: The weight.
        columns: Mean squared cosine of the principal angles between the spaces that they write to: 1 where one
            holds the other, 0 where they are orthogonal.
        rows: The same of the spaces that they read from.
        overall: The mean of both.
        chance: What `overall` would be for two random changes of these ranks.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖): 1 the same change, −1 its opposite.
        column_angles: In degrees, rising, as `row_angles` are; none where angles were not asked for.
        ranks: How many directions each has.
        norms: ‖ΔA‖ and ‖ΔB‖.
    """

    key: str
    columns: float
    rows: float
    overall: float
    chance: float
    cosine: float
    column_angles: tuple[float, ...]
    row_angles: tuple[float, ...]
    ranks: tuple[int, int]
    norms: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """The overlap as JSON values."""
        listed = ("column_angles", "row_angles", "ranks", "norms")
        return asdict(self) | {name: list(getattr(self, name)) for name in listed}


@dataclass(frozen=True, slots=True)
class LoraOverlap:
    """Two LoRAs on one model.

    Attributes:
        overall: 0 to 1: each shared weight's overlap, weighted by how much of both LoRAs is in it. 1 for a LoRA
            and itself or a scaled copy, 0 without a shared direction or weight. None where it cannot be had.
        columns: The same of the spaces that they write to.
        rows: The same of the spaces that they read from.
        chance: What `overall` would be for random changes of the same ranks and sizes.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖) over all weights.
        keys: Each shared weight that could be compared.
        only_a: Weights that the first alone changes.
        only_b: Weights that the second alone changes.
        unavailable: Why a weight, or a figure, could not be compared.
    """

    overall: float | None
    columns: float | None
    rows: float | None
    chance: float | None
    cosine: float | None
    keys: tuple[KeyOverlap, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The overlap as JSON values."""
        return asdict(self) | {
            "keys": [key.as_dict() for key in self.keys],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "unavailable": dict(self.unavailable),
        }
