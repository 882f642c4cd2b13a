"""DoRA: direction and magnitude of a weight apart (Liu et al., arXiv 2402.09353).

W' = m · (W + δ) / ‖W + δ‖, with one magnitude and norm for each output, or in LyCORIS also for each input.
The norm is that of the changed weight, as the paper, PEFT and LyCORIS have it in training. ComfyUI divides by
the norm of the unchanged weight where magnitudes are per output, so it shows such files a little differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters.change import Adapter
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.precision import at_least_float32


@dataclass(frozen=True, eq=False)
class DoraChange:
    """A change δ of the direction, and new magnitudes.

    Attributes:
        direction: δ.
        magnitude: m, one value for each output or each input, in any shape.
        per_output: Which of the two.
        weight_shape: Of the changed tensor; that of δ when left out.

    Raises:
        LoraFormatError: There are not as many magnitudes as outputs or inputs.
    """

    direction: LoraFactors | Adapter
    magnitude: Tensor
    per_output: bool = True
    weight_shape: tuple[int, ...] = ()

    kind: ClassVar[str] = "dora"
    needs_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = tuple(self.weight_shape) or self.direction.weight_shape
        object.__setattr__(self, "weight_shape", shape)
        require_magnitudes(self.magnitude.numel(), shape, per_output=self.per_output)

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return self.direction.parameters + self.magnitude.numel()

    @property
    def rank(self) -> int | None:
        """That of the direction."""
        return self.direction.rank

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW = W' − W; see `WeightChange.delta`.

        Raises:
            LoraFormatError: No base is given.
            ModelMismatchError: The base is of another shape.
        """
        if base is None:
            raise LoraFormatError(
                "a change of kind dora depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        compute = at_least_float32(dtype)
        weight = base.detach().to(self.magnitude.device, compute)
        changed = weight + self.shaped(base.shape)._direction(compute)
        axis = 0 if self.per_output else 1
        kept = [size if number == axis else 1 for number, size in enumerate(changed.shape)]
        others = [number for number in range(changed.ndim) if number != axis]
        norm: Tensor = torch.linalg.vector_norm(changed, dim=others, keepdim=True)
        # A weight of zeros has no direction: it stays zero where 0 / 0 would be NaN.
        norm = norm.clamp_min(torch.finfo(compute).tiny)
        return (changed * (self.magnitude.detach().to(compute).reshape(kept) / norm) - weight).to(dtype)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64; raises what `delta` does."""
        return frobenius_norm(self.delta(base))

    def shaped(self, weight_shape: Sequence[int]) -> "DoraChange":
        """The same change of a weight whose shape is known.

        Raises:
            ModelMismatchError: The change is none of such a weight.
        """
        shape = tuple(weight_shape)
        if isinstance(self.direction, Adapter):
            return replace(self, direction=self.direction.shaped(shape), weight_shape=shape)
        own = self.direction.weight_shape
        if shape[:1] != own[:1] or torch.Size(shape).numel() != torch.Size(own).numel():
            raise ModelMismatchError(
                f"a dora change of a weight {own} does not fit a weight {shape}.",
                hint="Use the LoRA with the model it was made for.",
            )
        return replace(self, weight_shape=shape)

    def _direction(self, compute: torch.dtype) -> Tensor:
        return self.direction.delta(dtype=compute).reshape(self.weight_shape)


def magnitudes_per_output(shape: Sequence[int], weight_shape: Sequence[int]) -> bool:
    """Whether LyCORIS' `dora_scale` of this shape is per output (out, 1, …), and not per input (1, in, …)."""
    return shape[0] == weight_shape[0] if len(shape) else False


def require_magnitudes(count: int, weight_shape: Sequence[int], *, per_output: bool) -> None:
    """Refuse magnitudes of another number than the weight has outputs or inputs.

    Raises:
        LoraFormatError: With both numbers.
    """
    axis = 0 if per_output else 1
    if count != weight_shape[axis]:
        raise LoraFormatError(
            f"DoRA: {count} magnitudes for a weight {tuple(weight_shape)}, expected {weight_shape[axis]}.",
            hint="The file is damaged, or of a kind that is not known.",
        )
