"""Which dtypes hold numbers, and in which of them to calculate."""

from typing import Final

import torch
from torch import Tensor

_PACKED: Final = getattr(torch, "float4_e2m1fn_x2", None)  # two numbers an element: PyTorch cannot widen them


def is_real(dtype: torch.dtype) -> bool:
    """Whether PyTorch can turn tensors of this dtype into float32: floating point, but not packed float4."""
    return dtype.is_floating_point and dtype != _PACKED


def at_least_float32(*dtypes: torch.dtype) -> torch.dtype:
    """float64 when it is among them, else float32. Unlike torch.promote_types it takes float8 too."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def in_double(tensor: Tensor) -> Tensor:
    """A detached float64 copy; from Apple's GPUs, which have no float64, on the CPU."""
    source = tensor.detach()
    return (source.cpu() if source.device.type == "mps" else source).to(torch.float64)


def gram_in_double(columns: Tensor) -> Tensor:
    """XᵀX in float64: in float32, whatever is below 10⁻³·⁵ of the largest column would be lost in it."""
    wide = in_double(columns)
    return wide.mT @ wide
