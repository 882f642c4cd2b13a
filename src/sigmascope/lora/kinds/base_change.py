"""A change ΔW(W) that is known only beside the weight W."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import Adapter, AdapterFacts, Shapes, WeightChange
from sigmascope.lora.factors import NUMBER_FOR_ALPHA, LoraFactors
from sigmascope.lora.linalg import at_least_float32, frobenius_norm

__all__ = ["BaseChange", "norm_without_base"]


def norm_without_base(change: LoraFactors | WeightChange) -> float | None:
    """‖ΔW‖ at strength 1; None if it depends on the model's weight."""
    if not getattr(change, "needs_base", False):
        return change.frobenius_norm()
    return 0.0 if isinstance(change, BaseChange) and change.is_identity else None


@dataclass(frozen=True, eq=False)
class BaseChange(Adapter):
    """A change that depends on the weight it changes.

    Attributes:
        weight_shape: Of the weight; () if it is not given and the tensors do not tell.
        alpha: As stored; each kind says what it means.
        settings: The fields of PEFT's configuration, where the file has one.
    """

    weight_shape: tuple[int, ...] = ()
    alpha: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    needs_base: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = ()
    """How the keys of its tensors end; the first is always there."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Those of `roles` that a file holds once, for all its modules."""
    lycoris_keys: ClassVar[bool] = False
    """Whether kohya's and ComfyUI's files hold the kind under these keys."""

    def __post_init__(self) -> None:
        if not isfinite(self.scale) or (self.alpha is not None and not isfinite(self.alpha)):
            raise NonFiniteError(
                f"its scale is {self.scale} and its alpha {self.alpha}.", hint=NUMBER_FOR_ALPHA
            )
        known = self._own_facts().weight_shape  # checks the parts
        object.__setattr__(self, "weight_shape", tuple(self.weight_shape) or known)

    @classmethod
    def fits(cls, shapes: Shapes) -> bool:
        """Whether tensors of these shapes are this kind's, where two kinds share the ends of their keys."""
        return cls.roles[0] in shapes

    @classmethod
    def facts(cls, shapes: Shapes) -> AdapterFacts:
        """No shape and no rank, unless the kind's tensors tell; see `Adapter.facts`."""
        return AdapterFacts((), None)

    @abstractmethod
    def product(self, compute: torch.dtype, base: Tensor | None) -> Tensor:
        """ΔW before its scale, of a weight in `compute`.

        Raises:
            ModelMismatchError: The weight is of another shape.
        """

    @property
    def is_identity(self) -> bool:
        """Whether it leaves every weight as it is, as its tensors alone show: untrained ones do."""
        return self.scale == 0.0

    def delta(self, base: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Form ΔW; see `WeightChange.delta`.

        Raises:
            LoraFormatError: No base is given.
            ModelMismatchError: The base is of another shape.
        """
        if base is None:
            raise LoraFormatError(
                f"a change of kind {self.kind} depends on the weight that it changes.",
                hint="Give the base model too.",
            )
        compute = at_least_float32(dtype)
        device = next(iter(self.parts.values())).device
        weight = base.detach().to(device, compute)
        return self.product(compute, weight).mul(self.scale).to(dtype).reshape(base.shape)

    def frobenius_norm(self, base: Tensor | None = None) -> float:
        """‖ΔW‖, with the sum in float64; raises what `delta` does."""
        return frobenius_norm(self.delta(base))

    def shaped(self, weight_shape: Sequence[int]) -> "BaseChange":
        """The same change of a weight whose shape is known."""
        return replace(self, weight_shape=tuple(weight_shape))

    @property
    def outputs(self) -> int | None:
        """How many rows the weight has, where the tensors tell that alone."""
        return None

    def of_rows(self, sizes: Sequence[int], index: int) -> "BaseChange | None":
        """The change of some of the weight's rows by themselves; None if it depends on the others, or is not known to.

        Args:
            sizes: Of the parts that the rows fall into; empty where `outputs` is None.
            index: Of the part wanted.
        """
        return None

    def require(self, fits: bool, what: str, weight: Tensor) -> None:
        """Refuse a weight of another shape.

        Raises:
            ModelMismatchError: It does not fit.
        """
        if not fits:
            raise ModelMismatchError(
                f"{what} does not fit a weight {tuple(weight.shape)}.",
                hint="Use the LoRA with the model it was made for.",
            )

    def setting(self, name: str, default: bool | int | float) -> bool | int | float:
        """A number or switch in PEFT's configuration.

        Raises:
            LoraFormatError: It is neither.
        """
        value = self.settings.get(name, default)
        if not isinstance(value, bool | int | float):
            raise LoraFormatError(
                f"PEFT's configuration: {name} is {str(value)[:80]!r}, not a number or a switch."
            )
        return value
