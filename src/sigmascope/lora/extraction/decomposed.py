"""Decomposed layers with the ranks that they get, and the error that they come to together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sigmascope.lora.extraction.layer_extraction import LayerRecord, LeftOutReason
from sigmascope.lora.ranking.budget import Budget
from sigmascope.lora.ranking.budget_refusals import refuse_storage
from sigmascope.lora.ranking.layer_weights import weight_of
from sigmascope.lora.ranking.spectrum import Spectrum

_TIGHTENED: Final = 0.999
_LEAST_TIGHTENED: Final = 0.5


@dataclass(frozen=True, slots=True)
class DecomposedLayer:
    """A layer with the place of its factors and the rank it gets.

    Attributes:
        name: Of its record in the journal.
        record: What was found.
        rank: 0: it is not in the LoRA.
    """

    name: str
    record: LayerRecord
    rank: int

    @property
    def reason(self) -> LeftOutReason | None:
        """Why it is not in the LoRA; None where it is."""
        return self.record.reason if self.rank > 0 or self.record.reason else "rank_0"


def lost_outside(budget: Budget, records: Mapping[str, LayerRecord]) -> dict[str, Spectrum]:
    """What layers that are left out add to the error of all, which is what a budget may limit."""
    if budget.max_error is None or all(record.reason is not None for record in records.values()):
        return {}
    reasons = {None, "unchanged"}
    return {layer: one.spectrum for layer, one in records.items() if one.reason not in reasons}


def true_error(layers: Mapping[str, DecomposedLayer], budget: Budget) -> float:
    """The error that `max_error` limits, of the factors as they are stored."""
    change = lost = 0.0
    for layer, one in layers.items():
        weight = weight_of(layer, budget.weights)
        change += weight * one.record.delta_norm**2
        lost += weight * one.record.error_at(one.rank) ** 2
    return math.sqrt(lost / change) if change > 0 else 0.0


def tighter(allowed: Budget, asked: float, error: float) -> Budget:
    """A budget that makes up for what rounding added beyond what was reckoned with.

    Raises:
        ConfigError: That is most of the error: the change is too small for the storage precision.
    """
    assert allowed.max_error is not None
    tightened = _TIGHTENED * allowed.max_error * asked / error
    if tightened < _LEAST_TIGHTENED * asked:
        refuse_storage(asked, error)
    return replace(allowed, max_error=tightened)


class ErrorSoFar:
    """The relative error of the layers that are done, for the progress bar."""

    def __init__(self) -> None:
        self._change = 0.0
        self._error = 0.0

    def add(self, record: LayerRecord) -> None:
        """Take in one more layer, at the rank of its record."""
        self._change += record.delta_norm**2
        self._error += record.error_at(record.rank) ** 2

    def __str__(self) -> str:
        share = math.sqrt(self._error / self._change) if self._change > 0 else 0.0
        return f"error {100 * share:.1f} %"
