"""Differences under a validity mask, averaged for each sample."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor


def differences(
    prediction: Float[Tensor, "batch channels height width"],
    target: Float[Tensor, "batch channels height width"],
    kind: Literal["l1", "l2"],
) -> Float[Tensor, "batch channels height width"]:
    """|d| (l1) or d² (l2) of d = prediction − target."""
    difference = prediction - target
    return difference.abs() if kind == "l1" else difference.square()


def sample_means(
    values: Float[Tensor, "batch channels height width"],
    mask: Float[Tensor, "batch 1 height width"] | None = None,
) -> Float[Tensor, " batch"]:
    """The mean over each sample's valid elements; 0 for a sample that has none.

    Each sample counts once, however much of it is valid. A mean over the valid elements of the whole batch would
    depend on which samples share a batch, so that two processes would not give the gradient of the doubled batch.
    """
    if mask is None:
        return values.flatten(1).mean(dim=1)
    weights = mask.to(values.dtype).expand_as(values)
    valid = weights.flatten(1).sum(dim=1)
    return (values * weights).flatten(1).sum(dim=1) / valid.clamp_min(1.0)
