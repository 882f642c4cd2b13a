"""What can be compared: dense tensors with values."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.records.facts import TensorFacts

TensorLike = Tensor | NDArray[Any]


def as_tensor(value: TensorLike, side: str) -> Tensor:
    """A dense tensor with values.

    Raises:
        ConfigError: It is none; `side` says which.
    """
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value if value.flags.writeable else value.copy())
        except (TypeError, ValueError) as error:
            message = f"{side} is an array of {value.dtype} that PyTorch cannot take over ({error})."
            raise ConfigError(message, hint="Give it as a tensor.") from error
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{side} is a {type(value).__name__} and no tensor.",
            hint="Give tensors, arrays, or what sigmascope.load_tensors gives.",
        )
    if value.is_meta or value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
        message = f"{side} is a {kind} tensor of {value.dtype}: its values cannot be compared."
        raise ConfigError(message, hint="Convert it with .to_dense() or .dequantize() first.")
    return value.detach()


def as_comparable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Complex numbers as two real ones on an axis more; fp4, which PyTorch does not compute with, by its codes.

    Raises:
        ConfigError: One alone is fp4.
    """
    packed = [str(tensor.dtype) == "torch.float4_e2m1fn_x2" for tensor in (a, b)]
    if all(packed):
        return a.view(torch.uint8), b.view(torch.uint8)
    if any(packed):
        raise ConfigError(
            f"{a.dtype} and {b.dtype} cannot be compared.",
            hint="Unpack the fp4 numbers first: load_tensors can.",
        )
    if not (a.is_complex() or b.is_complex()):
        return a, b
    wide_a, wide_b = (tensor if tensor.is_complex() else tensor.to(torch.complex128) for tensor in (a, b))
    return torch.view_as_real(wide_a.resolve_conj()), torch.view_as_real(wide_b.resolve_conj())


def outline(tensor: Tensor, device: str | None) -> TensorFacts:
    """Shape, dtype, bytes, and the device: that of its dump, or where it lies."""
    return TensorFacts(
        shape=tuple(int(size) for size in tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=device or str(tensor.device),
        nbytes=tensor.numel() * tensor.element_size(),
        num_elements=tensor.numel(),
    )
