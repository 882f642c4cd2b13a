"""Merged application: W + scale · ΔW is written into the weights, and the originals can be put back.

Adding and subtracting again does not give W back in floating point, so the original values are kept, on the
CPU: as many bytes as the changed weights have.
"""

import logging
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.applying.changed_weight import (
    ChangedWeight,
    checksum_of,
    require_restorable,
    write_values,
)
from sigmascope.lora.file import LoraFile
from sigmascope.lora.matching import LoraTarget, match_modules
from sigmascope.lora.model_layers import holds_weight
from sigmascope.lora.precision import at_least_float32
from sigmascope.lora.scale import finite_scale

logger = logging.getLogger(__name__)


def merge_lora(
    model: nn.Module,
    lora: LoraFile,
    scale: float = 1.0,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> "MergedLora":
    """Add a LoRA to the model's weights, in place: parameters stay the same objects.

    Each sum is formed in `compute_dtype`, or in float64 for a float64 weight, on the weight's device and
    rounded once to the weight's dtype. A weight that several layers share changes once. If anything fails, the model is as it was.

    Args:
        model: Holds a Linear or Conv2d for every module of the LoRA.
        lora: The changes.
        scale: Strength. At 0 no weight is touched.
        compute_dtype: float32 or float64.

    Returns:
        A handle that is also a context manager; leaving it unmerges.

    Raises:
        ModelMismatchError: A module does not fit the model, or its weight is quantised, on the meta device, or
            an inference tensor.
        NonFiniteError: A merged weight would hold NaN or Inf.
        ConfigError: `scale` is NaN or infinite.
    """
    finite_scale(scale)
    targets = match_modules(model, lora)
    _require_mergeable(targets)
    if lora.unused_keys:
        logger.warning("%s: %d keys are not merged: %s", lora, len(lora.unused_keys), lora.unused_keys[:3])
    return MergedLora(targets, scale, compute_dtype)


class MergedLora:
    """A LoRA that is part of a model's weights. Made by `merge_lora`.

    Attributes:
        applied: The LoRA's modules that were merged, in the LoRA's order.
        scale: The strength with which they were.
    """

    def __init__(self, targets: Sequence[LoraTarget], scale: float, compute_dtype: torch.dtype) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self.scale = scale
        self._changed: list[ChangedWeight] = []
        if scale == 0.0:
            return  # W + 0·ΔW would still turn -0.0 into 0.0
        try:
            for target in targets:
                merged = _merged_weight(target, scale, compute_dtype)
                original = target.weight.detach().to("cpu", copy=True)
                self._changed.append(ChangedWeight(target, original, checksum_of(merged)))
                write_values(target.weight, merged)
        except BaseException:
            self._restore()
            raise

    @property
    def merged(self) -> bool:
        """Whether there are weights to restore."""
        return bool(self._changed)

    @property
    def kept_bytes(self) -> int:
        """CPU memory that the original values take until `unmerge`, in bytes."""
        return sum(changed.original.nbytes for changed in self._changed)

    def unmerge(self, *, force: bool = False) -> None:
        """Put the original weights back, bit for bit. A second call does nothing.

        Args:
            force: Restore also weights that something else has changed since the merge; that change is lost.

        Raises:
            ModelMismatchError: Some weight is not what the merge left, or (by force too) has another shape or
                no values any more. Nothing is restored then.
        """
        require_restorable(self._changed)
        touched = (
            [] if force else [changed.target.name for changed in self._changed if not changed.is_intact()]
        )
        if touched:
            raise ModelMismatchError(
                f"{len(touched)} of {len(self._changed)} merged weights were changed since, "
                f"the first is {touched[0]}; restoring would lose that.",
                hint="Undo later merges first, or call unmerge(force=True).",
            )
        self._restore()

    def _restore(self) -> None:
        while self._changed:
            self._changed[-1].restore()
            self._changed.pop()  # only now: an original that is not back in place must not be lost

    def __enter__(self) -> "MergedLora":
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.unmerge()


def _merged_weight(target: LoraTarget, scale: float, compute_dtype: torch.dtype) -> Tensor:
    weight = target.weight.detach()
    compute_dtype = at_least_float32(compute_dtype, weight.dtype)
    delta = target.factors.to(device=weight.device).delta(compute_dtype)
    merged = torch.add(weight.to(compute_dtype), delta, alpha=scale).to(weight.dtype)
    if not bool(torch.isfinite(merged.to(compute_dtype)).all()):
        raise NonFiniteError(
            f"{target.name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
            hint="Check the weights, or merge at a smaller scale.",
        )
    return merged


def _require_mergeable(targets: Sequence[LoraTarget]) -> None:
    for target in targets:
        if not all(holds_weight(layer) for layer in target.layers):
            raise ModelMismatchError(
                f"{target.name} computes its weight from other parameters (weight_norm or parametrize).",
                hint="Use attach_lora, which leaves the weights as they are.",
            )
        weight = target.weight
        if weight.is_meta:
            raise ModelMismatchError(
                f"{target.name} is on the meta device and holds no values.",
                hint="Load the model's weights before merging.",
            )
        if weight.is_inference():
            raise ModelMismatchError(
                f"{target.name} was made under torch.inference_mode, so it cannot be changed outside of it.",
                hint="Use attach_lora, which leaves the weights as they are, or load under torch.no_grad.",
            )
        if not weight.is_floating_point() or tuple(weight.shape) != target.factors.weight_shape:
            raise ModelMismatchError(
                f"{target.name} is stored as {weight.dtype} {tuple(weight.shape)}: a quantised weight.",
                hint="Use attach_lora, which leaves the weights as they are.",
            )
