"""Weight changes that can be cut to any rank, given as factors or as a whole, with the exact error.

`truncatable` chooses the quicker way: QR of both factors and the SVD of their small core, or ΔW formed and
decomposed as far as is asked. In a metric the factors are weighed first, cut there, and mapped back.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod, sqrt
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.decompose import RoundedFactors, decompose
from sigmascope.lora.factors import CANCELLED, LoraFactors, difference_norm, norm_bound
from sigmascope.lora.linalg import (
    Spectrum,
    as_float64,
    at_least_float32,
    frobenius_norm,
    matrix_shape,
    max_rank,
)
from sigmascope.lora.statistics import LayerMetric

_ROUNDED: Final = 0.5
"""Rounding both factors costs about 0.3 of the dtype's eps."""
_ROUNDING: Final = 1e-12
"""Singular values below this share of the largest are float64 rounding of a change that has no more."""
_FORMED_ABOVE: Final = 256  # rank of factors from which ΔW may be formed, where few values are wanted


@dataclass(frozen=True, slots=True, eq=False)
class Truncated:
    """A change at a lower rank, as it goes into a file.

    Attributes:
        factors: In storage dtype, alpha = rank.
        error_norm: ‖ΔW − up·down‖ of these rounded factors.
        kept_energy: Share of ‖ΔW‖², in the metric if there is one, in the singular values that were kept, 0 to 1,
            before rounding.
        weighted_error: `error_norm` in the metric; None without one.
    """

    factors: LoraFactors
    error_norm: float
    kept_energy: float
    weighted_error: float | None = None


def truncatable(
    factors: LoraFactors, wanted: int, dtype: torch.dtype, metric: LayerMetric | None = None
) -> "Truncatable":
    """Take the quicker way to `wanted` singular values of a change given by factors.

    QR of factors of rank 1280 (a LoRA at full rank) costs a second a layer; where few values of many are
    wanted, ΔW is formed and decomposed as in an extraction.

    Args:
        factors: The change.
        wanted: How many singular values are likely to be needed.
        dtype: Storage dtype.
        metric: In which the error is least, in float64; Frobenius norm without.
    """
    if metric is not None:
        return WeighedChange(factors, dtype, metric)
    formed_is_small = prod(factors.weight_shape) <= 4 * factors.parameters
    if factors.rank > _FORMED_ABOVE and 4 * wanted <= factors.rank and formed_is_small:
        return FormedChange(factors.delta(), dtype)
    return FactoredChange(factors, dtype)


