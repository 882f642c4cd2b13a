"""The angles between two spaces (Björck and Golub, Math. Comp. 27, 1973)."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_NEAR_ONE: Final = 1.0 - 1e-7
"""Above, a cosine has lost half of the digits of its angle."""


def principal_angles(one: Float[Tensor, "n r"], other: Float[Tensor, "n s"]) -> Float[Tensor, " k"]:
    """The min(r, s) angles between two spaces in degrees, rising; small ones from their sines.

    Args:
        one: Orthonormal columns.
        other: The same, of the same length.
    """
    large, small = (one, other) if one.shape[1] >= other.shape[1] else (other, one)
    core = large.mT @ small
    cosines = torch.linalg.svdvals(core).clamp(max=1.0)
    near = cosines > _NEAR_ONE
    if not bool(near.any()):
        return torch.rad2deg(cosines.acos())
    _, beside = torch.linalg.qr(small - large @ core, mode="r")
    sines = torch.linalg.svdvals(beside).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.where(near, sines.asin(), cosines.acos()))
