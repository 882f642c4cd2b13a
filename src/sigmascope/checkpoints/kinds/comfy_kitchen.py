"""The package comfy-kitchen, whose layouts read and store ComfyUI's formats."""

import importlib
from typing import Any

import torch
from torch import Tensor

from sigmascope.installation import install_extra


def layout(name: str) -> Any:
    """A layout by its class's name.

    Raises:
        ImportError: The package is not installed; the message says how to.
    """
    try:
        return getattr(importlib.import_module("comfy_kitchen.tensor"), name)
    except ImportError as error:
        raise ImportError(
            f"the package comfy-kitchen, which reads it, is not installed: {install_extra('comfyui')}"
        ) from error


def missing(title: str) -> str | None:
    """Why weights of a kind cannot be read; None if the package is there."""
    try:
        layout("TensorWiseINT8Layout")
    except ImportError as error:
        return f"it holds {title}, and {error}"
    return None


def dequantised(name: str, codes: Tensor, columns: int, **params: Any) -> Tensor:
    """Codes of a layout as float32."""
    made = layout(name)
    facts = made.Params(orig_dtype=torch.float32, orig_shape=(codes.shape[0], columns), **params)
    numbers: Tensor = made.dequantize(codes, facts)
    return numbers


def stored(name: str, numbers: Tensor, **how: Any) -> Tensor:
    """Numbers as they are read once a layout stored them."""
    made = layout(name)
    codes, facts = made.quantize(numbers, **how)
    again: Tensor = made.dequantize(codes, facts)
    return again[: numbers.shape[0], : numbers.shape[1]]
