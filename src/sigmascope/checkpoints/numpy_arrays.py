"""Tensors as NumPy arrays, also those whose element type NumPy lacks."""

from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.errors import ConfigError

ArrayKind = Literal["values", "ml_dtypes", "bits"]
"""How an element type that NumPy lacks is given: as float32 numbers, as a type of `ml_dtypes`, or as raw bits."""

Array = NDArray[Any]

_ML_DTYPES = {
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1 by their code (OCP Microscaling Formats 1.0, section 5.3.3); bit 3 is the sign."""


def to_numpy(tensor: Tensor, kind: ArrayKind = "values") -> Array:
    """A tensor as an array of its own memory or sharing the tensor's.

    Args:
        tensor: Any dense tensor.
        kind: For element types that NumPy lacks (bf16, fp8, fp4); all others are given as they are.
            `values`: float32, which holds each of their numbers exactly. Two fp4 numbers in a byte are unpacked:
            the last axis is twice as long. `ml_dtypes`: the type of that package. `bits`: uint8 or uint16.

    Raises:
        ConfigError: `ml_dtypes` is asked for and not installed, or has no such type.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _ML_DTYPES and name != "float4_e2m1fn_x2":
        return np.asarray(tensor.numpy())
    bits = _bits(tensor)
    if kind == "bits":
        return bits
    if kind == "ml_dtypes":
        return bits.view(_ml_dtype(name))
    if name == "float4_e2m1fn_x2":
        return _unpacked(bits)
    return np.asarray(tensor.to(torch.float32).numpy())


def _bits(tensor: Tensor) -> Array:
    # A view as another type wants elements that lie one after the other.
    flat = tensor.contiguous().view(-1) if tensor.numel() else tensor.new_empty(0)
    unsigned = torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
    return np.asarray(flat.view(unsigned).numpy()).reshape(tuple(tensor.shape))


def _unpacked(codes: Array) -> Array:
    """Both numbers of each byte; the lower four bits come first, as PyTorch packs them."""
    magnitudes = np.array(_FLOAT4, dtype=np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    pairs = np.stack([table[codes & 0xF], table[codes >> 4]], axis=-1)
    return pairs.reshape(*codes.shape[:-1], -1) if codes.ndim else pairs


def _ml_dtype(name: str) -> "np.dtype[Any]":
    try:
        found = getattr(import_module("ml_dtypes"), _ML_DTYPES.get(name, name), None)
    except ImportError as error:
        raise ConfigError(
            "as_numpy='ml_dtypes' needs the package ml_dtypes, which is not installed.",
            hint="Install it with pip install ml_dtypes, or use as_numpy=True for float32 values.",
        ) from error
    if found is None:
        raise ConfigError(f"ml_dtypes has no type for {name}.", hint="Use as_numpy='values' or 'bits'.")
    made: np.dtype[Any] = np.dtype(found)
    return made
