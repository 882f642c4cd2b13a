"""The element types of safetensors files and their counterparts in PyTorch, in one place.

Codes are those of the safetensors format. A type that the installed PyTorch does not have yet is known
by its size, so that a header can still be checked and listed.
"""

import torch

_BITS_AND_TORCH_NAME = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, "float4_e2m1fn_x2"),
}

BITS: dict[str, int] = {code: bits for code, (bits, _) in _BITS_AND_TORCH_NAME.items()}
"""Bits of one element, by safetensors code."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, (_, name) in _BITS_AND_TORCH_NAME.items()
    if name is not None and hasattr(torch, name)
}
"""PyTorch's type, by safetensors code, as far as the installed version has it."""

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}
"""Safetensors code, by PyTorch's type."""

_PACKED = {"F4": 2}  # elements that PyTorch keeps in one of its own


def to_torch(code: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """PyTorch's type and shape of a tensor in a file; None when this PyTorch has no such type."""
    dtype = TORCH_DTYPES.get(code)
    packed = _PACKED.get(code, 1)
    if dtype is None or packed == 1:
        return None if dtype is None else (dtype, shape)
    if not shape or shape[-1] % packed:
        return None
    return dtype, (*shape[:-1], shape[-1] // packed)


def to_file(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Code and shape with which a file names a tensor; None when the format has no such type."""
    code = CODES.get(dtype)
    packed = 1 if code is None else _PACKED.get(code, 1)
    if code is None or (packed > 1 and not shape):
        return None
    return code, shape if packed == 1 else (*shape[:-1], shape[-1] * packed)
