"""Weight changes whose rank can be lowered: given by their factors, or formed as a whole."""

from functools import cached_property
from math import sqrt
from typing import Final, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.shapes import max_rank
from sigmascope.lora.spectrum import Spectrum

_CANCELLED: Final = 1e-10
"""Share of ‖ΔW‖² below which ‖a‖² − 2<a,b> + ‖b‖² is mostly rounding, though it is summed in float64."""


class ReducibleChange(Protocol):
    """One weight's change, to be stored at a rank that its singular values decide."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(out, in) or (out, in, kh, kw)."""
        ...

    @property
    def norm(self) -> float:
        """‖ΔW‖."""
        ...

    def spectrum(self, wanted: int) -> Spectrum:
        """At least the `wanted` largest singular values, or all that there are."""
        ...

    def cut(self, rank: int, dtype: torch.dtype) -> LoraFactors:
        """The nearest change of this rank (at least 1), rounded to a storage dtype, with alpha = its rank.

        Raises:
            NonFiniteError: The factors do not fit `dtype`.
        """
        ...

    def error(self, stored: LoraFactors) -> float:
        """‖ΔW − stored‖, of the rounded factors."""
        ...


class FactoredChange:
    """A change given by LoRA factors: QR of both and the SVD of their small core say all, in float64.

    Args:
        factors: The change.
    """

    def __init__(self, factors: LoraFactors) -> None:
        self.factors = factors

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """See `ReducibleChange`."""
        return self.factors.weight_shape

    @cached_property
    def norm(self) -> float:
        """From two r×r Gram matrices."""
        return self.factors.frobenius_norm()

    def spectrum(self, wanted: int) -> Spectrum:
        """Complete and exact, whatever is wanted."""
        return Spectrum.of_factors(self._svd[1], self.weight_shape)

    def cut(self, rank: int, dtype: torch.dtype) -> LoraFactors:
        """The nearest change of this rank; the factors as they are where nothing has to be cut or rounded."""
        if self.factors.rank <= min(rank, max_rank(self.weight_shape)):
            same = _with_unit_scale_exactly(self.factors, dtype)
            if same is not None:
                return same
        left, sigma, right = self._svd
        kept = min(rank, len(sigma))
        root = sigma[:kept].sqrt()
        return stored_factors(left[:, :kept] * root, root[:, None] * right[:kept], dtype, self.weight_shape)

    def error(self, stored: LoraFactors) -> float:
        """From Gram matrices; by QR where those cancel."""
        return difference_norm(self.factors, stored)

    @cached_property
    def _svd(self) -> tuple[Float[Tensor, "out k"], Float[Tensor, " k"], Float[Tensor, "k inner"]]:
        left, core, right = self.factors.orthogonal_form()
        u, sigma, vh = torch.linalg.svd(core, full_matrices=False)
        return left @ u, sigma, vh @ right.mT


def difference_norm(one: LoraFactors, other: LoraFactors) -> float:
    """‖ΔW₁ − ΔW₂‖ of two changes of one weight, without forming either.

    ‖a‖² − 2<a,b> + ‖b‖² from Gram matrices loses what is below 10⁻⁸ of the norms; there the difference is
    written as one pair of factors, whose QR does not cancel.

    Raises:
        ModelMismatchError: They change weights of different shape.
    """
    energies = one.inner(one), other.inner(other)
    squared = energies[0] - 2.0 * one.inner(other) + energies[1]
    if squared > _CANCELLED * max(energies):
        return sqrt(squared)
    wide = [pair.to(dtype=torch.float64) for pair in (one, other)]
    _, core, _ = LoraFactors.concatenate(wide, [1.0, -1.0]).orthogonal_form()
    return float(torch.linalg.matrix_norm(core))


def stored_factors(
    up: Float[Tensor, "out r"],
    down: Float[Tensor, "r inner"],
    dtype: torch.dtype,
    weight_shape: tuple[int, ...],
) -> LoraFactors:
    """Round factors to a storage dtype, with alpha = rank.

    Raises:
        NonFiniteError: A value does not fit.
    """
    pair = LoraFactors(up.to(dtype), down.to(dtype), float(up.shape[1]), weight_shape)
    if not bool(torch.isfinite(pair.up).all() and torch.isfinite(pair.down).all()):
        raise NonFiniteError(
            f"factors as large as {float(max(up.abs().max(), down.abs().max())):.3g} do not fit {dtype}.",
            hint="Use --save_precision float or bf16.",
        )
    return pair


def _with_unit_scale_exactly(factors: LoraFactors, dtype: torch.dtype) -> LoraFactors | None:
    """The same change in `dtype` with alpha = rank, or None where that would round any value."""
    exact_up, exact_down = factors.up.to(torch.float64) * factors.scale, factors.down.to(torch.float64)
    up, down = exact_up.to(dtype), factors.down.to(dtype)
    kept = torch.equal(up.to(torch.float64), exact_up) and torch.equal(down.to(torch.float64), exact_down)
    return LoraFactors(up, down, float(factors.rank), factors.weight_shape) if kept else None
