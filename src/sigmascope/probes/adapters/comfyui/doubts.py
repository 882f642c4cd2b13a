"""Changes that fit and yet are known to fail in ComfyUI, which the weight itself tells."""

from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.probes.adapters.applied import AppliedPatch

_NO_ALPHA = "ComfyUI (0.18 and before) compares a BOFT's alpha with 0, and this file has none"
_STRIDES = "torch.kron refuses the strides of a factor that ComfyUI puts together from a core"


def doubt(patch: AppliedPatch) -> str | None:
    """Why a change may fail though its shapes fit; None if nothing is known against it."""
    if patch.adapter_type == "boft" and patch.alpha is None:
        return _NO_ALPHA
    if patch.adapter_type == "lokr" and "t2" in patch.tensors and "w2" not in patch.tensors:
        return _STRIDES
    return None


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
