"""What arrived of LoRAs that were merged into coarsely stored weights, measured from both contents.

Coarse are 8-bit floats, and tensors that wrap codes and can dequantise themselves, as ComfyUI's int8, NVFP4 and MXFP8
weights. The content before is what the host keeps to restore the weight. A few weights are measured, a million elements
of each: that tells share and noise to a per cent and costs little.

Bfloat16 and float16 are coarse for a weak LoRA: half a step of bfloat16 is up to 0.4 % of a number. No host needs to keep
anything for these: the thousand elements that were taken of each weight at both moments tell it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.checkpoints import Rounding, plain_rounding
from sigmascope.errors import LoraFormatError
from sigmascope.lora.arrival import SAMPLED_ROWS, Arrival, other_ways
from sigmascope.lora.effect import delta_of
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.patches import factors_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.reading import Reading, attempt
from sigmascope.stages.signed_patches import elements_of
from sigmascope.stages.weight_verdict import WeightEvidence, is_sum, rounding

_MOST_WEIGHTS: Final = 8
_MOST_ELEMENTS: Final = 1 << 20  # of a weight that are measured
_MOST_DEQUANTISED: Final = 1 << 25  # of a weight that can only be dequantised whole
_NOT_KEPT: Final = "the host keeps no original of a coarsely stored weight"
_TOO_LARGE: Final = "the weight is too large to be dequantised while the model runs"
_TAKES_ALL: Final = 8.0  # times what rounding comes to: of a change so large it takes next to nothing
_NEARLY_ALL, _MORE_THAN_ALL = (
    0.9,
    1.2,
)  # shares below, of such a change, and above, of any, are not what rounding makes
_OTHER_STRENGTH: Final = "the weight changed by another strength than the host says"


def arrived(evidence: Mapping[str, WeightEvidence]) -> dict[str, Arrival]:
    """What arrived in weights that are stored coarsely and hold merged changes, by their keys: some of those in 8 bits and less."""
    merged = {key: weight for key, weight in evidence.items() if weight.inside.now}
    coarse = _evenly([key for key, weight in merged.items() if _is_coarse(weight.now)], _MOST_WEIGHTS)
    halves = [key for key, weight in merged.items() if _is_half(weight)]
    found: dict[str, Reading[Arrival]] = {
        **{key: attempt(partial(_arrival, merged[key])) for key in coarse},
        **{key: attempt(partial(_arrival_of_elements, merged[key])) for key in halves},
    }
    return {
        key: reading.value or _unknown(evidence[key].now, reading.reason) for key, reading in found.items()
    }


def _evenly(keys: Sequence[str], most: int) -> list[str]:
    step = max(len(keys) / most, 1.0)
    return [keys[int(index * step)] for index in range(min(len(keys), most))]


def _is_half(weight: WeightEvidence) -> bool:
    """Whether it is in 16 bits, and its elements show what became of what was merged."""
    is_stored_so = weight.now.dtype in (torch.bfloat16, torch.float16) and not _is_wrapped(weight.now)
    samples = weight.samples
    return (
        is_stored_so
        and bool(weight.inside.net)
        and samples is not None
        and samples[0].shape == samples[1].shape
    )


def _arrival_of_elements(weight: WeightEvidence) -> Arrival:
    """What some elements changed by, beside what they were to change by.

    Raises:
        LoraFormatError: The weight changed by another strength.
    """
    samples, wanted, shape = weight.samples, weight.inside.net, tuple(weight.now.shape)
    if samples is None or not wanted:
        return _unknown(weight.now, weight.inside.unread)
    before, after = (as_float64(sample).cpu() for sample in samples)
    change = sum((elements_of(patch, shape) for patch in wanted), torch.zeros_like(before))
    real, scale = after - before, weight.now.numel() / len(before)
    square, inner, moved = (
        scale * float(one @ other) for one, other in ((change, change), (change, real), (real, real))
    )
    if not square:
        return _unknown(weight.now, "nothing was to change")
    of_rounding = scale * float(before @ before) * rounding(weight.now.dtype) ** 2
    is_clear = square > _TAKES_ALL**2 * of_rounding
    if is_clear and not _NEARLY_ALL * square <= inner <= _MORE_THAN_ALL * square:
        raise LoraFormatError(_OTHER_STRENGTH)
    return Arrival(square, inner, moved, _stored(weight.now))


def _is_coarse(weight: Tensor) -> bool:
    return _is_wrapped(weight) or (weight.is_floating_point() and weight.dtype.itemsize == 1)


def _is_wrapped(weight: Tensor) -> bool:
    return hasattr(weight, "__tensor_flatten__") and callable(getattr(weight, "dequantize", None))


def _unknown(weight: Tensor, why: str | None) -> Arrival:
    return Arrival(0.0, 0.0, 0.0, _stored(weight), why or "unknown")


def _arrival(weight: WeightEvidence) -> Arrival:
    """What the content changed by, beside what it was to change by.

    Raises:
        LoraFormatError: It cannot be told; the message says why.
    """
    original, now, wanted = weight.original, weight.now, weight.inside.net
    if original is None:
        raise LoraFormatError(_NOT_KEPT)
    if not wanted:
        return _unknown(now, weight.inside.unread)
    if _is_wrapped(now) and now.numel() > _MOST_DEQUANTISED:
        raise LoraFormatError(_TOO_LARGE)
    with torch.no_grad():
        before = _numbers(original).to(now.device).flatten(1)
        rows = _middle(before)
        change = _wanted(wanted, original, rows).to(now.device, torch.float64)
        real = _numbers(now).flatten(1)[rows].to(torch.float64) - before[rows].to(torch.float64)
        sums = [float((one * other).sum()) for one, other in ((change, change), (change, real), (real, real))]
        if not sums[0]:
            return _unknown(now, "nothing was to change")
        part = before[rows].to(torch.float32)
        others = other_ways(
            part, lambda some: change[some].to(torch.float32), _rounding(now), sums[0], part.new_zeros(())
        )
    return Arrival(sums[0], sums[1], sums[2], _stored(now), others=others)


def _middle(weight: Tensor) -> slice:
    count = max(_MOST_ELEMENTS // max(weight.shape[1], 1) // SAMPLED_ROWS, 1) * SAMPLED_ROWS
    start = max(weight.shape[0] - count, 0) // 2 // SAMPLED_ROWS * SAMPLED_ROWS
    return slice(start, start + count)


def _wanted(patches: Sequence[AppliedPatch], original: Tensor, rows: slice) -> Tensor:
    """Some rows of the change, in float64."""
    if not all(map(is_sum, patches)):
        return delta_of(patches, _numbers(original)).flatten(1)[rows]
    parts = [factors_of(patch, tuple(original.shape)) for patch in patches]
    return torch.stack([part.weight * (part.up[rows] @ part.down) for part in parts]).sum(0)


def _numbers(weight: Tensor) -> Tensor:
    """What its codes stand for; of a wrapped weight in float32, so that only its own rounding is seen."""
    if not _is_wrapped(weight):
        return weight.detach()
    wide: Any = weight.detach().to(dtype=torch.float32)
    numbers: Tensor = wide.dequantize() if _is_wrapped(wide) else wide
    return numbers


def _stored(weight: Tensor) -> str:
    """How a weight is stored, in words: those of ComfyUI's layouts are in their class's name."""
    if not _is_wrapped(weight):
        return str(weight.dtype).removeprefix("torch.")
    name = str(getattr(weight, "_layout_cls", type(weight).__name__))
    is_rotated = getattr(getattr(weight, "_params", None), "convrot", False)
    plain = name.removeprefix("TensorCore").removeprefix("TensorWise").removesuffix("Layout")
    return f"{plain} ConvRot" if is_rotated else plain


def _rounding(weight: Tensor) -> Rounding:
    """How the type rounds; of a wrapped weight only the host's own way is known, which was measured."""
    if _is_wrapped(weight):
        return Rounding(_stored(weight), lambda _, numbers: numbers)
    return plain_rounding(weight.dtype)
