"""The tensors of a change that is more than plain factors, as kohya's and LyCORIS' tools name them."""

import torch
from torch import Tensor

from sigmascope.lora.adapters import Adapter, DiffChange, DoraChange, LokrChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.base import FactorKeys
from sigmascope.lora.formats.unit_scale import stored_factors


def change_tensors(change: Adapter | DoraChange, *, is_bias: bool = False) -> dict[str, Tensor]:
    """The tensors by the end of their key, with an alpha where they have a scale.

    Args:
        change: What to store. A scale that no alpha can carry goes into one of the factors.
        is_bias: Whether a difference is one of a bias, and so named `diff_b`.
    """
    if isinstance(change, DoraChange):
        axes = len(change.weight_shape) - 1
        ones = (1,) * axes
        shape = (-1, *ones) if change.per_output else (1, -1, *ones[1:])
        inner = (
            _plain(change.direction)
            if isinstance(change.direction, LoraFactors)
            else _adapter(change.direction)
        )
        return inner | {"dora_scale": change.magnitude.detach().reshape(shape)}
    if isinstance(change, DiffChange):
        values = change.values.detach()
        scaled = values if change.scale == 1.0 else values.float().mul(change.scale)
        return {"diff_b" if is_bias else "diff": scaled}
    return _adapter(change)


def _plain(factors: LoraFactors) -> dict[str, Tensor]:
    tensors = FactorKeys().tensors("x", stored_factors(factors))
    return {key.removeprefix("x."): tensor for key, tensor in tensors.items()}


def _adapter(change: Adapter) -> dict[str, Tensor]:
    tensors = {name: part.detach() for name, part in change.parts.items()}
    rank = change.rank
    if rank is not None:
        tensors["alpha"] = torch.tensor(change.scale * rank, dtype=torch.float32)
    elif change.scale != 1.0 and isinstance(change, LokrChange):
        # Two whole factors have no rank, and readers take no alpha for them.
        tensors["lokr_w1"] = tensors["lokr_w1"].float().mul(change.scale)
    return tensors
