"""Changes that need the weight, where the LoRA has one matrix for several layers of the model, or the other way round.

The rows of a fused matrix are those of its parts. A change that treats each row by itself divides with them (`rows_of`): a
rotation, reflection or scaling of inputs (PEFT's OFT, BOFT and HRA, (IA)³) is the same for each part; a scaling of outputs,
VeRA, GLoRA's two factors, DoRA's magnitudes of outputs and a whole tensor are cut. A rotation of outputs (LyCORIS', kohya's)
divides where none of its blocks has rows of two parts; its limit ‖Q‖ ≤ alpha · out is over all blocks and goes into them.

What does not divide depends on the weights of the other parts too (blocks across two parts, DoRA's magnitudes of inputs),
and is formed of all of them: `PartOfFused.weights` reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import Adapter, DiffChange, DoraChange, LohaChange, SetChange, WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.kinds.base_change import BaseChange
from sigmascope.lora.linalg import at_least_float32, frobenius_norm

__all__ = ["JoinedParts", "PartOfFused", "SwappedHalves", "Weights", "rows_of"]

Sizes = Callable[[Sequence[int]], list[int]]
"""How many rows each part of a fused weight of a shape has."""
Weights = Callable[[str], Tensor]
"""Reads the weight of one of the model's layers."""


def rows_of(change: WeightChange, sizes: Sequence[int], index: int) -> WeightChange | None:
    """The change of one part of a fused matrix by itself; None if it depends on the other parts, or cannot be divided.

    Args:
        change: Of the fused matrix.
        sizes: How many rows each part has; empty where the change is the same for each.
        index: Of the part.
    """
    if isinstance(change, BaseChange):
        return change.of_rows(sizes, index)
    rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
    if isinstance(change, SetChange | DiffChange):
        return type(change)({name: part[rows] for name, part in change.parts.items()}, change.scale)
    if isinstance(change, DoraChange) and change.per_output:
        return DoraChange(_rows_of_direction(change.direction, rows), change.magnitude.flatten()[rows])
    return None


def _rows_of_direction(change: LoraFactors | Adapter, rows: slice) -> LoraFactors | Adapter:
    """A direction's rows in its own form; those of a Kronecker product or a Tucker core are formed."""
    if isinstance(change, LoraFactors):
        up = change.up[rows]
        return LoraFactors(up, change.down, change.alpha, (len(up), *change.weight_shape[1:]))
    if isinstance(change, LohaChange) and "hada_t1" not in change.parts:
        cut = {name: part[rows] if name.endswith("_a") else part for name, part in change.parts.items()}
        return LohaChange(cut, change.scale)
    return DiffChange({"diff": change.delta()[rows].clone()}, 1.0)


