"""Errors at any point of any strategy, and what a VAE looks like before and after."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sigmascope.pipeline import strategies
from sigmascope.records.latents import EncodingEvent

COPY_BACK = 1_000_000
ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("MPS backend out of memory (MPS allocated: 18.11 GB)"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
    MemoryError,
)


@dataclass
class Sabotage:
    """Raises an error at the n-th call of a module in the strategies that are named.

    0 is before the first kernel, COPY_BACK when all is done but the last copy.
    """

    points: dict[str, int]
    error: Callable[[], BaseException] = ERRORS[0]
    given: Tensor | None = None
    strategy: str = ""
    calls: int = 0
    alive: list["weakref.ref[Tensor]"] = field(default_factory=list)
    alive_at_the_next: list[int] = field(default_factory=list)

    def on_event(self, event: EncodingEvent) -> None:
        if event.strategy is not None:
            self.strategy, self.calls = event.strategy, 0
            self.alive_at_the_next.append(sum(one() is not None for one in self.alive))

    def before_module(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.calls == self.points.get(self.strategy):
            raise self.error()
        self.calls += 1
        if isinstance(inputs[0], Tensor) and not self._is_given(inputs[0]):
            self.alive.append(weakref.ref(inputs[0]))

    def _is_given(self, tensor: Tensor) -> bool:
        storages = (one.untyped_storage().data_ptr() for one in (tensor, self.given) if one is not None)
        return len(set(storages)) == 1 and self.given is not None

    def copy_back(self, tensor: Tensor, device: torch.device) -> Tensor:
        if self.points.get(self.strategy) == COPY_BACK:
            raise self.error()
        return tensor.to(device)

    @contextmanager
    def at_work(self) -> Iterator["Sabotage"]:
        handle = register_module_forward_pre_hook(self.before_module)
        original, strategies.copy_back = strategies.copy_back, self.copy_back
        try:
            yield self
        finally:
            handle.remove()
            strategies.copy_back = original


def state_of(vae: nn.Module) -> list[Any]:
    """All that an attempt could leave changed: by identity where things are kept, by value where they are set."""
    parts = []
    for name, part in vae.named_modules():
        own = {key: id(value) for key, value in vars(part).items() if not key.startswith("_")}
        tensors = [(key, id(one), one.data_ptr(), one.device, one.dtype, one.requires_grad) for key, one in (
            *part._parameters.items(), *part._buffers.items()) if one is not None]  # fmt: skip
        parts.append((name, own, tensors, part.training, len(part._forward_pre_hooks)))
    return parts
