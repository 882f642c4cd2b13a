"""A live change as the two factors of a product, where it is one, so that its norm needs no product."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import LohaChange, LokrChange
from sigmascope.lora.effect.acting import scale_of_patch, strength_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.precision import in_double
from sigmascope.probes.adapters.applied import AppliedPatch

_CANCELLED: Final = 1e-6
"""A sum this much shorter than its parts has lost half of float64's digits in squares, and is taken from QR."""
_ROUNDING: Final = 1e-13
"""A sum this much shorter than its parts is what float64 leaves of parts that cancel."""

Shape = tuple[int, ...]
_FACTS: Final = {"loha": ("hada_", LohaChange.facts), "lokr": ("lokr_", LokrChange.facts)}


@dataclass(frozen=True, slots=True, eq=False)
class WeightedFactors:
    """weight · up · down, up (out, r) and down (r, in·kh·kw) of the whole weight that is changed."""

    up: Tensor
    down: Tensor
    weight: float


def weight_shape_of(patches: Sequence[AppliedPatch], weight: Tensor | None) -> Shape | None:
    """The shape that a weight has after its changes: its own, or as far as they say; None where nobody does.

    ComfyUI enlarges a weight by zeros for a change that says so.
    """
    own = [own_shape(patch) for patch in patches if patch.offset is None and _shows(patch)]
    said = [patch.weight_shape for patch in patches if patch.weight_shape is not None]
    if weight is None and not said and not own:
        return None
    given = tuple(weight.shape) if weight is not None else (said or own)[0]
    larger = [shape for shape in own if len(shape) == len(given) and prod(shape) > prod(given)]
    return tuple(map(max, given, *larger)) if larger else given


def is_product(patch: AppliedPatch) -> bool:
    """Whether a change is up · down and nothing else."""
    return patch.adapter_type == "lora" and {"up", "down"} <= patch.tensors.keys()


def own_shape(patch: AppliedPatch) -> Shape:
    """The shape that a change has by itself, without looking at the weight.

    Raises:
        LoraFormatError: Its parts do not fit together, or tell no shape.
    """
    if patch.adapter_type == "diff" and "diff" in patch.tensors:
        return tuple(patch.tensors["diff"].shape)
    if patch.adapter_type in _FACTS:
        start, facts = _FACTS[patch.adapter_type]
        return facts({start + name: tuple(part.shape) for name, part in patch.tensors.items()}).weight_shape
    if not is_product(patch):
        raise LoraFormatError(f"{patch.key}: a {patch.adapter_type} change does not show its shape.")
    down = patch.tensors["down"]
    kernel = patch.tensors["mid"].shape[2:] if "mid" in patch.tensors else down.shape[2:]
    return (patch.tensors["up"].shape[0], down.shape[1], *kernel)


def fits(patch: AppliedPatch, shape: Shape) -> bool:
    """Whether a plain change is the matrix of a weight, and not one that is reshaped to it."""
    own = own_shape(patch)
    return patch.offset is not None or (own[0], prod(own[1:])) == (shape[0], prod(shape[1:]))


def factors_of(patch: AppliedPatch, shape: Shape) -> WeightedFactors:
    """Give a plain change as factors of the whole weight, in float64.

    Args:
        patch: One for which `is_product` holds.
        shape: Of the whole weight. A change of a part of it gets rows or columns of zeros.

    Raises:
        ModelMismatchError: The factors do not fit the weight.
        LoraFormatError: Strength or scale could not be read.
    """
    up, down = in_double(patch.tensors["up"]).flatten(1), in_double(patch.tensors["down"])
    if "mid" in patch.tensors:
        core = in_double(patch.tensors["mid"]).to(down.device)
        down = torch.tensordot(core, down.flatten(1), dims=([1], [0])).movedim(-1, 1)
    up, down = placed(patch, up, down.to(up.device), shape)
    return WeightedFactors(up, down, strength_of(patch) * scale_of_patch(patch))


def norm_of_sum(parts: Sequence[WeightedFactors]) -> float:
    """‖Σ wᵢ·upᵢ·downᵢ‖ from Gram matrices, at least one part.

    ‖ΔW‖² = tr((upᵀup)(down·downᵀ)) of all factors side by side, R×R matrices for R the sum of the ranks. Where
    the parts cancel, the squares do not tell what is left, and the norm is that of the R×R middle of two QR
    decompositions.
    """
    whole = concatenated(parts)
    norm = whole.frobenius_norm()
    if len(parts) == 1:
        return norm
    lengths = sqrt(sum(abs(part.weight) ** 2 * _pair(part).frobenius_norm() ** 2 for part in parts))
    if norm > _CANCELLED * lengths:
        return norm
    _, core, _ = whole.orthogonal_form()
    left = float(torch.linalg.vector_norm(core))
    return left if left > _ROUNDING * lengths else 0.0


def concatenated(parts: Sequence[WeightedFactors]) -> LoraFactors:
    """Σ wᵢ·upᵢ·downᵢ as one pair, in float64."""
    device = parts[0].up.device
    up = torch.cat([part.up.to(device) * part.weight for part in parts], dim=1)
    down = torch.cat([part.down.to(device) for part in parts])
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _shows(patch: AppliedPatch) -> bool:
    whole = patch.adapter_type == "diff" and "diff" in patch.tensors
    return whole or is_product(patch) or patch.adapter_type in _FACTS


def _pair(part: WeightedFactors) -> LoraFactors:
    return LoraFactors(part.up, part.down, float(part.up.shape[1]), (part.up.shape[0], part.down.shape[1]))


def placed(patch: AppliedPatch, up: Tensor, down: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Factors of a part of a weight, with zeros where it is not changed.

    Raises:
        ModelMismatchError: They do not fit the weight, or the part.
    """
    if patch.offset is None:
        if (up.shape[0], down[0].numel()) != (shape[0], prod(shape[1:])):
            raise _misfit(patch, up, down, shape)
        return up, down.flatten(1)
    axis, start, length = patch.offset
    if axis == 0:
        if (up.shape[0], down[0].numel()) != (length, prod(shape[1:])) or start + length > shape[0]:
            raise _misfit(patch, up, down, shape)
        return _padded(up, 0, start, shape[0]), down.flatten(1)
    part = (*shape[1:axis], length, *shape[axis + 1 :])
    if (up.shape[0], down[0].numel()) != (shape[0], prod(part)) or start + length > shape[axis]:
        raise _misfit(patch, up, down, shape)
    return up, _padded(down.reshape(len(down), *part), axis, start, shape[axis]).flatten(1)


def _padded(tensor: Tensor, axis: int, start: int, size: int) -> Tensor:
    whole = tensor.new_zeros([size if number == axis else n for number, n in enumerate(tensor.shape)])
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole


def _misfit(patch: AppliedPatch, up: Tensor, down: Tensor, shape: Shape) -> ModelMismatchError:
    part = "" if patch.offset is None else f" at {patch.offset}"
    return ModelMismatchError(
        f"{patch.key}: up {tuple(up.shape)} and down {tuple(down.shape)} are no change of a weight {shape}{part}."
    )
