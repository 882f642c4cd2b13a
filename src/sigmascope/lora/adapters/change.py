"""What every kind of weight change offers, whatever it is stored as."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod, sqrt
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.norms import frobenius_norm
from sigmascope.lora.precision import at_least_float32

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a change's tensors by the end of their key."""


@runtime_checkable
class WeightChange(Protocol):
    """A change ΔW of one tensor of a model."""

    @property
    def kind(self) -> str:
        """`loha`, `lokr`, `tucker`, `dora`, `diff` or `set`."""
        ...

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the changed tensor, as far as the change knows it: see `Adapter.weight_shape`."""
        ...

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        ...

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW, in the base's shape where one is given.

        Args:
            base: The weight that is changed. `dora` and `set` cannot do without.
            dtype: Of the result. The calculation runs in float32 or wider.
        """
        ...

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64."""
        ...


class AdapterFacts(NamedTuple):
    """What the shapes of a change's tensors tell.

    Attributes:
        weight_shape: As in `Adapter`.
        rank: The inner dimension that alpha is divided by; None where there is none, and so no scale.
    """

    weight_shape: tuple[int, ...]
    rank: int | None


@dataclass(frozen=True, eq=False)
class Adapter(ABC):
    """A weight change made of stored tensors.

    Attributes:
        parts: The tensors as they are in the file, by the end of their key: `hada_w1_a`, `lokr_w1`, `diff`, …
        scale: What the tensors' product is multiplied with: alpha / rank.
        weight_shape: Of the changed tensor; read off the parts when left out. A convolution (out, in, kh, kw)
            whose kernel does not show in them is (out, in·kh·kw).

    Raises:
        LoraFormatError: The parts do not fit together.
        ModelMismatchError: They are no change of a tensor of `weight_shape`.
        NonFiniteError: The scale is NaN or infinite.
    """

    parts: Mapping[str, Tensor]
    scale: float = 1.0
    weight_shape: tuple[int, ...] = ()

    kind: ClassVar[str] = ""
    needs_base: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isfinite(self.scale):
            raise NonFiniteError(f"the scale alpha / rank is {self.scale}.")
        own = self._own_facts().weight_shape
        given = tuple(self.weight_shape) or own
        if given[:1] != own[:1] or prod(given) != prod(own):
            raise ModelMismatchError(
                f"a {self.kind} change of a weight {own} does not fit a weight {given}.",
                hint="Use the LoRA with the model it was made for.",
            )
        object.__setattr__(self, "weight_shape", given)

    @classmethod
    @abstractmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """What parts of these shapes would change, without reading them.

        Raises:
            LoraFormatError: They do not fit together, or one is missing.
        """

    @abstractmethod
    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """The change before its scale, in any shape of the right number of values."""

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(part.numel() for part in self.parts.values())

    @property
    def rank(self) -> int | None:
        """The inner dimension that alpha is divided by; None where there is none."""
        return self._own_facts().rank

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW; see `WeightChange.delta`.

        Raises:
            LoraFormatError: This kind depends on the base weight, and none is given.
            ModelMismatchError: The base is of another shape.
        """
        if base is None and self.needs_base:
            raise LoraFormatError(
                f"a change of kind {self.kind} depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        if base is not None and tuple(base.shape) != self.weight_shape:
            return self.shaped(base.shape).delta(base, dtype)
        change = self.product(at_least_float32(dtype), base).mul(self.scale)
        return change.to(dtype).reshape(self.weight_shape)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64; raises what `delta` does."""
        return frobenius_norm(self.delta(base))

    def shaped(self, weight_shape: Sequence[int]) -> "Adapter":
        """The same change of a weight whose shape is known.

        Raises:
            ModelMismatchError: The change is none of such a weight.
        """
        return replace(self, weight_shape=tuple(weight_shape))

    def part(self, name: str, compute: torch.dtype) -> Tensor:
        """One stored tensor in the dtype to calculate in."""
        return self.parts[name].detach().to(compute)

    def _own_facts(self) -> AdapterFacts:
        return self.facts({name: tuple(part.shape) for name, part in self.parts.items()})


def scale_of(alpha: float | None, rank: int, *, rank_stabilised: bool = False) -> float:
    """The scale alpha / rank; 1 without an alpha.

    Args:
        alpha: As stored.
        rank: At least 1.
        rank_stabilised: rsLoRA (Kalajdzievski, arXiv 2312.03732): alpha / √rank.
    """
    if alpha is None:
        return 1.0
    return alpha / sqrt(rank) if rank_stabilised else alpha / rank


def inner_size(shapes: Shapes, left: str, right: str) -> int:
    """The inner dimension of the product of two matrices.

    Raises:
        LoraFormatError: One is missing, or they cannot be multiplied.
    """
    require_parts(shapes, left, right)
    first, second = shapes[left], shapes[right]
    if len(first) != 2 or len(second) != 2 or first[1] != second[0] or min(*first, *second) < 1:
        raise misfit(shapes, left, right)
    return second[0]


def require_parts(shapes: Shapes, *names: str) -> None:
    """Refuse a change that lacks a part.

    Raises:
        LoraFormatError: With the part's name.
    """
    missing = [name for name in names if name not in shapes]
    if missing:
        raise LoraFormatError(
            f"there is {', '.join(shapes)} but no {', '.join(missing)}.",
            hint="The file is incomplete: make it again, or take the whole module out.",
        )


def misfit(shapes: Shapes, *names: str) -> LoraFormatError:
    """The error for parts that do not fit together."""
    named = ", ".join(f"{name} {shapes[name]}" for name in names)
    return LoraFormatError(
        f"{named} do not fit together.", hint="The file is damaged, or of a kind that is not known."
    )