class FactoredChange:
    """A change given by LoRA factors: QR of both and the SVD of their small core say all, in float64.

    Args:
        factors: The change.
        dtype: Storage dtype.
    """

    def __init__(self, factors: LoraFactors, dtype: torch.dtype) -> None:
        self.factors = factors
        self.dtype = dtype
        self.weight_shape = factors.weight_shape
        self.weighted_norm: float | None = None

    def spectrum(self, wanted: int) -> Spectrum:
        """Complete and exact, whatever is wanted."""
        return Spectrum.of_factors(self._decomposed[2], self.weight_shape)

    def cut(self, rank: int) -> Truncated:
        """The nearest change of this rank, at least 1; the factors as they are where nothing has to be cut.

        Raises:
            NonFiniteError: The factors do not fit the storage dtype.
        """
        if self.factors.rank <= min(rank, max_rank(self.weight_shape)):
            same = self._uncut()
            if same is not None:
                return same
        left, u, sigma = self._decomposed
        kept = max(1, min(rank, int((sigma > _ROUNDING * sigma[0]).sum())))
        energy = float(sigma.square().sum())
        share = float(sigma[:kept].square().sum()) / energy if energy > 0.0 else 1.0
        stored, error = self._projected((left @ u[:, :kept]) * sigma[:kept].sqrt())
        return Truncated(stored, error, share)

    def _uncut(self) -> Truncated | None:
        """The same factors with the scale in up; None where storing them costs more than rounding should.

        What is lost is a product of factors itself, [E_up, up]·[down; E_down] with the rounding errors E, so that
        its Gram matrices cancel nothing.
        """
        exact_up, exact_down = as_float64(self.factors.up) * self.factors.scale, as_float64(self.factors.down)
        up, down = exact_up.to(self.dtype), exact_down.to(self.dtype)
        left, right = exact_up - as_float64(up), exact_down
        lost_down = exact_down - as_float64(down)
        if bool(lost_down.any()):
            left, right = torch.cat([left, as_float64(up)], dim=1), torch.cat([right, lost_down])
        squared = float(((left.mT @ left) * (right @ right.mT)).sum())
        error = sqrt(max(squared, 0.0)) if isfinite(squared) else squared
        if not error <= _ROUNDED * torch.finfo(self.dtype).eps * self.norm:
            return None  # scales far from 1 run out of float16's exponents
        stored = LoraFactors(
            up.to(self.factors.up.device),
            down.to(self.factors.down.device),
            float(self.factors.rank),
            self.weight_shape,
        )
        return Truncated(stored, error, 1.0)

    def _projected(self, wide_up: Float[Tensor, "out r"]) -> tuple[LoraFactors, float]:
        """Round up, then take for down the least-squares answer to the rounded up, L.

        X = (LᵀL)⁻¹·LᵀΔW needs no right singular vectors. The error of the X that is stored is exact:
        ‖ΔW − L·X‖² = ‖ΔW‖² − 2·tr(LᵀΔW·Xᵀ) + tr(LᵀL·X·Xᵀ).
        """
        up = wide_up.to(self.factors.up.device, self.dtype)
        left, own_up, own_down = as_float64(up), as_float64(self.factors.up), as_float64(self.factors.down)
        shared = (left.mT @ own_up).mul(self.factors.scale)
        gram = left.mT @ left
        down = (_solve(gram, shared) @ own_down).to(self.factors.down.device, self.dtype)
        stored = _storable(up, down, self.weight_shape)
        right = as_float64(down)
        agreement = float((shared * (right @ own_down.mT)).sum())
        squared = self.norm**2 - 2.0 * agreement + float((gram * (right @ right.mT)).sum())
        if squared <= CANCELLED * self.norm**2:
            return stored, difference_norm(self.factors, stored)
        return stored, sqrt(squared)

    @cached_property
    def norm(self) -> float:
        """‖ΔW‖, from the singular values where they are there already, else from Gram matrices.

        0 where columns cancel, as those of a LoRA less itself do: what is left then is rounding.
        """
        bound = norm_bound(self.factors)
        norm = 0.0 if "_decomposed" in vars(self) else self.factors.frobenius_norm()
        if norm <= sqrt(CANCELLED) * bound:
            norm = float(self._decomposed[2].norm())
        return norm if norm > _ROUNDING * bound else 0.0

    @cached_property
    def _decomposed(self) -> tuple[Float[Tensor, "out k"], Float[Tensor, "k l"], Float[Tensor, " l"]]:
        """Q, U, Σ such that the columns of Q·U are the left singular vectors; the right ones are not needed."""
        left, left_core = torch.linalg.qr(as_float64(self.factors.up))
        _, right_core = torch.linalg.qr(as_float64(self.factors.down).mT, mode="r")
        u, sigma, _ = torch.linalg.svd((left_core @ right_core.mT) * self.factors.scale, full_matrices=False)
        return left, u, sigma


def _solve(gram: Float[Tensor, "r r"], right: Float[Tensor, "r k"]) -> Float[Tensor, "r k"]:
    """Solve gram·x = right for columns that differ in length by orders of magnitude.

    Scaled to unit columns the matrix is near the identity, since the columns were orthogonal before rounding.
    """
    lengths = gram.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    scaled = gram / lengths[:, None] / lengths
    scaled.diagonal().fill_(1.0)  # also for a column that rounded to nothing
    answer: Tensor = torch.linalg.solve(scaled, right / lengths[:, None])
    return answer / lengths[:, None]


def _storable(up: Tensor, down: Tensor, weight_shape: tuple[int, ...]) -> LoraFactors:
    if not bool(torch.isfinite(up).all() and torch.isfinite(down).all()):
        raise NonFiniteError(
            f"the factors do not fit {str(up.dtype).removeprefix('torch.')}.",
            hint="Use --save_precision float or bf16.",
        )
    return LoraFactors(up, down, float(up.shape[1]), weight_shape)


