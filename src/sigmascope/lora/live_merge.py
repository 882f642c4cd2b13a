"""Merge a LoRA into a live model or pipeline (`merge_into_model`), and restore it to the bit.

W + scale · ΔW is written into the weights. In floating point, subtracting ΔW again does not restore W, so the original
values are kept on the CPU. They take as many bytes as the changed weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from xxhash import xxh3_128, xxh3_128_digest

from sigmascope.errors import ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors, add_product, row_pieces
from sigmascope.lora.file import LoraFile
from sigmascope.lora.kinds.fused import PartOfFused
from sigmascope.lora.linalg import at_least_float32, where_float64_is
from sigmascope.lora.live_layers import (
    LoraTarget,
    Place,
    finite_scale,
    for_this_model,
    formed_for,
    is_stored,
    log_unapplied,
    match_modules,
    tensor_of,
)

__all__ = ["MergedLora", "merge_into_model"]

ChecksumMethod = Literal["xxh3", "sums"]
_TENSOR_ALIGNMENT_BYTES = 64  # as PyTorch aligns tensors
_CHECKSUM_WORDS_PER_ROW = 1024


def merge_into_model(
    model: Any,
    lora: LoraFile,
    scale: float = 1.0,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> "MergedLora":
    """Add a LoRA to the model's weights, in place: parameters stay the same objects.

    Each sum is formed in `compute_dtype` (float64 for a float64 weight), on the weight's device if that has this dtype,
    and rounded once to the weight's dtype. A weight that several layers share changes once. If anything fails, the
    model stays unchanged.

    Args:
        model: As for `attach_lora`.
        lora: The changes, of any kind: LoHa, LoKr, DoRA and whole differences too.
        scale: Strength. At 0 no weight is touched.
        compute_dtype: float32 or float64.

    Returns:
        A handle that is also a context manager; leaving it unmerges the LoRA.

    Raises:
        ModelMismatchError: A module does not fit the model, or its weight is quantised, on the meta device, or
            an inference tensor.
        NonFiniteError: A merged weight would hold NaN or Inf.
        ConfigError: `scale` is NaN or infinite.
    """
    finite_scale(scale)
    lora, left_out = for_this_model(model, lora)
    targets, not_in_variant = match_modules(model, lora, any_kind=True)
    _require_mergeable(targets)
    log_unapplied(model, lora, left_out, not_in_variant)
    return MergedLora(targets, scale, compute_dtype, left_out, not_in_variant)


def _require_mergeable(targets: Sequence[LoraTarget]) -> None:
    for target in targets:
        if not all(is_stored(layer, target.of) for layer in target.layers):
            raise ModelMismatchError(
                f"{target.name} computes its {target.of} from other parameters (weight_norm or parametrize).",
                hint="Use attach_lora, which leaves the weights as they are.",
            )
        weight = target.weight
        if weight.is_meta:
            raise ModelMismatchError(
                f"{target.name} is on the meta device and holds no values.",
                hint="Load the model's weights first.",
            )
        if weight.is_inference():
            raise ModelMismatchError(
                f"{target.name} was created under torch.inference_mode and cannot be changed outside it.",
                hint="Use attach_lora, which leaves the weights as they are, or load the model under torch.no_grad.",
            )
        if not weight.is_floating_point() or tuple(weight.shape) != Place(target.layers[0], target.of).shape:
            raise ModelMismatchError(
                f"{target.name} is quantised: its weight is stored as {weight.dtype} {tuple(weight.shape)}.",
                hint="Use attach_lora, which leaves the weights as they are.",
            )


class MergedLora:
    """A LoRA that is part of a model's weights. Made by `merge_into_model`.

    Attributes:
        applied: The LoRA's modules that were merged, in the LoRA's order.
        left_out: Modules for other models of the pipeline.
        not_in_variant: Modules for layers that the model's family has and this variant does not; a warning is logged.
        scale: The strength of the merge.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        scale: float,
        compute_dtype: torch.dtype,
        left_out: Sequence[str] = (),
        not_in_variant: Sequence[str] = (),
    ) -> None:
        self.applied: tuple[str, ...] = tuple(name for target in targets for name in target.names)
        self.left_out: tuple[str, ...] = tuple(left_out)
        self.not_in_variant: tuple[str, ...] = tuple(not_in_variant)
        self.scale = scale
        self._changed: list[ChangedWeight] = []
        if scale == 0.0:
            return  # W + 0·ΔW would still turn -0.0 into 0.0
        try:
            copies = _memory_for([target.weight for target in targets])
            originals: dict[int, Tensor] = {}
            for target, copy in zip(targets, copies, strict=True):
                beside = replace(target, change=_beside_originals(target.change, originals))
                self._changed.append(ChangedWeight.merge(beside, scale, compute_dtype, copy))
                originals[id(target.weight)] = copy
        except BaseException:
            self._restore()
            raise

    @property
    def merged(self) -> bool:
        """Whether there are weights to restore."""
        return bool(self._changed)

    def unmerge(self, *, force: bool = False) -> None:
        """Put the original weights back, bit for bit. A second call does nothing.

        Args:
            force: Also restore weights that something else has changed since the merge; those changes are lost.

        Raises:
            ModelMismatchError: A weight was changed since the merge, or (even with `force`) now has another shape or
                no values. Nothing is restored then.
        """
        require_restorable(self._changed)
        touched = (
            [] if force else [changed.target.name for changed in self._changed if not changed.is_intact()]
        )
        if touched:
            raise ModelMismatchError(
                f"{len(touched)} of {len(self._changed)} merged weights were changed since the merge, "
                f"first {touched[0]}; restoring would lose those changes.",
                hint="Undo later merges first, or call unmerge(force=True).",
            )
        self._restore()

    def _restore(self) -> None:
        while self._changed:
            self._changed[-1].restore()
            self._changed.pop()  # after restoring, so that a failure loses no original

    def __enter__(self) -> "MergedLora":
        return self

    def __exit__(self, *exception: object) -> None:
        self.unmerge()


