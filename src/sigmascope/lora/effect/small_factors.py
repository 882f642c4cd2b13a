"""All changes of one weight as a single pair of factors, where they are low-rank in any way."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.effect.acting import kept_of_weight, scale_of_patch, strength_of
from sigmascope.lora.effect.patch_factors import (
    Shape,
    WeightedFactors,
    concatenated,
    factors_of,
    is_product,
    placed,
)
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.precision import in_double
from sigmascope.probes.adapters.applied import AppliedPatch

_LARGEST_RANK: Final = 2048  # above, the bases take seconds a weight


def as_factors(patches: Sequence[AppliedPatch], shape: Shape) -> LoraFactors:
    """Σ of the changes as up · down, in float64.

    Args:
        patches: Changes of one weight that act, at least one.
        shape: Of the weight.

    Raises:
        LoraFormatError: A change that has no small factors, as a difference or DoRA, or too many together.
        ModelMismatchError: One does not fit the weight.
    """
    rank = rank_together(patches)
    if rank > _LARGEST_RANK:
        raise LoraFormatError(f"the changes have a rank of {rank} together, which is too large to compare.")
    return concatenated([_factors(patch, shape) for patch in patches])


def rank_together(patches: Sequence[AppliedPatch]) -> int:
    """The inner dimension that the changes of one weight have as one pair of factors; 0 for those that have none."""
    return sum(_rank({name: tuple(part.shape) for name, part in patch.tensors.items()}) for patch in patches)


def _rank(shapes: Mapping[str, Shape]) -> int:
    if "down" in shapes:
        return sum(shapes["down"][:1])
    if {"w1_b", "w2_b"} <= shapes.keys() and not {"w1", "w2"} & shapes.keys():
        return sum(shapes["w1_b"][:1]) * sum(shapes["w2_b"][:1])
    sides = [shapes[name] if name in shapes else shapes.get(f"{name}_b", (0,))[:1] for name in ("w1", "w2")]
    return min(sides[0], default=0) * min(sides[1], default=0)


def _factors(patch: AppliedPatch, shape: Shape) -> WeightedFactors:
    if kept_of_weight(patch) != 1.0:
        raise LoraFormatError("the weight itself is scaled, which is no low-rank change.")
    if is_product(patch):
        return factors_of(patch, shape)
    form = {"loha": _loha_factors, "lokr": _lokr_factors}.get(patch.adapter_type)
    if form is None or "dora_scale" in patch.tensors:
        kind = patch.adapter_type if form is None else f"{patch.adapter_type} with magnitudes"
        raise LoraFormatError(f"a {kind} change has no factors whose spaces could be compared.")
    up, down = form({name: in_double(tensor) for name, tensor in patch.tensors.items()})
    up, down = placed(patch, up, down, shape)
    return WeightedFactors(up, down, strength_of(patch) * scale_of_patch(patch))


def _loha_factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A₁B₁) ⊙ (A₂B₂) = (A₁ ∗ A₂)(B₁ ∗ B₂) for the row-wise and column-wise Kronecker products."""
    if "t1" in parts:
        raise LoraFormatError("a loha change with cores has no factors whose spaces could be compared.")
    one, two = parts["w1_a"], parts["w2_a"]
    up = (one[:, :, None] * two[:, None, :]).flatten(1)
    down = (parts["w1_b"][:, None, :] * parts["w2_b"][None, :, :]).flatten(0, 1)
    return up, down


def _lokr_factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A₁B₁) ⊗ (A₂B₂) = (A₁ ⊗ A₂)(B₁ ⊗ B₂)."""
    if "t2" in parts or ("w2" in parts and parts["w2"].ndim > 2):
        raise LoraFormatError("a lokr change of a kernel has no factors whose spaces could be compared.")
    sides = [_two(parts, "w1"), _two(parts, "w2")]
    (one_up, one_down), (two_up, two_down) = sides
    return torch.kron(one_up, two_up), torch.kron(one_down, two_down)


def _two(parts: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """A side as two factors; a whole matrix as itself and the identity on its smaller side."""
    if name not in parts:
        return parts[f"{name}_a"], parts[f"{name}_b"]
    whole = parts[name]
    identity = torch.eye(min(whole.shape), dtype=whole.dtype, device=whole.device)
    return (identity, whole) if whole.shape[0] <= whole.shape[1] else (whole, identity)