class WeighedChange:
    """A change given by factors, whose error is least in a metric: SᵀΔW·R = (Sᵀ·up)·(down·R) is cut, and mapped back.

    Args:
        factors: The change.
        dtype: Storage dtype.
        metric: In float64.
    """

    def __init__(self, factors: LoraFactors, dtype: torch.dtype, metric: LayerMetric) -> None:
        self._factors = factors.to(dtype=torch.float64)
        self._metric = metric
        self._weighed = FactoredChange(self._in_metric(self._factors), torch.float64)
        self.dtype = dtype
        self.weight_shape = factors.weight_shape

    def spectrum(self, wanted: int) -> Spectrum:
        """In the metric; complete and exact, whatever is wanted."""
        return self._weighed.spectrum(wanted)

    @cached_property
    def norm(self) -> float:
        """‖ΔW‖."""
        return FactoredChange(self._factors, self.dtype).norm

    @property
    def weighted_norm(self) -> float | None:
        """‖SᵀΔW·R‖."""
        return self._weighed.norm

    def cut(self, rank: int) -> Truncated:
        """As of `FactoredChange`; of a rank, the change that is nearest in the metric."""
        if self._factors.rank <= min(rank, max_rank(self.weight_shape)):
            same = FactoredChange(self._factors, self.dtype).cut(rank)
            return replace(same, weighted_error=self._weighted_error(same.factors))
        weighed = self._weighed.cut(rank)
        up = self._metric.unweigh_up(weighed.factors.up * weighed.factors.scale)
        down = self._metric.unweigh_down(weighed.factors.down)
        tiny = torch.finfo(torch.float64).tiny
        ratio = (
            down.norm(dim=1).clamp_min(tiny) / up.norm(dim=0).clamp_min(tiny)
        ).sqrt()  # for float16's sake
        stored = _storable((up * ratio).to(self.dtype), (down.T / ratio).T.to(self.dtype), self.weight_shape)
        return Truncated(
            stored,
            difference_norm(self._factors, stored),
            weighed.kept_energy,
            self._weighted_error(stored),
        )

    def _weighted_error(self, stored: LoraFactors) -> float:
        return difference_norm(self._weighed.factors, self._in_metric(stored.to(dtype=torch.float64)))

    def _in_metric(self, factors: LoraFactors) -> LoraFactors:
        up, down = self._metric.weigh_up(factors.up), self._metric.weigh_down(factors.down)
        return replace(factors, up=up, down=down)


class FormedChange:
    """A change that is there as a whole: decomposed as far as is asked.

    Args:
        delta: ΔW, (out, in) or (out, in, kh, kw), floating point and finite.
        dtype: Storage dtype.
        metric: In which the error is least, in the precision of the change; Frobenius norm without.
    """

    def __init__(
        self, delta: Float[Tensor, "*shape"], dtype: torch.dtype, metric: LayerMetric | None = None
    ) -> None:
        self._delta = delta.to(at_least_float32(delta.dtype))
        self.dtype = dtype
        self.weight_shape = tuple(self._delta.shape)
        self.norm = frobenius_norm(self._delta)
        self._metric = metric
        self._stored: RoundedFactors | None = None

    @cached_property
    def weighted_norm(self) -> float | None:
        """‖SᵀΔW·R‖; None without a metric."""
        if self._metric is None:
            return None
        return frobenius_norm(self._metric.weigh(self._delta.reshape(matrix_shape(self.weight_shape))))

    def spectrum(self, wanted: int) -> Spectrum:
        """At least the `wanted` largest singular values, or all that there are; in the metric if there is one."""
        return self._decomposed(wanted).spectrum

    def cut(self, rank: int) -> Truncated:
        """As of `FactoredChange`; at full rank ΔW itself beside an identity."""
        if rank >= max_rank(self.weight_shape):
            whole = decompose(self._delta, rank, self.dtype, metric=self._metric)
            return Truncated(whole.factors, whole.error_norm, 1.0, self._weighted_error(whole))
        decomposed = self._decomposed(rank)
        stored = decomposed.cut(rank)
        kept = float(decomposed.spectrum.values[: stored.factors.rank].square().sum())
        energy = decomposed.spectrum.total_energy
        share = min(kept / energy, 1.0) if energy > 0.0 else 1.0
        return Truncated(stored.factors, stored.error_norm, share, self._weighted_error(stored))

    def _weighted_error(self, stored: RoundedFactors) -> float | None:
        return None if self._metric is None else sqrt(max(float(stored.weighted[-1]), 0.0))

    def _decomposed(self, rank: int) -> RoundedFactors:
        if self._stored is None or (self._stored.factors.rank < rank and not self._stored.spectrum.complete):
            self._stored = decompose(
                self._delta, rank, self.dtype, norm=self.norm, with_spectrum=True, metric=self._metric
            )
        return self._stored


Truncatable = FactoredChange | WeighedChange | FormedChange
"""One weight's change, to be stored at a rank that its singular values decide."""
