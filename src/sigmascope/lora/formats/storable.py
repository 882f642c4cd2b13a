"""What may go into a LoRA file."""

import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.adapters import Adapter, DoraChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.base import FactorKeys
from sigmascope.lora.precision import at_least_float32


def holds(keys: FactorKeys, change: Adapter | DoraChange) -> bool:
    """Whether a format can hold a change that is more than plain factors."""
    is_plain = (
        isinstance(change, DoraChange) and isinstance(change.direction, LoraFactors) and change.per_output
    )
    return keys.holds_changes or (keys.magnitude is not None and is_plain)


def require_finite(module: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds NaN or Inf.

    Raises:
        NonFiniteError: With the module and the dtype.
    """
    if not bool(torch.isfinite(tensor.to(at_least_float32(tensor.dtype))).all()):
        raise NonFiniteError(
            f"{module}: a factor holds NaN or Inf in {tensor.dtype}.",
            hint="Store in bfloat16 or float32, which hold larger values than float16.",
        )
