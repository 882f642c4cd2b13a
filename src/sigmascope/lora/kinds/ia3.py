"""(IA)³: a layer's outputs or inputs scaled one by one (Liu et al., arXiv 2205.05638).

LyCORIS  W' = W · (1 + `weight`), along inputs if `on_input` is 1, else along outputs; the bias stays
PEFT     W' = W · `ia3_l`, along inputs for feed-forward layers, else along outputs, and the bias with them
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import AdapterFacts, Shapes, shapes_error
from sigmascope.lora.kinds.base_change import BaseChange


class Ia3Change(BaseChange):
    """LyCORIS': `weight`, one value for each channel, and the number `on_input`."""

    kind = "ia3"
    roles = ("on_input", "weight")

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that it is one number beside a vector."""
        if "weight" not in shapes or prod(shapes["on_input"]) != 1:
            raise shapes_error(shapes, *shapes)
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """W · weight."""
        assert base is not None
        values = self.part("weight", compute).flatten()
        return base * _along(self, base, values, 1 if float(self.parts["on_input"]) else 0)

    @property
    def is_identity(self) -> bool:
        """Where all values are zero."""
        return super().is_identity or not bool(self.parts["weight"].any())

    @property
    def outputs(self) -> int | None:
        """How many values there are, where they scale outputs."""
        return None if float(self.parts["on_input"]) else self.parts["weight"].numel()

    def of_rows(self, sizes: Sequence[int], index: int) -> "Ia3Change":
        """The values of these rows; those of inputs are the same for each part."""
        return replace(self, parts={**self.parts, "weight": _cut(self.parts["weight"], sizes, index)})


class PeftIa3Change(BaseChange):
    """PEFT's `ia3_l`: (out, 1) or (1, in), and for convolutions (1, channels, 1, 1)."""

    kind = "ia3"
    roles: ClassVar[tuple[str, ...]] = ("ia3_l",)

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """Nothing but that all axes but one have one value."""
        if prod(shapes["ia3_l"]) != max((*shapes["ia3_l"], 0)):
            raise shapes_error(shapes, "ia3_l")
        return AdapterFacts((), None)

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """W · ia3_l − W."""
        assert base is not None
        values = self.part("ia3_l", compute)
        axis = 0 if values.shape[0] > 1 else 1
        if base.ndim > 2:  # (1, channels, 1, 1), whichever channels are meant
            axis = int(values.numel() == base.shape[1])
            if base.shape[0] == base.shape[1]:
                raise LoraFormatError(
                    f"ia3_l {tuple(values.shape)} could scale the inputs or the outputs of a weight {tuple(base.shape)}.",
                    hint="Merge it with PEFT, whose configuration tells, and extract the change from the result.",
                )
        return base * (_along(self, base, values.flatten(), axis) - 1.0)

    @property
    def is_identity(self) -> bool:
        """Where all values are 1."""
        return super().is_identity or bool((self.parts["ia3_l"] == 1).all())

    @property
    def outputs(self) -> int | None:
        """How many values there are, where they scale outputs."""
        shape = self.parts["ia3_l"].shape
        return shape[0] if shape[0] > 1 else None

    def of_rows(self, sizes: Sequence[int], index: int) -> "PeftIa3Change | None":
        """The values of these rows; those of inputs are the same for each part. None of a convolution, which may be either."""
        values = self.parts["ia3_l"]
        if values.ndim > 2:
            return None
        return replace(self, parts={"ia3_l": _cut(values, sizes, index)})


class Ia3BiasChange(PeftIa3Change):
    """What PEFT's `ia3_l` makes of the bias of a layer whose outputs it scales."""

    roles: ClassVar[tuple[str, ...]] = ()  # made beside a `PeftIa3Change`, and not found in files

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """B · ia3_l − b."""
        assert base is not None
        return base * (_along(self, base, self.part("ia3_l", compute).flatten(), 0) - 1.0)


def _cut(values: Tensor, sizes: Sequence[int], index: int) -> Tensor:
    return values.flatten()[sum(sizes[:index]) : sum(sizes[: index + 1])][:, None] if sizes else values


def _along(change: BaseChange, weight: Tensor, values: Tensor, axis: int) -> Tensor:
    side = "inputs" if axis else "outputs"
    change.require(
        axis < weight.ndim and len(values) == weight.shape[axis], f"(IA)³ of {len(values)} {side}", weight
    )
    return values.reshape([-1 if number == axis else 1 for number in range(weight.ndim)])
