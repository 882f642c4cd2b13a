"""What samples and precision say of a weight's change."""

from collections.abc import Mapping
from math import isfinite, sqrt

import torch
from torch import Tensor

from sigmascope.lora.effect import Effect


def rounding(dtype: torch.dtype) -> float:
    """‖ΔW‖/‖W‖ up to which adding a change and taking it away again explains a difference.

    Two roundings to the nearest are off by 0.3 ε of the larger of W and W + Δ, in the mean over a weight.
    """
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps if eps > 1e-6 else 4 * eps


def sampled_effect(samples: tuple[Tensor, Tensor] | None, elements: int) -> Effect | None:
    """‖ΔW‖ and ‖W‖ estimated from the same elements before and now; None without them, or with NaN."""
    if samples is None or samples[0].shape != samples[1].shape or not samples[0].numel():
        return None
    before, after = (sample.to(torch.float64) for sample in samples)
    share = sqrt(elements / before.numel())
    delta, whole = (float(torch.linalg.vector_norm(values)) * share for values in (after - before, before))
    if not (isfinite(delta) and isfinite(whole)):
        return None
    return Effect(delta, delta / whole if whole > 0 else None, whole, False)


def sample_pair(
    key: str, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor] | None:
    """Both samples of a weight, if both were taken."""
    return (before[key], after[key]) if key in before and key in after else None
