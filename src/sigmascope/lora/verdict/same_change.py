"""Whether what is on a model is a module of a LoRA file, told by its numbers."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.unread_kinds import UnreadChange
from sigmascope.lora.precision import in_double
from sigmascope.probes.adapters.applied import AppliedPatch

_SAME: Final = 0.999
"""Cosine of what is the same but for the rounding of a conversion to bfloat16 or float16, and for its scale."""
_CORNER: Final = 16
_SAME_CORNER: Final = 0.9
"""The same of a few rows and columns, whose share of the rounding may be larger."""
_NAMES: Final = {
    "lora_up.weight": "up",
    "lora_down.weight": "down",
    "lora_mid.weight": "mid",
    "diff_b": "diff",
    "w_norm": "diff",
    "b_norm": "diff",
    "set_weight": "set",
}
_STARTS: Final = ("hada_", "lokr_")

Change = LoraFactors | WeightChange


def is_same(change: Change, patch: AppliedPatch) -> bool:
    """Whether a patch is a change of a file, in whatever dtype and scale the host keeps it."""
    if isinstance(change, LoraFactors) and {"up", "down"} <= patch.tensors.keys():
        if "mid" in patch.tensors:
            return False
        return _same_product(change, patch)
    own = tensors_of(change)
    shared = own.keys() & patch.tensors.keys()
    return bool(shared) and all(_same_numbers(own[name], patch.tensors[name]) for name in shared)


def tensors_of(change: Change) -> Mapping[str, Tensor]:
    """A change's tensors by the names that `AppliedPatch.tensors` has for them."""
    if isinstance(change, LoraFactors):
        return {"up": change.up, "down": change.down}
    if isinstance(change, DoraChange):
        return {**tensors_of(change.direction), "dora_scale": change.magnitude}
    if isinstance(change, UnreadChange):
        return change.parts
    if isinstance(change, Adapter):
        return {_name(name): tensor for name, tensor in change.parts.items()}
    return {}


def times_of(change: LoraFactors, patch: AppliedPatch) -> float | None:
    """How many times the file's ΔW a plain patch is, at strength and scale 1; None for other kinds and no change."""
    if patch.adapter_type != "lora" or not {"up", "down"} <= patch.tensors.keys() or change.scale == 0.0:
        return None
    if _are_the_factors(change, patch):
        return 1.0 / change.scale
    own = change.frobenius_norm()
    return _factors(patch).frobenius_norm() / own if own > 0.0 else None


def _same_product(change: LoraFactors, patch: AppliedPatch) -> bool:
    """By ΔW, so that a host may divide, scale and re-factor as it likes; zero changes by their factors."""
    if _are_the_factors(change, patch):
        return True
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    if (up.shape[0], down.shape[1]) != (change.up.shape[0], change.down.shape[1]):
        return False
    if _differ_in_a_corner(change, up, down):
        return False
    found = _factors(patch)
    plain = LoraFactors(
        in_double(change.up).cpu(), in_double(change.down).cpu(), change.alpha, found.weight_shape
    )
    lengths = plain.frobenius_norm() * found.frobenius_norm()
    if lengths > 0.0:
        return plain.inner(found) > _SAME * lengths
    return _same_numbers(change.up, patch.tensors["up"]) and _same_numbers(change.down, patch.tensors["down"])


def _differ_in_a_corner(change: LoraFactors, up: Tensor, down: Tensor) -> bool:
    """Whether the file's largest rows and columns already show that two ΔW are no multiples of each other."""
    rows, columns = _largest(change.up, 1), _largest(change.down, 0)
    one, two = (
        (in_double(first.detach().cpu()[rows]) @ in_double(second.detach().cpu()[:, columns])).flatten()
        for first, second in ((change.up, change.down), (up, down))
    )
    lengths = float(torch.linalg.vector_norm(one)) * float(torch.linalg.vector_norm(two))
    return lengths > 0.0 and float(one @ two) < _SAME_CORNER * lengths


def _largest(factor: Tensor, along: int) -> Tensor:
    lengths = torch.linalg.vector_norm(factor.detach().cpu().to(torch.float32), dim=along)
    places: Tensor = lengths.topk(min(_CORNER, len(lengths))).indices
    return places


def _are_the_factors(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Whether they are the very numbers, but for the rounding to the narrower of the two dtypes."""
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    return _are_equal(change.up, up) and _are_equal(change.down, down)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(one.detach().to(other.device, narrow), other.detach().to(narrow))


def _factors(patch: AppliedPatch) -> LoraFactors:
    up, down = (in_double(patch.tensors[name]).cpu().flatten(1) for name in ("up", "down"))
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    first, second = in_double(one).cpu().flatten(), in_double(other).cpu().flatten()
    if len(first) != len(second):
        return False
    lengths = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if 0.0 in lengths:
        return lengths == (0.0, 0.0)
    return float(first @ second) > _SAME * lengths[0] * lengths[1]


def _name(part: str) -> str:
    for start in _STARTS:
        part = part.removeprefix(start)
    return _NAMES.get(part, part)
