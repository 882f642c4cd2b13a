"""The weights that effects are measured on, whose numbers are summed in float64."""

from math import isfinite, prod
from typing import Final

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.norms import quick_norm
from sigmascope.lora.precision import is_real

NOT_GIVEN: Final = "the weight was not given"
_CHUNK: Final = 1 << 20


def weight_norm(weight: Tensor | None) -> float:
    """‖W‖.

    Raises:
        LoraFormatError: There is no weight, or one whose stored numbers are not the layer's.
        NonFiniteError: It holds NaN or Inf.
    """
    if weight is None:
        raise LoraFormatError(NOT_GIVEN)
    _require_numbers(weight)
    return finite(quick_norm(weight.cpu() if weight.device.type == "mps" else weight), "the weight")


def difference(before: Tensor, after: Tensor) -> float:
    """‖after − before‖, formed piece by piece on the device of `after`; raises what `weight_norm` does.

    Raises:
        ModelMismatchError: They are of different shape.
    """
    if before.shape != after.shape:
        raise ModelMismatchError(f"the weight was {tuple(before.shape)} and is {tuple(after.shape)}.")
    _require_numbers(before)
    _require_numbers(after)
    one, two = before.detach().to(after.device).reshape(-1), after.detach().reshape(-1)
    squares = []
    for start in range(0, prod(after.shape), _CHUNK):
        chunk = two[start : start + _CHUNK].to(torch.float64) - one[start : start + _CHUNK].to(torch.float64)
        squares.append(torch.dot(chunk, chunk))
    return finite(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)


def finite(norm: float, what: str = "the change") -> float:
    """The norm.

    Raises:
        NonFiniteError: It is NaN or infinite.
    """
    if not isfinite(norm):
        raise NonFiniteError(f"{what} holds NaN or Inf, or numbers too large for float64.")
    return norm


def wide(weight: Tensor) -> Tensor:
    """The weight in float64; raises what `weight_norm` does of its dtype."""
    _require_numbers(weight)
    source = weight.detach()
    return (source.cpu() if source.device.type == "mps" else source).to(torch.float64)


def enlarged(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight with zeros behind, up to a shape."""
    if tuple(weight.shape) == shape:
        return weight
    whole = weight.new_zeros(shape)
    whole[tuple(map(slice, weight.shape))] = weight
    return whole


def _require_numbers(weight: Tensor) -> None:
    if not is_real(weight.dtype):
        raise LoraFormatError(
            f"the weight is stored as {str(weight.dtype).removeprefix('torch.')}, whose numbers are not those of the layer."
        )
