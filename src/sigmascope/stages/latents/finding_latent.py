"""Find the latent in what a VAE, a pipeline or a node gives back.

Known forms: a tensor or array; ComfyUI's `{"samples": tensor}`, alone or in a node's outputs; diffusers'
outputs with `latent_dist`, `latents`, `latent` or `sample`; any mapping or sequence of these.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sigmascope.stages.host_reading import read_host
from sigmascope.stages.text.nesting import as_tensor, leaves_of

_LATENT_NAMES = ("samples", "latents", "latent", "init_latent", "latent_samples", "encodings", "z", "sample")


class FoundLatent(NamedTuple):
    """The tensor and in what it was. `reason` says why there is none; `raised`: its own code failed."""

    tensor: Tensor | None
    structure: str
    reason: str | None = None
    raised: bool = False


def find_latent(output: object) -> FoundLatent:
    """The latent in an output. Nothing is computed: of a distribution its mean is taken. Never raises."""
    if output is None:
        return FoundLatent(None, "none", "no latent was given")
    structure = _structure(output)
    reading = read_host(lambda: _find(output))
    if reading.reason is not None:
        return FoundLatent(None, structure, reading.reason, raised=True)
    reason = f"no tensor was found in it ({structure})"
    return FoundLatent(reading.value, structure, reason if reading.value is None else None)


def _structure(output: object) -> str:
    if as_tensor(output) is not None:
        return "tensor"
    if isinstance(output, Mapping):
        plain = "mapping" if type(output) is dict else type(output).__name__
        return "ComfyUI latent" if "samples" in output else plain
    return "sequence" if type(output) in (list, tuple) else type(output).__name__


def _find(output: Any, depth: int = 0) -> Tensor | None:
    tensor = as_tensor(output)
    if tensor is not None or depth > 3:
        return tensor
    named = _named(output)
    if named is not None:
        return _find(named, depth + 1)
    if isinstance(output, list | tuple):
        return _in_sequence(output, depth)
    floating = (leaf.tensor for leaf in leaves_of(output) if leaf.tensor.is_floating_point())
    return next(floating, None)


def _in_sequence(output: list[Any] | tuple[Any, ...], depth: int) -> Tensor | None:
    """A latent by its name in one of the items; else several tensors of one shape as a batch, or the first."""
    for item in output:
        if isinstance(item, Mapping) and "samples" in item:
            return _find(item, depth + 1)
    tensors = [as_tensor(item) for item in output]
    if len(tensors) > 1 and all(tensor is not None for tensor in tensors):
        known = [tensor for tensor in tensors if tensor is not None]
        if len({tensor.shape for tensor in known}) == 1 and known[0].ndim == 3:
            return torch.stack(known)
    found = (_find(item, depth + 1) for item in output)
    return next((tensor for tensor in found if tensor is not None), None)


def _named(output: Any) -> Any:
    """What a distribution has as its mean, or a mapping or an output under one of the names."""
    if isinstance(output, list) or type(output) is tuple:
        return None
    distribution = _value(output, "latent_dist") or output
    if callable(getattr(distribution, "mode", None)):
        return getattr(distribution, "mean", None)
    held = (_value(output, name) for name in _LATENT_NAMES)
    return next((one for one in held if one is not None and not callable(one)), None)


def _value(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
