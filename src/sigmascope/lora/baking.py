"""One weight of a checkpoint with the changes of LoRAs added to it, rounded once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merge_methods import MergeMethod
from sigmascope.lora.norms import frobenius_norm, quick_energy
from sigmascope.lora.precision import at_least_float32, is_real


class WeightedChange(NamedTuple):
    """One LoRA's change of a weight.

    Attributes:
        position: Of the LoRA among all.
        weight: What its change is multiplied with.
        change: The change.
    """

    position: int
    weight: float
    change: LoraFactors | WeightChange


@dataclass(frozen=True, slots=True)
class BakedTensor:
    """One tensor of the checkpoint that was changed.

    Attributes:
        name: Its key.
        loras: Positions of the LoRAs that change it.
        weight_norm: ‖W‖ before.
        change_norm: ‖ΔW‖ that was to be added.
        lost_norm: ‖W + ΔW − stored‖: what rounding to the stored dtype took away.
    """

    name: str
    loras: tuple[int, ...]
    weight_norm: float
    change_norm: float
    lost_norm: float

    @property
    def lost_share(self) -> float | None:
        """`lost_norm` / `change_norm`: above 1 rounding is larger than the change."""
        return self.lost_norm / self.change_norm if self.change_norm > 0.0 else None

    def as_dict(self) -> dict[str, Any]:
        """The tensor as JSON values."""
        return asdict(self) | {"lost_share": self.lost_share}


def baked(
    name: str, weight: Tensor, changes: Sequence[WeightedChange], method: MergeMethod
) -> tuple[Tensor, BakedTensor]:
    """W + Σ weight·ΔW, added in float32 (float64 for a float64 weight) and rounded once.

    With one LoRA and method `linear` the result is that of `merge_lora` on a live model, bit for bit.

    Args:
        name: The tensor's key.
        weight: As stored in the checkpoint.
        changes: At least one, of this weight.
        method: How several changes become one. `linear` adds one after the other.

    Returns:
        The new weight in the dtype of the old, and what is to be known of it.

    Raises:
        ModelMismatchError: The weight holds no numbers that can be added to (a quantised weight), or a change
            is for a weight of another shape.
        NonFiniteError: The new weight would hold NaN or Inf.
    """
    if not is_real(weight.dtype):
        raise ModelMismatchError(
            f"{name} is stored as {weight.dtype}, to which no change can be added.",
            hint="Merge into the checkpoint in float, fp16 or bf16.",
        )
    compute = at_least_float32(weight.dtype)
    wide = weight.to(compute)
    deltas = {one.position: _delta(name, one.change, wide) for one in changes}
    total = wide
    if method.is_linear:
        for one in changes:
            total = torch.add(total, deltas[one.position], alpha=one.weight)
    else:
        weighted = {one.position: deltas[one.position].mul(one.weight) for one in changes}
        total = wide + method.combine(name, weighted)
    merged = total.to(weight.dtype)
    lost = total - merged.to(compute)
    lost_norm = _norm(lost)
    if not isfinite(lost_norm):
        raise NonFiniteError(
            f"{name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
            hint="Check the weights, or merge with smaller --weights.",
        )
    positions = tuple(one.position for one in changes)
    return merged, BakedTensor(name, positions, _norm(wide), _norm(total - wide), lost_norm)


def _delta(name: str, change: LoraFactors | WeightChange, wide: Tensor) -> Tensor:
    if isinstance(change, LoraFactors):
        if not same_matrix(change.weight_shape, tuple(wide.shape)):
            raise ModelMismatchError(
                f"{name} is {tuple(wide.shape)} in the checkpoint, and the LoRA is for {change.weight_shape}.",
                hint="Merge the LoRA into the model that it was made for.",
            )
        return change.delta(wide.dtype).reshape(wide.shape)
    try:
        return change.delta(wide, wide.dtype)
    except ModelMismatchError as error:
        raise ModelMismatchError(f"{name}: {error.message}", hint=error.hint) from error


def same_matrix(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes of a weight are equal but for the 1×1 kernel of a pointwise convolution."""
    return one[:2] == other[:2] and prod(one[2:]) == prod(other[2:]) and _kernel(one) == _kernel(other)


def _kernel(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[2:] if prod(shape[2:]) > 1 else ()


def _norm(tensor: Tensor) -> float:
    """‖tensor‖, quickly in float32."""
    if tensor.dtype != torch.float32:
        return frobenius_norm(tensor)
    return sqrt(float(quick_energy(tensor.reshape(-1))))
