"""One weight of a checkpoint with the changes of LoRAs added to it, rounded once."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import fsum, isfinite, sqrt
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.merging.merge_methods import MergeMethod
from sigmascope.lora.merging.slots import Slot
from sigmascope.lora.norms import quick_energy
from sigmascope.lora.precision import at_least_float32, is_real
from sigmascope.lora.shapes import same_matrix

_PIECE: Final = 1 << 17  # elements: half a MiB in float32


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


def bake(
    name: str, weight: Tensor, changes: Sequence[WeightedChange], method: MergeMethod, slot: Slot
) -> BakedTensor:
    """Change a weight in place to W + Σ weight·ΔW, added in float32 (float64 for float64) and rounded once.

    With one LoRA and method `linear` the result is that of `merge_lora` on a live model, bit for bit.

    Args:
        name: The tensor's key.
        weight: As stored in the checkpoint, contiguous.
        changes: At least one, of this weight.
        method: How several changes become one. `linear` adds one after the other.
        slot: Memory to calculate in.

    Returns:
        What is to be known of it.

    Raises:
        ModelMismatchError: The weight holds no numbers that can be added to (a quantised weight), or a change
            is for a weight of another shape.
        NonFiniteError: The new weight would hold NaN or Inf. It does so then.
    """
    if not is_real(weight.dtype):
        raise ModelMismatchError(
            f"{name} is stored as {weight.dtype}, to which no change can be added.",
            hint="Merge into the checkpoint in float, fp16 or bf16.",
        )
    energies = _add(weight.view(-1), _addends(name, weight, changes, method, slot), slot)
    if not isfinite(energies[2]):
        raise NonFiniteError(
            f"{name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
            hint="Check the weights, or merge with smaller --weights.",
        )
    positions = tuple(one.position for one in changes)
    return BakedTensor(name, positions, *map(sqrt, energies))


class _Addend(NamedTuple):
    """strength · (product · scale), with the product as one row."""

    product: Tensor
    scale: float
    strength: float


def _addends(
    name: str, weight: Tensor, changes: Sequence[WeightedChange], method: MergeMethod, slot: Slot
) -> list[_Addend]:
    compute = at_least_float32(weight.dtype)
    found = [_addend(name, weight, one, compute, slot) for one in changes]
    if method.is_linear:
        return found
    deltas = {
        one.position: addend.product.mul(addend.scale).mul_(addend.strength).view(weight.shape)
        for one, addend in zip(changes, found, strict=True)
    }
    return [_Addend(method.combine(name, deltas).reshape(-1), 1.0, 1.0)]


def _addend(name: str, weight: Tensor, one: WeightedChange, compute: torch.dtype, slot: Slot) -> _Addend:
    change, shape = one.change, tuple(weight.shape)
    if isinstance(change, LoraFactors):
        if not same_matrix(change.weight_shape, shape):
            raise ModelMismatchError(
                f"{name} is {shape} in the checkpoint, and the LoRA is for {change.weight_shape}.",
                hint="Merge the LoRA into the model that it was made for.",
            )
        out, inner = change.up.shape[0], change.down.shape[1]
        product = slot.scratch(f"product {one.position}", out * inner, compute)
        torch.mm(change.up.to(compute), change.down.to(compute), out=product.view(out, inner))
        return _Addend(product, change.scale, one.weight)
    try:
        return _Addend(change.delta(weight.to(compute), compute).reshape(-1), 1.0, one.weight)
    except ModelMismatchError as error:
        raise ModelMismatchError(f"{name}: {error.message}", hint=error.hint) from error


def _add(weight: Tensor, addends: Sequence[_Addend], slot: Slot) -> tuple[float, float, float]:
    """Add in pieces that stay in the processor's cache; give ‖W‖², ‖ΔW‖² and what rounding lost, squared."""
    compute = addends[0].product.dtype
    wide = slot.scratch("wide", _PIECE, compute)
    total = slot.scratch("total", _PIECE, compute)
    sums = []
    for start in range(0, weight.numel(), _PIECE):
        piece = weight[start : start + _PIECE]
        before, after = wide[: piece.numel()], total[: piece.numel()]
        after.copy_(piece)
        before.copy_(after)
        for product, scale, strength in addends:
            part = product[start : start + _PIECE]
            after.add_(part if scale == 1.0 else part.mul_(scale), alpha=strength)
        piece.copy_(after)
        own = _energy(before)
        before.sub_(after)
        added = _energy(before)
        before.copy_(piece)
        sums.append((own, added, _energy(after.sub_(before))))
    own, added, lost = (fsum(values) for values in zip(*sums, strict=True))
    return own, added, lost


def _energy(piece: Tensor) -> float:
    return float(quick_energy(piece)) if piece.dtype == torch.float32 else float(torch.dot(piece, piece))
