"""Where NaN or Inf first appeared: the step's batch is run once more, with a look at every layer."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from sigmascope.errors import NonFiniteError
from sigmascope.lbm.loading import is_finite
from sigmascope.lbm.training.sharding import here

NAMED: Final = 3
"""How many modules or samples a message names."""


@dataclass
class Culprits:
    """Names of modules in the order in which they went wrong: NaN or Inf out of finite weights and inputs."""

    weights: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was found."""
        return bool(self.weights or self.outputs or self.gradients)

    def __str__(self) -> str:
        """As a part of a sentence."""
        for what, names in (
            ("the weights of", self.weights),
            ("the output of", self.outputs),
            ("the gradient behind", self.gradients),
        ):
            if names:
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                return f"first in {what} {', '.join(names[:NAMED])}{more}"
        return "nowhere"


def find_culprits(model: nn.Module, backward: Callable[[], float]) -> Culprits:
    """Run a step's computation again and note each layer whose weights, output or gradient is not finite.

    Args:
        model: Whose layers are looked at; it has no hook more afterwards.
        backward: Computes the loss and its gradients.
    """
    culprits = Culprits()
    for name, module in model.named_modules():
        if any(not is_finite(here(weight)) for weight in module.parameters(recurse=False)):
            culprits.weights.append(name)
    with _hooks(model, culprits):
        loss = backward()
    if math.isfinite(loss) and not culprits.gradients:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not is_finite(here(parameter.grad)):
                culprits.gradients.append(name)
    return culprits


def nonfinite_error(
    step: int, loss: float, keys: Sequence[str], culprits: Culprits | None, last: str | None
) -> NonFiniteError:
    """The error that ends training.

    Args:
        step: The optimizer step that was not made.
        loss: Of it.
        keys: Of the samples it saw.
        culprits: What was found; None when no layer showed it again, or it was another process's batch.
        last: Name of the last checkpoint.
    """
    what = f"the loss is {loss:g}" if not math.isfinite(loss) else "the gradient is not finite"
    where = "in no layer of this process when it was run again" if culprits is None else str(culprits)
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    samples = ", ".join(keys[:NAMED]) + more
    kept = f"{last} is intact; lower" if last else "Lower"
    return NonFiniteError(
        f"step {step}: {what}, {where} (samples {samples}). Training has stopped before the weights took it up.",
        hint=f"{kept} learning_rate, use mixed_precision bf16 or no, or leave the samples out.",
    )


@contextmanager
def _hooks(model: nn.Module, culprits: Culprits) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if not any(module.children()):
            handles.append(module.register_forward_hook(_watch(name, culprits)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, culprits: Culprits) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def gradient(grad: Tensor) -> None:
        if not is_finite(grad) and name not in culprits.gradients:
            culprits.gradients.append(name)

    def look(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if not isinstance(output, Tensor):
            return
        if not is_finite(output) and name not in culprits.outputs:
            culprits.outputs.append(name)
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(gradient)  # type: ignore[no-untyped-call]

    return look
