"""Norms summed in float64: a float32 sum over 13 million squares is 0.1 % low, which flatters errors."""

import math
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK: Final = 1 << 20  # elements widened at a time: 8 MiB, whatever the layer's size


def frobenius_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ with the squares summed in float64, without a float64 copy of the whole.

    Returns:
        The norm; NaN or Inf when the tensor holds any.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        wide = flat[start : start + _CHUNK].to(torch.float64)
        total += torch.dot(wide, wide)
    return math.sqrt(total.item())


def root_sum_square(norms: list[float]) -> float:
    """The norm of several blocks together from the norm of each: √Σ nᵢ²."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))
