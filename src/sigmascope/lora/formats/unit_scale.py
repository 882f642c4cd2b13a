"""Factors as they are stored: alpha = rank, so that a reader which ignores alpha gets the same ΔW."""

from dataclasses import replace

import torch
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.precision import at_least_float32


def stored_factors(factors: LoraFactors, dtype: torch.dtype | None = None) -> LoraFactors:
    """The same ΔW with its scale in the up factor.

    Args:
        factors: Of any scale.
        dtype: To store them in. When left out they keep their own, but an up factor that would lose digits by
            the multiplication becomes float32: a scale of 1/2 loses none, one of 5/8 may.
    """
    rank = float(factors.rank)
    if factors.scale == 1.0:
        return replace(factors if dtype is None else factors.to(dtype=dtype), alpha=rank)
    wide = factors.up.detach().to(torch.float64 if factors.up.device.type != "mps" else torch.float32)
    product = wide * factors.scale
    if dtype is not None:
        return replace(factors, up=product.to(dtype), down=factors.down.to(dtype), alpha=rank)
    return replace(factors, up=_kept(product, factors.up.dtype), alpha=rank)


def _kept(product: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = product.to(dtype)
    same = torch.equal(rounded.to(product.dtype), product)
    return rounded if same else product.to(at_least_float32(dtype))
