"""Norms summed in float64: a float32 sum over 13 million squares is 0.1 % low, which flatters errors."""

import math
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK: Final = 1 << 20  # elements widened at a time: 8 MiB, whatever the layer's size
_IN_CACHE: Final = 1 << 18
_UP_TO_FLOAT32: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_RUN: Final = 256
_LEAST_MEAN_SQUARE: Final = 1e-30  # below, single squares leave the range of float32


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


def quick_norm(tensor: Float[Tensor, "..."]) -> float:
    """‖tensor‖ in one pass in the cache, of at most float32, by `quick_energy`; others as `frobenius_norm`.

    Returns:
        The norm, off by less than 10⁻⁷ of it; NaN or Inf when the tensor holds any.
    """
    if tensor.dtype not in _UP_TO_FLOAT32:
        return frobenius_norm(tensor)
    flat = tensor.detach().reshape(-1)
    energies = [
        quick_energy(flat[start : start + _IN_CACHE].to(torch.float32))
        for start in range(0, flat.numel(), _IN_CACHE)
    ]
    return math.sqrt(float(torch.stack(energies).sum())) if energies else 0.0


def root_sum_square(norms: list[float]) -> float:
    """The norm of several blocks together from the norm of each: √Σ nᵢ²."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def quick_energy(tensor: Float[Tensor, " n"]) -> Tensor:
    """‖tensor‖² of float32 values in one pass: float32 within runs of 256, float64 across them.

    Runs that short are off by about 10⁻⁸ of the sum, and by no more than 10⁻⁶ whatever the values, where one
    float32 sum over millions is off by 10⁻³. Values whose squares leave float32's range are summed in float64.

    Args:
        tensor: Contiguous, any length.

    Returns:
        A float64 scalar; NaN or Inf when the tensor holds any.
    """
    whole = tensor.numel() - tensor.numel() % _RUN
    runs = torch.linalg.vector_norm(tensor[:whole].view(-1, _RUN), dim=1)
    rest = tensor[whole:].to(torch.float64)
    total: Tensor = runs.to(torch.float64).square().sum() + torch.dot(rest, rest)
    if _LEAST_MEAN_SQUARE * tensor.numel() <= float(total) < math.inf:
        return total
    return torch.full_like(total, frobenius_norm(tensor) ** 2)
