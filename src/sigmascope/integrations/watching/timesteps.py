"""The timestep that a denoiser is called with."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]


def timestep_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The timestep among the arguments of a denoiser's call: the second one, or the one of that name."""
    return kwargs.get("timestep") if len(args) < 2 else args[1]


def number_of(timestep: object) -> float | None:
    """A timestep's number; None where asking would wait for an accelerator, or be seen by who traces the call."""
    if isinstance(timestep, int | float):
        return float(timestep)
    if not isinstance(timestep, Tensor) or timestep.device.type != "cpu" or not timestep.numel():
        return None
    if is_tracing():  # type: ignore[no-untyped-call]
        return None
    with suppress(Exception):  # one that vmap batches, or that has no memory, has no number
        return float(timestep.detach().reshape(-1)[0])
    return None
