"""What became of a module whose rank was lowered."""

from dataclasses import dataclass
from typing import Any, Literal

from sigmascope.lora.models.block_names import block_of_module

LeftOut = Literal["excluded", "rank_0", "no_change"]


@dataclass(frozen=True, slots=True)
class ReducedModule:
    """What became of one module.

    Attributes:
        name: In the file that is written.
        shape: Of the weight that it changes.
        old_rank: Before, of all LoRAs together where several are combined; None where it had none.
        rank: As stored; 0 where it is left out.
        norm: ‖ΔW‖ before.
        error_norm: ‖ΔW − up·down‖ of the stored factors; ‖ΔW‖ where it is left out.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1.
        left_out: Why it is, if it is. `no_change`: ΔW is zero.
    """

    name: str
    shape: tuple[int, ...]
    old_rank: int | None
    rank: int
    norm: float
    error_norm: float
    kept_energy: float
    left_out: LeftOut | None = None

    @property
    def block(self) -> str:
        """The block that the module is in."""
        return block_of_module(self.name)

    @property
    def relative_error(self) -> float | None:
        """`error_norm` / `norm`; None for a change that is zero."""
        return self.error_norm / self.norm if self.norm > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        names = ("name", "shape", "old_rank", "rank", "norm", "error_norm", "kept_energy", "left_out")
        return {name: getattr(self, name) for name in names} | {"relative_error": self.relative_error}
