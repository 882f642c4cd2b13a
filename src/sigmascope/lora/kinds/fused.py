"""Changes that need the weight, where the LoRA has one matrix for several layers of the model, or the other way round.

A rotation of inputs (PEFT's OFT, HRA) turns the rows of a fused matrix one by one, so each part has the same one. A rotation
of outputs (LyCORIS', kohya's) divides where none of its blocks has rows of two parts; its limit ‖Q‖ ≤ alpha · out is over all
blocks and goes into them. Where a block has rows of two parts, a part's change depends on the weights of its neighbours:
`PartOfFused.delta_of_all` forms it of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import AdapterFacts, Shapes, WeightChange, form_delta
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.kinds.base_change import BaseChange

Sizes = Callable[[Sequence[int]], list[int]]
"""How many rows each part of a fused weight of a shape has."""


@dataclass(frozen=True, eq=False)
class PartOfFused(BaseChange):
    """The change of one part of a fused matrix.

    Attributes:
        whole: Of the fused matrix.
        layers: The parts, in the order of its rows.
        index: Which of them this is.
        sizes: Of the parts.
    """

    whole: BaseChange | None = None
    layers: tuple[str, ...] = ()
    index: int = 0
    sizes: Sizes = list

    kind = "oft"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing: the whole has been checked."""
        return AdapterFacts((), None)

    def cut(self, weight_shape: Sequence[int]) -> BaseChange | None:
        """The change of this part's weight by itself; None if it depends on the other parts' weights.

        Raises:
            LoraFormatError: The fused matrix cannot have such parts.
        """
        assert self.whole is not None
        outputs = self.whole.outputs
        sizes = [] if outputs is None else self.sizes((outputs, *weight_shape[1:]))
        return self.whole.of_rows(sizes, self.index)

    def shaped(self, weight_shape: Sequence[int]) -> BaseChange:
        """The change of this part by itself, if it is one."""
        change = self.cut(weight_shape)
        return super().shaped(weight_shape) if change is None else change.shaped(weight_shape)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """Of this part's weight.

        Raises:
            LoraFormatError: It depends on the other parts' weights too.
        """
        assert base is not None
        change = self.cut(base.shape)
        if change is None:
            raise LoraFormatError(
                f"a block of its rotation has rows of several of {', '.join(self.layers)}.",
                hint="Form it of the model's weights first: sigmascope lora convert --model.",
            )
        return change.delta(base, compute)

    def delta_of_all(self, name: str, weights: Sequence[Tensor]) -> Tensor:
        """Form ΔW of this part from the weights of all of `layers`; raises what `form_delta` does."""
        assert self.whole is not None
        delta = form_delta(name, self.whole, torch.cat(list(weights)))
        return torch.split(delta, [len(weight) for weight in weights])[self.index].clone()


@dataclass(frozen=True, eq=False)
class JoinedParts(BaseChange):
    """The change of a fused matrix by those of its parts.

    Attributes:
        changes: By the part's number; a missing part stays as it is.
        sizes: Of all parts.
    """

    changes: Mapping[int, "LoraFactors | WeightChange"] = field(default_factory=dict)
    sizes: Sizes = list

    kind = "oft"

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing: the parts have been checked."""
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """Each part's change of its own rows, on top of each other."""
        assert base is not None
        sizes = self.sizes(base.shape)
        change = torch.zeros_like(base)
        for index, rows in enumerate(torch.split(base, sizes)):
            part = self.changes.get(index)
            if part is not None:
                delta = (
                    part.delta(dtype=compute) if isinstance(part, LoraFactors) else part.delta(rows, compute)
                )
                self.require(delta.numel() == prod(rows.shape), f"a part {tuple(delta.shape)}", rows)
                change[sum(sizes[:index]) : sum(sizes[: index + 1])] = delta.reshape(rows.shape)
        return change
