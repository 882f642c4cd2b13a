"""Where a step's gradients are computed and brought together: by Accelerate, or by DeepSpeed's engine."""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn


class AcceleratedBackend:
    """Gradients by Accelerate: of one process, or of DDP or FSDP.

    Args:
        accelerator: Of `accelerated`.
        synchronised: The module whose gradients it brings together.
    """

    def __init__(self, accelerator: Accelerator, synchronised: nn.Module) -> None:
        self._accelerator = accelerator
        self._synchronised = synchronised

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of training."""
        context: AbstractContextManager[object] = self._accelerator.autocast()
        return context

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradients; after a step's last batch they are brought together."""
        self._accelerator.backward(loss)

    def clip(self, max_norm: float) -> Tensor | None:
        """Clip the gradients.

        Returns:
            Their norm before; None where the backend does not tell.
        """
        norm: Tensor | None = self._accelerator.clip_grad_norm_(
            list(self._synchronised.parameters()), max_norm
        )
        return norm

    def release(self) -> None:
        """Nothing: what wraps the model does its part in calls of its own."""


class EngineBackend:
    """Gradients by DeepSpeed's engine.

    Args:
        accelerator: Of `accelerated`; knows which batch is a step's last.
        engine: `DeepSpeedEngine`.
        precision: `bf16` or `no`.
    """

    def __init__(self, accelerator: Accelerator, engine: Any, precision: str) -> None:
        self._accelerator = accelerator
        self._engine = engine
        self._precision = precision

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of training; Accelerate has none under DeepSpeed."""
        return torch.autocast(
            self._accelerator.device.type, torch.bfloat16, enabled=self._precision == "bf16"
        )

    def backward(self, loss: Tensor) -> None:
        """Add a batch's gradients; after a step's last batch they are brought together."""
        # Not Accelerate's, which makes the step at once, before anybody has seen whether the gradient is finite.
        self._engine.set_gradient_accumulation_boundary(is_boundary=self._accelerator.sync_gradients)
        self._engine.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        """The gradient's norm; the engine itself clips to `max_norm`, which it knows, in its step."""
        if self._engine.zero_optimization_stage() == 0:
            return torch.nn.utils.get_total_norm(
                [each.grad for each in self._engine.module.parameters() if each.grad is not None]
            )
        norm = torch.as_tensor(self._engine.optimizer.scaled_global_norm())
        return torch.where(norm < 0, math.nan, norm)  # DeepSpeed says -1 where it is not finite

    def release(self) -> None:
        """Take the engine's hooks out of the model, which is not trained further: a backward pass is its own again."""
        self._engine.destroy()
