"""A weight's change that is formed as a whole, and the choice between that and its factors."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merging.factored_change import FactoredChange
from sigmascope.lora.merging.reducible_change import CutChange, ReducibleChange
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.numerics.decompose import StoredChange, decompose
from sigmascope.lora.precision import at_least_float32
from sigmascope.lora.ranking.spectrum import Spectrum
from sigmascope.lora.shapes import max_rank

_FORMED_ABOVE: Final = 256


class FormedChange(ReducibleChange):
    """A change that is there as a whole: decomposed as far as is asked.

    Args:
        delta: ΔW, (out, in) or (out, in, kh, kw), floating point and finite.
        dtype: Storage dtype.
    """

    def __init__(self, delta: Float[Tensor, "*shape"], dtype: torch.dtype) -> None:
        self._delta = delta.to(at_least_float32(delta.dtype))
        self.dtype = dtype
        self._norm = frobenius_norm(self._delta)
        self._found: StoredChange | None = None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """See `ReducibleChange`."""
        return tuple(self._delta.shape)

    @property
    def norm(self) -> float:
        """‖ΔW‖, summed in float64."""
        return self._norm

    def spectrum(self, wanted: int) -> Spectrum:
        """The values that were found on the way to factors of rank `wanted`."""
        return self._decomposed(wanted).spectrum

    def cut(self, rank: int) -> CutChange:
        """See `ReducibleChange`; at full rank ΔW itself beside an identity."""
        if rank >= max_rank(self.weight_shape):
            whole = decompose(self._delta, rank, self.dtype)
            return CutChange(whole.factors, whole.error_norm, 1.0)
        found = self._decomposed(rank)
        stored = found.cut(rank)
        kept = float(found.spectrum.values[: stored.factors.rank].square().sum())
        energy = found.spectrum.total_energy
        return CutChange(stored.factors, stored.error_norm, min(kept / energy, 1.0) if energy > 0.0 else 1.0)

    def _decomposed(self, rank: int) -> StoredChange:
        if self._found is None or (self._found.factors.rank < rank and not self._found.spectrum.complete):
            self._found = decompose(self._delta, rank, self.dtype, norm=self.norm, with_spectrum=True)
        return self._found


def reducible(factors: LoraFactors, wanted: int, dtype: torch.dtype) -> ReducibleChange:
    """Take the quicker way to `wanted` singular values of a change given by factors.

    QR of factors of rank 1280 (a LoRA at full rank) costs a second a layer; where few values of many are
    wanted, ΔW is formed and decomposed as in an extraction.

    Args:
        factors: The change.
        wanted: How many singular values are likely to be needed.
        dtype: Storage dtype.
    """
    if factors.rank > _FORMED_ABOVE and 4 * wanted <= factors.rank:
        return FormedChange(factors.delta(), dtype)
    return FactoredChange(factors, dtype)
