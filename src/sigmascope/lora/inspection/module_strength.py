"""How strong one module of a LoRA is, and in how many directions."""

from dataclasses import asdict, dataclass
from math import prod, sqrt
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspection.strength import effective_rank, stable_rank
from sigmascope.lora.models.block_names import block_of_module
from sigmascope.lora.norms import frobenius_norm, root_sum_square
from sigmascope.lora.precision import in_double

Problem = Literal["not_finite", "needs_base"]


@dataclass(frozen=True, slots=True)
class ModuleStrength:
    """One module.

    Attributes:
        name: As the file names it.
        kind: `lora` for plain factors, else `loha`, `lokr`, `tucker`, `dora`, `diff` or `set`.
        shape: Of the weight that it changes.
        rank: Of its factors; None where it has none.
        parameters: Number of stored values.
        alpha: As stored; None unless the factors are plain.
        scale: What up·down is multiplied with, alpha / rank; None unless the factors are plain.
        dtype: Of plain factors, such as `float16`.
        norm: ‖ΔW‖ at strength 1; None where there is a problem.
        singular_values: All min(rank, out, in) of ΔW, falling; empty unless the factors are plain, and where
            they were not asked for.
        dead_columns: Columns of up (with their rows of down) that change nothing, since one of the two is zero.
        problem: `not_finite`: it holds NaN or Inf. `needs_base`: what it changes depends on the base weight.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rank: int | None
    parameters: int
    alpha: float | None = None
    scale: float | None = None
    dtype: str | None = None
    norm: float | None = None
    singular_values: tuple[float, ...] = ()
    dead_columns: int = 0
    problem: Problem | None = None

    @property
    def block(self) -> str:
        """The block that the module is in, the same in every format."""
        return block_of_module(self.name)

    @property
    def size(self) -> float | None:
        """The root mean square of ΔW's values, ‖ΔW‖ / √(out·in): comparable between layers of any shape."""
        return None if self.norm is None else self.norm / sqrt(max(prod(self.shape), 1))

    @property
    def largest(self) -> float | None:
        """σ₁, the most that the change can add to an input of length 1."""
        return self.singular_values[0] if self.singular_values else None

    @property
    def stable_rank(self) -> float | None:
        """See `strength.stable_rank`."""
        return stable_rank(self._values) if self.singular_values else None

    @property
    def effective_rank(self) -> float | None:
        """See `strength.effective_rank`."""
        return effective_rank(self._values) if self.singular_values else None

    def as_dict(self, *, spectrum: bool = False) -> dict[str, Any]:
        """The module as JSON values.

        Args:
            spectrum: Also all singular values.
        """
        fields = asdict(self)
        values = fields.pop("singular_values")
        derived = ("block", "size", "largest", "stable_rank", "effective_rank")
        fields |= {name: getattr(self, name) for name in derived}
        return fields | {"singular_values": list(values)} if spectrum else fields

    @property
    def _values(self) -> Float[Tensor, " k"]:
        return torch.tensor(self.singular_values, dtype=torch.float64)


def strength_of_factors(name: str, factors: LoraFactors, *, spectrum: bool = True) -> ModuleStrength:
    """Measure plain factors from r×r matrices, without forming ΔW.

    Args:
        name: Of the module.
        factors: Its factors.
        spectrum: Also the singular values, which at a rank above a thousand take a second.
    """
    values = factors.singular_values().tolist() if spectrum else []
    return ModuleStrength(
        name=name,
        kind="lora",
        shape=factors.weight_shape,
        rank=factors.rank,
        parameters=factors.parameters,
        alpha=factors.alpha,
        scale=factors.scale,
        dtype=str(factors.up.dtype).removeprefix("torch."),
        norm=root_sum_square(values) if spectrum else factors.frobenius_norm(),
        singular_values=tuple(values),
        dead_columns=_dead_columns(factors),
    )


def strength_of_delta(
    name: str, kind: str, delta: Tensor, rank: int | None, parameters: int
) -> ModuleStrength:
    """Measure a change that is more than up and down, by forming it."""
    return ModuleStrength(name, kind, tuple(delta.shape), rank, parameters, norm=frobenius_norm(delta))


def _dead_columns(factors: LoraFactors) -> int:
    columns = in_double(factors.up).abs().amax(dim=0)
    rows = in_double(factors.down).abs().amax(dim=1)
    return int(((columns == 0.0) | (rows == 0.0)).sum())
