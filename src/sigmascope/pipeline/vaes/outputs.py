"""What comes out of a VAE's `encode` and `decode`: tensors, distributions, and what libraries wrap them in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError

_ENCODED = ("latent_dist", "latents", "latent", "sample", "samples")
_DECODED = ("sample", "samples", "images", "frames")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A latent, or the parameters of the distribution that it is drawn from.

    Attributes:
        tensor: What tiles are blended from.
        posterior: The distribution's class, where `tensor` holds its parameters.
    """

    tensor: Tensor
    posterior: type[Any] | None = None

    def latent(self, *, sample: bool, generator: torch.Generator | None) -> Tensor:
        """The distribution's mode, or a draw from it; the latent itself where there is no distribution."""
        if self.posterior is None:
            return self.tensor
        distribution = self.posterior(self.tensor)
        drawn: Tensor = distribution.sample(generator=generator) if sample else distribution.mode()
        return drawn


def encoded(output: object) -> Encoded:
    """Read what `encode` gave: diffusers' outputs, tuples of them, mappings, or a bare tensor.

    Raises:
        ModelMismatchError: There is no tensor in it.
    """
    found = _unwrapped(output, _ENCODED)
    if isinstance(found, Tensor):
        return Encoded(found)
    parameters = getattr(found, "parameters", None)
    if isinstance(parameters, Tensor) and hasattr(found, "mode"):
        return Encoded(parameters, type(found))
    mode = _mode_of(found)
    if isinstance(mode, Tensor):
        return Encoded(mode)
    raise _no_tensor("encode", output)


def _mode_of(distribution: Any) -> object:
    """A method in diffusers, a property in `torch.distributions`, where some have none."""
    try:
        mode = distribution.mode
    except (AttributeError, NotImplementedError):
        return None
    return mode() if callable(mode) else mode


def decoded(output: object) -> Tensor:
    """The pictures in what `decode` gave.

    Raises:
        ModelMismatchError: There is no tensor in it.
    """
    found = _unwrapped(output, _DECODED)
    if isinstance(found, Tensor):
        return found
    raise _no_tensor("decode", output)


def check_can_sample(one: Encoded) -> None:
    """Refuse a draw where there is nothing to draw from.

    Raises:
        ConfigError: The VAE gives latents and no distribution.
    """
    if one.posterior is None:
        raise ConfigError(
            "sample: this VAE gives no distribution whose parameters could be drawn from.",
            hint="Leave sample=False.",
        )


def check_count(made: Tensor, given: Tensor, what: str, of: str) -> None:
    """Refuse more or fewer results than were asked for, of a VAE that takes each picture by itself.

    Raises:
        ModelMismatchError: The first axes differ.
    """
    if made.shape[:1] != given.shape[:1]:
        raise ModelMismatchError(
            f"The VAE gave {what} of shape {tuple(made.shape)} for {given.shape[0]} {of}.",
            hint=f"Its results should have as many on the first axis as there are {of}.",
        )


def _unwrapped(output: object, names: tuple[str, ...]) -> Any:
    for _ in range(3):  # a tuple that holds a mapping that holds the tensor is as deep as it gets
        if isinstance(output, Tensor):
            return output
        inner = _inner(output, names)
        if inner is None:
            return output
        output = inner
    return output


def _inner(output: object, names: tuple[str, ...]) -> object:
    if isinstance(output, Mapping):  # diffusers' outputs are mappings too
        return next((output[name] for name in names if name in output), None)
    if isinstance(output, tuple | list):
        return output[0] if output else None
    found = (getattr(output, name, None) for name in names)
    return next((one for one in found if one is not None and not callable(one)), None)


def _no_tensor(method: str, output: object) -> ModelMismatchError:
    return ModelMismatchError(
        f"The VAE's {method} gave {type(output).__name__}, in which no tensor was found.",
        hint=f"Its {method} should give a tensor, or what diffusers' {method} gives.",
    )
