"""What singular values say of a change: how many directions it really uses."""

import torch
from jaxtyping import Float
from torch import Tensor


def stable_rank(values: Float[Tensor, " k"]) -> float:
    """‖ΔW‖² / σ₁² (Rudelson and Vershynin, arXiv math/0503442), from 1 to the rank; 0 for a zero change.

    Small singular values hardly count, so that noise does not raise it.

    Args:
        values: (k,), falling, all that are not zero.
    """
    if len(values) == 0 or float(values[0]) <= 0.0:
        return 0.0
    return float((values / values[0]).square().sum())


def effective_rank(values: Float[Tensor, " k"]) -> float:
    """exp(−Σ pᵢ ln pᵢ) with pᵢ = σᵢ / Σσ (Roy and Vetterli, EUSIPCO 2007); 0 for a zero change.

    It is r for r equal singular values, and lies between 1 and the rank.

    Args:
        values: (k,), falling, all that are not zero.
    """
    positive = values[values > 0.0].to(torch.float64)
    if len(positive) == 0:
        return 0.0
    shares = positive / positive.sum()
    return float(torch.exp(torch.special.entr(shares).sum()))
