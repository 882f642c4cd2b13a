"""A weight's change whose rank can be lowered, and what is stored of it then."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.ranking.spectrum import Spectrum


@dataclass(frozen=True, slots=True, eq=False)
class CutChange:
    """A change at a lower rank, as it goes into a file.

    Attributes:
        factors: In storage dtype, alpha = rank.
        error_norm: ‖ΔW − up·down‖ of these rounded factors.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1, before rounding.
    """

    factors: LoraFactors
    error_norm: float
    kept_energy: float


class ReducibleChange(ABC):
    """One weight's change, to be stored at a rank that its singular values decide."""

    @property
    @abstractmethod
    def weight_shape(self) -> tuple[int, ...]:
        """(out, in) or (out, in, kh, kw)."""

    @property
    @abstractmethod
    def norm(self) -> float:
        """‖ΔW‖."""

    @abstractmethod
    def spectrum(self, wanted: int) -> Spectrum:
        """At least the `wanted` largest singular values, or all that there are."""

    @abstractmethod
    def cut(self, rank: int) -> CutChange:
        """The nearest change of this rank, at least 1; of less where the change has no more.

        Raises:
            NonFiniteError: The factors do not fit the storage dtype.
        """
