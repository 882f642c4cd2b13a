"""The tensors of a change that is more than plain factors, as kohya's and LyCORIS' tools name them."""

import torch
from torch import Tensor

from sigmascope.lora.adapters import Adapter, DiffChange, DoraChange, LokrChange
from sigmascope.lora.formats.base import FactorKeys
from sigmascope.lora.formats.unit_scale import stored_factors


def change_tensors(
    change: Adapter | DoraChange, keys: FactorKeys, *, is_bias: bool = False
) -> dict[str, Tensor]:
    """The tensors by the end of their key, with an alpha where they have a scale.

    Args:
        change: What to store. A scale that no alpha can carry goes into one of the factors.
        keys: How the format names plain factors and magnitudes.
        is_bias: Whether a difference is one of a bias, and so named `diff_b`.
    """
    if isinstance(change, DoraChange):
        return _direction(change, keys) | _magnitudes(change, keys)
    if isinstance(change, DiffChange):
        values = change.values.detach()
        scaled = values if change.scale == 1.0 else values.float().mul(change.scale)
        return {"diff_b" if is_bias else "diff": scaled}
    return _adapter(change)


def _direction(change: DoraChange, keys: FactorKeys) -> dict[str, Tensor]:
    if isinstance(change.direction, Adapter):
        return _adapter(change.direction)
    tensors = keys.tensors("x", stored_factors(change.direction))
    return {key.removeprefix("x."): tensor for key, tensor in tensors.items()}


def _magnitudes(change: DoraChange, keys: FactorKeys) -> dict[str, Tensor]:
    """LyCORIS keeps them in a column or row of the weight's axes; PEFT in a vector, or a row for a convolution."""
    ones = (1,) * (len(change.weight_shape) - 1)
    row = (1, -1, *ones[1:])
    values = change.magnitude.detach()
    if keys.magnitude is not None:
        return {keys.magnitude: values.reshape(row if len(ones) > 1 else (-1,))}
    return {"dora_scale": values.reshape((-1, *ones) if change.per_output else row)}


def _adapter(change: Adapter) -> dict[str, Tensor]:
    tensors = {name: part.detach() for name, part in change.parts.items()}
    rank = change.rank
    if rank is not None:
        tensors["alpha"] = torch.tensor(change.scale * rank, dtype=torch.float32)
    elif change.scale != 1.0 and isinstance(change, LokrChange):
        # Two whole factors have no rank, and readers take no alpha for them.
        tensors["lokr_w1"] = tensors["lokr_w1"].float().mul(change.scale)
    return tensors
