"""Find the state dict inside what `torch.save` stored (SPEC section 7).

Bare, under `model_state_dict`, or (Lightning) under `state_dict` with a `model.` prefix: all three give
the same bare keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import LEFT_OUT_REASON, is_left_out
from sigmascope.checkpoints.paths import shortened
from sigmascope.errors import CheckpointError

_WRAPPERS = ("model_state_dict", "state_dict")
_LIGHTNING_PREFIX = "model."
_COMPVIS_PREFIX = "model.diffusion_model."  # there `model.` is part of the weights' own names


@dataclass(frozen=True, slots=True)
class UnwrappedState:
    """The tensors by bare key, and what was left out with the reason."""

    tensors: Mapping[str, Tensor]
    skipped: Mapping[str, str]


def unwrap_state(loaded: object, path: Path) -> UnwrappedState:
    """Find the tensors in what a checkpoint file holds.

    Args:
        loaded: The object that was saved.
        path: The file, for messages.

    Returns:
        Tensors by bare key; entries that are no tensors are listed as skipped.

    Raises:
        CheckpointError: There is no tensor, or two keys become the same one.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            path,
            f"holds a {type(loaded).__name__} and no dictionary of tensors.",
            hint="Save the model's state_dict() instead.",
        )
    wrapper = next((name for name in _WRAPPERS if isinstance(loaded.get(name), Mapping)), None)
    state: Mapping[Any, Any] = loaded if wrapper is None else loaded[wrapper]
    skipped = {} if wrapper is None else {str(key): "is not a weight" for key in loaded if key != wrapper}
    names = [key for key in state if isinstance(key, str)]
    strip = wrapper == "state_dict" and not any(name.startswith(_COMPVIS_PREFIX) for name in names)
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        name = str(key).removeprefix(_LIGHTNING_PREFIX) if strip else str(key)
        reason = _why_not(key, name, value)
        if reason is not None:
            skipped[name] = reason
        elif name in tensors:
            message = f"has {shortened(name)} twice, with and without `model.` before it."
            raise CheckpointError(path, message, hint="Save the model's state_dict() alone.")
        else:
            tensors[name] = value.detach()
    if not tensors:
        _raise_no_tensors(path, loaded)
    return UnwrappedState(tensors, skipped)


def _why_not(key: object, name: str, value: object) -> str | None:
    if not isinstance(key, str):
        return f"has a {type(key).__name__} for a name"
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__} and not a tensor"
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        return f"is a tensor of a kind that is not read ({value.layout}, {value.device}, {value.dtype})"
    return LEFT_OUT_REASON if is_left_out(name) else None


def _raise_no_tensors(path: Path, loaded: Mapping[Any, Any]) -> None:
    top = ", ".join(str(key)[:40] for key in list(loaded)[:8])
    raise CheckpointError(
        path,
        f"holds no tensors where they are looked for; at its top are: {top or 'nothing'}.",
        hint="Save the model's state_dict() itself, or under `model_state_dict` or `state_dict`.",
    )