class _OfWeights:
    """What changes have in common that only the model's weights tell."""

    needs_base = True
    weight_shape: tuple[int, ...] = ()
    rank: int | None = None

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW; see `WeightChange.delta`.

        Raises:
            LoraFormatError: No base is given, or it depends on other weights too and they are not.
            ModelMismatchError: The base is of another shape.
        """
        if base is None:
            raise LoraFormatError(
                "a change of a fused matrix depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        compute = at_least_float32(dtype)
        return self._formed(base.detach().to(dtype=compute), compute).to(dtype).reshape(base.shape)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64; raises what `delta` does."""
        return frobenius_norm(self.delta(base))

    def _formed(self, base: Tensor, compute: torch.dtype) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class PartOfFused(_OfWeights):
    """The change of one part of a fused matrix.

    Attributes:
        whole: Of the fused matrix.
        layers: The parts, in the order of its rows.
        index: Which of them this is.
        sizes: Of the parts.
        weights: Reads the parts' weights, where the model is at hand.
    """

    whole: WeightChange
    layers: tuple[str, ...]
    index: int
    sizes: Sizes
    weights: Weights | None = None

    @property
    def kind(self) -> str:
        """That of the whole."""
        return self.whole.kind

    @property
    def parameters(self) -> int:
        """That of the whole, which each part is made of."""
        return self.whole.parameters

    def cut(self, weight_shape: Sequence[int]) -> WeightChange | None:
        """The change of this part's weight by itself; None if it depends on the other parts' weights.

        Raises:
            LoraFormatError: The fused matrix cannot have such parts.
        """
        whole = self.whole
        outputs = whole.outputs if isinstance(whole, BaseChange) else whole.weight_shape[0]
        sizes = [] if outputs is None else self.sizes((outputs, *weight_shape[1:]))
        if sizes and sizes[self.index] != weight_shape[0]:
            raise ModelMismatchError(
                f"the {self.kind} change of {', '.join(self.layers)} has {sizes[self.index]} rows for a weight {tuple(weight_shape)}.",
                hint="Use the LoRA with the model it was made for.",
            )
        return rows_of(whole, sizes, self.index)

    def shaped(self, weight_shape: Sequence[int]) -> WeightChange:
        """The change of this part by itself, if it is one."""
        change = self.cut(weight_shape)
        if change is None:
            return self
        return change.shaped(weight_shape) if isinstance(change, BaseChange) else change

    def _formed(self, base: Tensor, compute: torch.dtype) -> Tensor:
        change = self.cut(base.shape)
        if change is not None:
            return change.delta(base, compute)
        if self.weights is None:
            raise LoraFormatError(
                f"its {self.kind} change depends on all of {', '.join(self.layers)} together.",
                hint="Give the model that it is for: sigmascope lora convert --model.",
            )
        parts = [
            base if at == self.index else self.weights(layer).detach().to(base.device, compute)
            for at, layer in enumerate(self.layers)
        ]
        delta = self.whole.delta(torch.cat(parts), compute)
        return torch.split(delta, [len(part) for part in parts])[self.index].clone()


@dataclass(frozen=True, eq=False)
class JoinedParts(_OfWeights):
    """The change of a fused matrix by those of its parts.

    Attributes:
        changes: By the part's number; a missing part stays as it is.
        sizes: Of all parts.
    """

    changes: Mapping[int, LoraFactors | WeightChange]
    sizes: Sizes

    @property
    def kind(self) -> str:
        """That of a part that needs the weight."""
        return next(change.kind for change in self.changes.values() if not isinstance(change, LoraFactors))

    @property
    def parameters(self) -> int:
        """Of all parts."""
        return sum(change.parameters for change in self.changes.values())

    def shaped(self, weight_shape: Sequence[int]) -> "JoinedParts":
        """The same: the weight's shape tells nothing new."""
        return self

    def _formed(self, base: Tensor, compute: torch.dtype) -> Tensor:
        sizes = self.sizes(base.shape)
        formed = torch.zeros_like(base)
        for index, rows in enumerate(torch.split(base, sizes)):
            part = self.changes.get(index)
            if part is not None:
                delta = part.delta(compute) if isinstance(part, LoraFactors) else part.delta(rows, compute)
                if delta.numel() != prod(rows.shape):
                    raise ModelMismatchError(
                        f"a part {tuple(delta.shape)} does not fit a weight {tuple(rows.shape)}.",
                        hint="Use the LoRA with the model it was made for.",
                    )
                formed[sum(sizes[:index]) : sum(sizes[: index + 1])] = delta.reshape(rows.shape)
        return formed


@dataclass(frozen=True, eq=False)
class SwappedHalves(_OfWeights):
    """The change of a matrix whose halves of rows are in the opposite order in the LoRA.

    Attributes:
        whole: In the LoRA's order.
        swaps: Whether a matrix of so many outputs and inputs has its halves exchanged.
    """

    whole: WeightChange
    swaps: Callable[[int, int], bool]

    @property
    def kind(self) -> str:
        """That of the change."""
        return self.whole.kind

    @property
    def parameters(self) -> int:
        """That of the change."""
        return self.whole.parameters

    def shaped(self, weight_shape: Sequence[int]) -> "SwappedHalves | WeightChange":
        """The change itself, where nothing is exchanged in a weight of that shape."""
        return self if self.swaps(weight_shape[0], prod(weight_shape[1:])) else self.whole

    def _formed(self, base: Tensor, compute: torch.dtype) -> Tensor:
        half = len(base) // 2 if self.swaps(len(base), prod(base.shape[1:])) else 0
        return self.whole.delta(base.roll(half, 0), compute).roll(half, 0)
