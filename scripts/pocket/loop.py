"""A training loop that can be stopped at any moment and goes on to the same weights.

Every random choice of step n comes from a generator seeded with (seed, n), so the position in the data is
the step number and nothing but model, optimizer and step has to be kept.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sigmascope.files import atomic_path

LossAt = Callable[[int, torch.Generator], Tensor]
"""Takes the step number and its generator; gives the loss to minimise."""


@dataclass(frozen=True)
class Plan:
    """How one model is trained: AdamW, linear warm-up, then a cosine down to zero."""

    name: str
    steps: int
    learning_rate: float
    seed: int
    warmup_steps: int = 200
    weight_decay: float = 1e-4
    gradient_norm: float = 1.0
    save_every: int = 250

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of `step` (0-based)."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def generator_for(seed: int, step: int) -> torch.Generator:
    """Return the generator of one step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def train(plan: Plan, model: nn.Module, loss_at: LossAt, state_path: Path) -> None:
    """Train `model` in place, from where `state_path` left off.

    Raises:
        FloatingPointError: The loss is not finite; the last saved state is intact.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay, betas=(0.9, 0.98)
    )
    first = _resume(plan, state_path, model, optimizer)
    model.train()
    running, started = 0.0, time.perf_counter()
    for step in range(first, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate_at(step)
        loss = loss_at(step, generator_for(plan.seed, step))
        if not torch.isfinite(loss):
            raise FloatingPointError(f"{plan.name}: the loss of step {step} is {loss.item()}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.gradient_norm)
        optimizer.step()
        running = loss.item() if step == first else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % plan.save_every == 0 or step + 1 == plan.steps:
            _save(plan, state_path, step + 1, model, optimizer)
            rate = (time.perf_counter() - started) / (step + 1 - first)
            left = rate * (plan.steps - step - 1) / 60
            print(
                f"{plan.name} {step + 1}/{plan.steps} loss {running:.4f} {rate:.3f} s/step {left:.1f} min left",
                flush=True,
            )
    model.eval()


def _resume(plan: Plan, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["plan"] != asdict(plan):
        raise SystemExit(f"{path} was trained by another plan; move it away to train anew.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _save(plan: Plan, path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = {
        "plan": asdict(plan),
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    with atomic_path(path) as temporary:
        torch.save(state, temporary)
