"""Changes that fit and yet are known to fail in ComfyUI, which the weight itself tells."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch

_NO_ALPHA = (
    "ComfyUI compares alpha with 0 (for OFT until mid-2025, for BOFT still in 0.18); this file has none"
)
_ORDER = "until autumn 2024 ComfyUI knew the first order of a GLoRA's factors alone"
_FUSED = "ComfyUI takes the rows of one projection from it, by a place or a name in the file"
_STRIDES = "torch.kron refuses the strides of a factor that ComfyUI puts together from a core"


def doubt(patch: AppliedPatch) -> str | None:
    """Why a change may fail though its shapes fit; None if nothing is known against it."""
    if patch.adapter_type == "lokr" and _is_larger(patch):
        return _FUSED
    if patch.adapter_type == "glora" and "tuple" in patch.data_type:
        return _ORDER
    if patch.adapter_type in ("oft", "boft") and patch.alpha is None:
        return _NO_ALPHA
    if patch.adapter_type == "lokr" and "t2" in patch.tensors and "w2" not in patch.tensors:
        return _STRIDES
    return None


def _is_larger(patch: AppliedPatch) -> bool:
    """Whether the product of a LoKr's factors has more elements than the weight that it is for."""
    if patch.offset is not None or patch.weight_shape is None or "t2" in patch.tensors:
        return False
    count = 1
    for name in ("w1", "w2"):
        whole, rows, columns = (patch.tensors.get(f"{name}{end}") for end in ("", "_a", "_b"))
        if whole is not None:
            count *= whole.numel()
        elif rows is not None and columns is not None:
            count *= int(rows.shape[0] * columns.shape[-1])
    return count > math.prod(patch.weight_shape)


def settled(patch: AppliedPatch, original: Tensor | None, now: Tensor | None, *, alone: bool) -> AppliedPatch:
    """The change with its doubt, settled where the weight can settle it.

    Args:
        patch: Any change.
        original: The weight before any change.
        now: The weight as it is.
        alone: Whether this is the only change of the weight.
    """
    reason = doubt(patch)
    if reason is None or patch.state in ("failed", "inactive"):
        return patch
    if patch.state == "merged" and alone and original is not None and now is not None:
        if not torch.equal(original, now.to(original.device)):
            return patch
        return replace(patch, state="failed", state_reason=f"the weight did not change: {reason}")
    return replace(patch, state_reason=f"{patch.state_reason}; it may fail: {reason}")
