"""One optimizer step: forward and backward for each batch of its group, clipping, the change of the weights.

When loss or gradient is NaN or Inf, the step's batches are run once more with a look at every layer, to say where
it first appeared.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from sigmascope.errors import NonFiniteError
from sigmascope.lbm.data import Batch
from sigmascope.lbm.model import is_finite
from sigmascope.lbm.training.accelerate import Losses, Prepared
from sigmascope.lbm.training.distributed import Processes, StepBatches, full_tensor, local_tensor

SKIPS_ALLOWED = 30
"""Steps in a row that the gradient scaler may skip while it looks for its scale (2^16 halves to below 2^-13)."""
NAMED: Final = 3
"""How many modules or samples a message names."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, in this process.

    Attributes:
        loss: Mean over the samples of this process.
        latent: Its latent term; None where it has no weight.
        pixel: Its pixel term; None where it has no weight.
        gradient_norm: Of all processes together, before clipping; None where the backend does not tell.
        skipped: The gradient scaler met Inf and made no step.
    """

    loss: float
    latent: float | None
    pixel: float | None
    gradient_norm: float | None
    skipped: bool


@dataclass
class NonFiniteLayers:
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


class Stepper:
    """Makes optimizer steps.

    Args:
        accelerator: Of the run.
        prepared: By it.
        schedule: Of the learning rate, not prepared: it counts optimizer steps, whatever the processes.
        max_grad_norm: None clips nothing.
        team: The processes.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        prepared: Prepared,
        schedule: LRScheduler,
        max_grad_norm: float | None,
        team: Processes,
    ) -> None:
        self.accelerator = accelerator
        self.prepared = prepared
        self.optimizer = prepared.optimizer
        self.schedule = schedule
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._team = team
        self._skips = 0

    def make(self, group: StepBatches[Any], step: int, last_checkpoint: str | None) -> StepResult:
        """Make one step. The gradient is the mean over all samples of all processes.

        Args:
            group: The step's batches.
            step: Its number, for errors.
            last_checkpoint: Likewise.

        Raises:
            NonFiniteError: Loss or gradient is NaN or Inf; the weights are as they were before the step.
        """
        size = self.accelerator.gradient_accumulation_steps
        # A short group ends at the same count, so that its last batch is the one that synchronises.
        self.accelerator.step = size - len(group.batches)
        losses: list[Losses] = []
        for batch in group.batches:
            with self.accelerator.accumulate(self.prepared.synchronised):
                # Accelerate puts autocast into a module that it wraps, but not where FSDP spreads it.
                with self.prepared.backend.autocast():
                    terms: Losses = self.prepared.module(to_device(batch, self.accelerator.device))
                # The backend divides by processes and accumulated batches, and samples count alike in all.
                weight = len(batch) * size * self._team.size / group.samples
                self.prepared.backend.backward(terms[0] * weight if weight != 1 else terms[0])
                losses.append(tuple(term.detach() for term in terms))  # type: ignore[arg-type]
        return self._finish(group, step, losses, last_checkpoint)

    def _finish(
        self, group: StepBatches[Any], step: int, losses: Sequence[Losses], last_checkpoint: str | None
    ) -> StepResult:
        norm = self.prepared.backend.clip(self._max_norm)
        samples = [len(batch) for batch in group.batches]
        total, latent, pixel = (_mean(samples, [float(terms[i]) for terms in losses]) for i in range(3))
        gradient_norm = None if norm is None else float(full_tensor(norm))
        if self._is_lost(total, gradient_norm):
            raise self._lost(group, step, total, last_checkpoint)
        self.optimizer.step()
        skipped = bool(getattr(self.optimizer, "step_was_skipped", False))
        self._skips = self._skips + 1 if skipped else 0
        if not skipped:
            self.schedule.step()
        self.optimizer.zero_grad()
        return StepResult(total, _known(latent), _known(pixel), gradient_norm, skipped)

    def _is_lost(self, loss: float, norm: float | None) -> bool:
        """Whether any process has NaN or Inf where a smaller scale of the gradients would not help."""
        scales = self.accelerator.scaler is not None and self._skips < SKIPS_ALLOWED
        bad_gradient = norm is not None and not math.isfinite(norm) and not scales
        return self._team.any(not math.isfinite(loss) or bad_gradient)

    def _lost(
        self, group: StepBatches[Any], step: int, loss: float, last_checkpoint: str | None
    ) -> NonFiniteError:
        keys = [key for batch in group.batches for key in batch.keys]
        culprits = None
        self.prepared.backend.release()
        for batch in group.batches:
            found = self._culprits(batch)
            if found and culprits is None:
                culprits, keys = found, list(batch.keys)
            if found and not self.prepared.sharded:  # where it is, all processes run all of their batches
                break
        return nonfinite_error(step, loss, keys, culprits, last_checkpoint)

    def _culprits(self, batch: Batch) -> NonFiniteLayers:
        inner = self.accelerator.unwrap_model(self.prepared.module)
        inner.zero_grad()

        def backward() -> float:
            with self.prepared.backend.autocast():
                again = inner(to_device(batch, self.accelerator.device))[0]
            again.backward()
            return float(again.detach())

        return find_culprits(inner.model, backward)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all its pictures on a device."""
    if device.type == "cpu":
        return batch
    return replace(
        batch,
        source=batch.source.to(device),
        target=batch.target.to(device),
        mask=None if batch.mask is None else batch.mask.to(device),
        conditioning_images={key: image.to(device) for key, image in batch.conditioning_images.items()},
        conditioning_masks={key: mask.to(device) for key, mask in batch.conditioning_masks.items()},
    )


def _mean(weights: Sequence[int], values: Sequence[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def nonfinite_error(
    step: int, loss: float, keys: Sequence[str], culprits: NonFiniteLayers | None, last: str | None
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


def find_culprits(model: nn.Module, backward: Callable[[], float]) -> NonFiniteLayers:
    """Run a step's computation again and note each layer whose weights, output or gradient is not finite.

    Args:
        model: Whose layers are looked at; it has no hook more afterwards.
        backward: Computes the loss and its gradients.
    """
    culprits = NonFiniteLayers()
    for name, module in model.named_modules():
        if any(not is_finite(local_tensor(weight)) for weight in module.parameters(recurse=False)):
            culprits.weights.append(name)
    with _hooks(model, culprits):
        loss = backward()
    if math.isfinite(loss) and not culprits.gradients:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not is_finite(local_tensor(parameter.grad)):
                culprits.gradients.append(name)
    return culprits


@contextmanager
def _hooks(model: nn.Module, culprits: NonFiniteLayers) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if not any(module.children()):
            handles.append(module.register_forward_hook(_watch(name, culprits)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, culprits: NonFiniteLayers) -> Callable[[nn.Module, tuple[object, ...], object], None]:
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
