"""The change that one live patch makes to a weight as it is when the patch comes, formed whole in float64.

Hosts differ: DoRA's magnitudes per output are divided by the norm of the unchanged weight in ComfyUI and by that of
the changed one in PEFT (and in the paper, Liu et al., arXiv 2402.09353), and PEFT's strength acts inside the norm.
Here is what each host does, not what it should do.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import DiffChange, LohaChange, LokrChange
from sigmascope.lora.effect.acting import is_by_peft, scale_of_patch, strength_of
from sigmascope.lora.effect.patch_factors import factors_of, own_shape
from sigmascope.lora.effect.rotations import boft_change, oft_change
from sigmascope.probes.adapters.applied import AppliedPatch

_NEEDS_WEIGHT: Final = frozenset({"glora", "oft", "boft", "set", "dora"})
_EPSILON: Final = torch.finfo(torch.float32).eps  # what ComfyUI adds to norms of weights in float32


def needs_weight(patch: AppliedPatch) -> bool:
    """Whether what a patch changes depends on the weight that is there."""
    by_type = patch.adapter_type in _NEEDS_WEIGHT or "dora_scale" in patch.tensors
    return by_type or patch.strength_model != 1.0


def change_by(patch: AppliedPatch, weight: Tensor, held: Tensor) -> Tensor:
    """ΔW of one patch with its strength, in the weight's shape, float64; `strength_model` is not in it.

    Args:
        patch: One that acts.
        weight: What acts before the patch, in float64; the part that the patch is for. Zeros where it does not
            matter.
        held: What the weight's own tensor holds then: without the branches that PEFT runs beside it.

    Raises:
        SigmascopeError: A kind that is not known, or tensors that do not fit the weight.
    """
    strength = strength_of(patch)
    if patch.adapter_type == "set":
        return _tensor(patch, "set", weight).reshape(weight.shape) - weight
    if "dora_scale" in patch.tensors and is_by_peft(patch):
        return _magnified_by_peft(patch, weight, held, strength * _direction(patch, weight))
    change = _direction(patch, weight)
    if "dora_scale" in patch.tensors:
        if patch.adapter_type in {"oft", "boft"}:  # ComfyUI takes the limit for a scale here
            change = change * (patch.alpha or 0.0)
        change = _magnified(patch, weight, change)
    return change * strength


def _direction(patch: AppliedPatch, weight: Tensor) -> Tensor:
    """The change at strength 1, before magnitudes; rotations have a strength of their own inside."""
    form = _FORMS.get(patch.adapter_type)
    if form is None:
        why = f": {'; '.join(patch.unavailable.values())}" if patch.unavailable else ""
        raise LoraFormatError(f"{patch.key}: a change of kind {patch.adapter_type} is not calculated{why}.")
    change = form(patch, weight)
    if change.numel() != weight.numel():
        raise ModelMismatchError(
            f"{patch.key}: a change of {tuple(change.shape)} is none of a weight {tuple(weight.shape)}."
        )
    return change.reshape(weight.shape)


def _product(patch: AppliedPatch, weight: Tensor) -> Tensor:
    whole = replace(patch, offset=None, adapter_type="lora")
    found = factors_of(whole, own_shape(whole))
    return (found.up @ found.down).to(weight.device) * scale_of_patch(patch)


def _loha(patch: AppliedPatch, weight: Tensor) -> Tensor:
    parts = _parts(patch, weight, "hada_", {"w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2"})
    return LohaChange(parts, scale_of_patch(patch)).delta(dtype=torch.float64)


def _lokr(patch: AppliedPatch, weight: Tensor) -> Tensor:
    parts = _parts(patch, weight, "lokr_", {"w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2"})
    return LokrChange(parts, scale_of_patch(patch)).delta(dtype=torch.float64)


def _diff(patch: AppliedPatch, weight: Tensor) -> Tensor:
    return DiffChange({"diff": _tensor(patch, "diff", weight)}, weight_shape=tuple(weight.shape)).delta(
        dtype=torch.float64
    )


def _glora(patch: AppliedPatch, weight: Tensor) -> Tensor:
    """W·a1·a2 + b1·b2 (Chavan et al., arXiv 2306.07967), or as LyCORIS wrote it at first, W·a2·a1 + b2·b1."""
    a1, a2, b1, b2 = (_tensor(patch, name, weight).flatten(1) for name in ("a1", "a2", "b1", "b2"))
    if _is_old_glora(patch, weight):
        return (b2 @ b1 + weight.flatten(1) @ a2 @ a1).mul(scale_of_patch(patch))
    rows = weight.flatten(2) if weight.ndim > 2 else weight.unsqueeze(-1)
    turned: Tensor = torch.einsum("oix,ij->ojx", rows, a1 @ a2).reshape(weight.shape)
    whole: Tensor = turned.add((b1 @ b2).reshape(weight.shape)).mul(scale_of_patch(patch))
    return whole


def _is_old_glora(patch: AppliedPatch, weight: Tensor) -> bool:
    a1, a2, b1, b2 = (tuple(patch.tensors[name].shape) for name in ("a1", "a2", "b1", "b2"))
    old = b2[1] == b1[0] == a1[0] == a2[1]
    new = b2[0] == b1[1] == a1[1] == a2[0]
    return old and (not new or a2[0] == weight.shape[0] == weight.shape[1])


def _oft(patch: AppliedPatch, weight: Tensor) -> Tensor:
    _refuse_by_peft(patch)
    return oft_change(weight, _tensor(patch, "blocks", weight), patch.alpha or 0.0, strength_of(patch))


def _boft(patch: AppliedPatch, weight: Tensor) -> Tensor:
    _refuse_by_peft(patch)
    rescale = _tensor(patch, "rescale", weight) if "rescale" in patch.tensors else None
    return boft_change(
        weight, _tensor(patch, "blocks", weight), rescale, patch.alpha or 0.0, strength_of(patch)
    )


_FORMS: Final[Mapping[str, Callable[[AppliedPatch, Tensor], Tensor]]] = {
    "lora": _product,
    "dora": _product,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
    "oft": _oft,
    "boft": _boft,
    "diff": _diff,
}


def _magnified(patch: AppliedPatch, weight: Tensor, change: Tensor) -> Tensor:
    """m·(W + δ)/norm − W."""
    magnitude = _tensor(patch, "dora_scale", weight)
    changed = weight + change
    # Until April 2025 ComfyUI kept changes as tuples, and took all magnitudes for those of inputs.
    by_output = magnitude.shape[:1] == weight.shape[:1] and "tuple" not in patch.data_type
    norm = _norms_along(weight, 0) if by_output else _norms_along(changed, 1)
    result: Tensor = changed * (magnitude / (norm + _EPSILON)) - weight
    return result


def _magnified_by_peft(patch: AppliedPatch, weight: Tensor, held: Tensor, change: Tensor) -> Tensor:
    """m·(W + δ)/‖W₀ + δ‖ − W: a second DoRA acts on the output of the first, and takes its norm of W₀ alone."""
    magnitude = _tensor(patch, "dora_scale", weight).flatten()
    axis = 0 if len(magnitude) == weight.shape[0] else 1
    shape = [size if number == axis else 1 for number, size in enumerate(weight.shape)]
    norm = _norms_along(held + change, axis).clamp_min(torch.finfo(torch.float64).tiny)
    result: Tensor = (weight + change) * (magnitude.reshape(shape) / norm) - weight
    return result


def _norms_along(weight: Tensor, axis: int) -> Tensor:
    others = [number for number in range(weight.ndim) if number != axis]
    norms: Tensor = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
    return norms


def _parts(patch: AppliedPatch, weight: Tensor, start: str, names: set[str]) -> dict[str, Tensor]:
    return {start + name: _tensor(patch, name, weight) for name in names & patch.tensors.keys()}


def _tensor(patch: AppliedPatch, name: str, weight: Tensor) -> Tensor:
    if name not in patch.tensors:
        raise LoraFormatError(f"{patch.key}: a change of kind {patch.adapter_type} without its {name}.")
    return patch.tensors[name].detach().to(weight.device, torch.float64)


def _refuse_by_peft(patch: AppliedPatch) -> None:
    if is_by_peft(patch):
        raise LoraFormatError(f"{patch.key}: PEFT's way of rotating weights is not calculated here.")
