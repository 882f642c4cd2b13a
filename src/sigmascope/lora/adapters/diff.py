"""Changes that are stored whole: a difference that is added, or a tensor that takes the weight's place."""

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters.change import Adapter, AdapterFacts, Shapes
from sigmascope.lora.norms import frobenius_norm


class _WholeChange(Adapter):
    """One tensor of the weight's own shape."""

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """The shape of the one tensor. There is no rank.

        Raises:
            LoraFormatError: There are several tensors.
        """
        if len(shapes) != 1:
            raise LoraFormatError(
                f"{' and '.join(shapes)} change one weight.", hint="Which of them is meant cannot be told."
            )
        return AdapterFacts(next(iter(shapes.values())), None)

    @property
    def values(self) -> Tensor:
        """The tensor as stored."""
        (values,) = self.parts.values()
        return values


class DiffChange(_WholeChange):
    """ΔW itself: `diff` of a weight, `diff_b` of a bias, `w_norm` and `b_norm` of a norm."""

    kind = "diff"

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The stored difference."""
        return self.values.detach().to(compute)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖ of the values as stored."""
        return abs(self.scale) * frobenius_norm(self.values)


class SetChange(_WholeChange):
    """`set_weight`: the weight becomes the stored tensor, so ΔW = tensor − base."""

    kind = "set"
    needs_base = True

    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The stored tensor less the base weight."""
        assert base is not None  # `delta` has refused it
        return self.values.detach().to(compute) - base.detach().to(self.values.device, compute)
