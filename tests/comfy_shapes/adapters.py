"""Adapter objects as ComfyUI has kept them since March 2025, and the tuples that it kept before."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class WeightAdapterBase:
    """`loaded_keys` is one set for all adapters of a file."""

    name: ClassVar[str] = ""

    def __init__(self, loaded_keys: set[str], weights: Sequence[Any]) -> None:
        self.loaded_keys = loaded_keys
        self.weights = weights


class LoRAAdapter(WeightAdapterBase):
    """weights: up, down, alpha, mid, dora_scale, reshape."""

    name = "lora"


class LoHaAdapter(WeightAdapterBase):
    """weights: w1_a, w1_b, alpha, w2_a, w2_b, t1, t2, dora_scale."""

    name = "loha"


class LoKrAdapter(WeightAdapterBase):
    """weights: w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora_scale."""

    name = "lokr"


class GLoRAAdapter(WeightAdapterBase):
    """weights: a1, a2, b1, b2, alpha, dora_scale."""

    name = "glora"


class OFTAdapter(WeightAdapterBase):
    """weights: blocks (count, n, n), rescale, alpha, dora_scale."""

    name = "oft"


class BOFTAdapter(WeightAdapterBase):
    """weights: blocks (levels, count, n, n), rescale, alpha, dora_scale."""

    name = "boft"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora_parts(
    out: int = 8,
    rank: int = 2,
    width: int = 8,
    alpha: float | None = 1.0,
    *,
    seed: int = 0,
    size: float = 0.1,
) -> tuple[Any, ...]:
    """(up, down, alpha, mid, dora_scale, reshape) for a matrix of out × width."""
    up, down = random(out, rank, seed=seed), random(rank, width, seed=seed + 1)
    return (up * size, down, alpha, None, None, None)


def lora_adapter(
    out: int = 8, rank: int = 2, width: int = 8, alpha: float | None = 1.0, *, seed: int = 0
) -> LoRAAdapter:
    return LoRAAdapter({"unet.lora_up.weight"}, lora_parts(out, rank, width, alpha, seed=seed))


def lora_tuple(
    out: int = 8, rank: int = 2, width: int = 8, alpha: float | None = 1.0, *, seed: int = 0, parts: int = 5
) -> tuple[str, tuple[Any, ...]]:
    """The same as it was kept before there were adapters: 5 parts, 6 from December 2024."""
    return ("lora", lora_parts(out, rank, width, alpha, seed=seed)[:parts])


def loha_parts(out: int = 8, rank: int = 2, width: int = 8) -> tuple[Any, ...]:
    first, second = random(out, rank, seed=3), random(rank, width, seed=4)
    return (first, second, 1.0, random(out, rank, seed=5), random(rank, width, seed=6), None, None, None)


def change_of(value: Any, weight: Tensor, strength: float) -> Tensor:
    """What a LoRA, LoHa, difference or replacement adds to a weight, as the hosts' documentation has it."""
    kind, parts = (value.name, value.weights) if isinstance(value, WeightAdapterBase) else value
    if kind == "set":
        return parts[0] - weight  # type: ignore[no-any-return]
    if kind == "diff":
        return strength * parts[0]  # type: ignore[no-any-return]
    if kind == "lora":
        up, down, alpha = parts[0].flatten(1), parts[1].flatten(1), parts[2]
        product, rank = up @ down, down.shape[0]
    else:
        product, rank, alpha = (parts[0] @ parts[1]) * (parts[3] @ parts[4]), parts[1].shape[0], parts[2]
    scale = 1.0 if alpha is None else alpha / rank
    return strength * scale * product.reshape(weight.shape)  # type: ignore[no-any-return]