def _beside_originals(
    change: LoraFactors | WeightChange, originals: Mapping[int, Tensor]
) -> LoraFactors | WeightChange:
    """A change that sees the other parts of a fused matrix as they were before the merge."""
    if not isinstance(change, PartOfFused) or change.weights is None:
        return change
    read = change.weights

    def before(layer: str) -> Tensor:
        weight = read(layer)
        return originals.get(id(weight), weight)

    return replace(change, weights=before)


def _memory_for(weights: Sequence[Tensor]) -> list[Tensor]:
    """An uninitialised tensor on the CPU for each weight, of its shape and dtype.

    NumPy allocates them as one block because it asks Linux for huge pages: page faults at every 4 KiB would take a
    third of a merge's processor time.
    """
    sizes = [-(-weight.nbytes // _TENSOR_ALIGNMENT_BYTES) * _TENSOR_ALIGNMENT_BYTES for weight in weights]
    parts = torch.from_numpy(np.empty(sum(sizes), np.uint8)).split_with_sizes(sizes)
    return [
        part[: weight.nbytes].view(weight.dtype).view(weight.shape)
        for weight, part in zip(weights, parts, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class ChangedWeight:
    """A merged weight, with what is needed to restore it safely.

    Attributes:
        target: The weight and its change.
        original: The values before the merge, on the CPU.
        checksum: Of the values after the merge; see `checksum_of`.
    """

    target: LoraTarget
    original: Tensor
    checksum: tuple[ChecksumMethod, bytes]

    @classmethod
    def merge(
        cls, target: LoraTarget, scale: float, compute_dtype: torch.dtype, copy: Tensor
    ) -> "ChangedWeight":
        """Change a weight to W + scale·ΔW, rounded once. After an error it is unchanged.

        Args:
            target: The weight.
            scale: Strength.
            compute_dtype: What the sum is formed in; float64 for a float64 weight.
            copy: Takes the original values: a tensor on the CPU of the weight's shape and dtype.

        Raises:
            NonFiniteError: The weight would hold NaN or Inf.
        """
        weight, change = target.weight.detach(), target.change
        compute = at_least_float32(compute_dtype, weight.dtype)
        place = where_float64_is(weight) if compute == torch.float64 else weight
        strength, down = scale, None
        if isinstance(change, LoraFactors):
            strength = scale * change.scale
            up, down = (factor.to(place.device, compute) for factor in (change.up, change.down))
        else:
            up = (
                formed_for(target.name, change, place, compute)
                .to(place.device)
                .reshape(len(place) if place.ndim else 1, -1)
            )
        on_cpu = weight.device.type == "cpu"
        values = place.contiguous().view(len(up), -1)
        original = copy.view(values.shape)
        checksum, kept = xxh3_128(), 0
        try:
            for piece, old, part in row_pieces(
                values, original, up
            ):  # every step while the piece is in the cache
                old.copy_(piece)
                kept += len(old)
                wide = piece if piece.dtype == compute else piece.to(compute)
                if down is None:
                    wide.add_(part, alpha=strength)
                else:
                    add_product(wide, part, down, strength)
                if wide is not piece:
                    wide.copy_(piece.copy_(wide))
                # A finite sum proves finite values, ten times faster; a sum that overflows proves nothing.
                if not isfinite(float(wide.sum())) and not bool(torch.isfinite(wide).all()):
                    raise NonFiniteError(
                        f"{target.name}: the merged weight would hold NaN or Inf in {weight.dtype}.",
                        hint="Check the weights, or merge at a smaller scale.",
                    )
                if on_cpu:
                    checksum.update(piece.view(torch.uint8).numpy().data)
            if values.data_ptr() != weight.data_ptr():
                write_values(weight, values.view(weight.shape))
        except BaseException:
            values[:kept].copy_(original[:kept])
            write_values(weight, values.view(weight.shape))
            raise
        return cls(target, copy, ("xxh3", checksum.digest()) if on_cpu else checksum_of(values))

    def is_intact(self) -> bool:
        """Whether the weight still holds the merged values."""
        return all(
            weight.dtype == self.original.dtype
            and weight.shape == self.original.shape
            and checksum_of(weight, self.checksum[0]) == self.checksum
            for weight in self._weights()
        )

    def can_be_restored(self) -> bool:
        """Whether the original values can be written back.

        PyTorch refuses to change a tensor created under torch.inference_mode outside that mode.
        """
        return all(
            weight.shape == self.original.shape
            and not weight.is_meta
            and (not weight.is_inference() or torch.is_inference_mode_enabled())
            for weight in self._weights()
        )

    def restore(self) -> None:
        """Put the original values back."""
        for weight in self._weights():
            write_values(weight, self.original)

    def _weights(self) -> list[Tensor]:
        """The layers' weights: one, unless the layers were untied after the merge."""
        tensors = [tensor_of(layer, self.target.of) for layer in self.target.layers]
        return list({id(tensor): tensor for tensor in tensors}.values())


def checksum_of(tensor: Tensor, method: ChecksumMethod | None = None) -> tuple[ChecksumMethod, bytes]:
    """A checksum of the tensor's bytes, computed at about memory speed.

    On the CPU it is XXH3. An accelerator lays the bytes out as a table of 64-bit words and sums its columns and rows
    modulo 2⁶⁴. Both guard against accidents, not against intent: a cryptographic hash would take longer than the merge.

    Args:
        tensor: On any device.
        method: The method of an earlier checksum to compare with; by default the one that suits the device.

    Returns:
        The method, and the checksum.
    """
    # A single element counts as contiguous whatever its stride, and a view as bytes wants a stride of 1.
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    method = method or ("xxh3" if tensor.device.type == "cpu" else "sums")
    if method == "xxh3":
        return method, xxh3_128_digest(flat.cpu().numpy().data)
    words = functional.pad(flat, (0, -flat.numel() % (8 * _CHECKSUM_WORDS_PER_ROW))).view(torch.int64)
    table = words.view(-1, _CHECKSUM_WORDS_PER_ROW)
    return method, torch.cat([table.sum(dim=0), table.sum(dim=1)]).cpu().numpy().tobytes()


def write_values(weight: Tensor, values: Tensor) -> None:
    """Overwrite a weight in place, without autograd noticing."""
    with torch.no_grad():
        weight.copy_(values)


def require_restorable(changes: Sequence[ChangedWeight]) -> None:
    """Refuse to restore any weight if one of them cannot be restored.

    Raises:
        ModelMismatchError: Names the first that cannot.
    """
    lost = [changed.target.name for changed in changes if not changed.can_be_restored()]
    if lost:
        raise ModelMismatchError(
            f"{len(lost)} of {len(changes)} merged weights cannot be restored: their shape has changed, they are on "
            f"the meta device, or they are inference tensors; first {lost[0]}.",
            hint="Give these layers ordinary weights of the original shape, then unmerge.",
        )
