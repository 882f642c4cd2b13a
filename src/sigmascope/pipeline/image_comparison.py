"""How far one image is from another: PSNR and relative L2 error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BYTE = 255.0


@dataclass(frozen=True, slots=True)
class ImageChange:
    """An image beside the one before. None: see `unavailable`.

    Attributes:
        identical: Whether they are bit for bit the same.
        psnr_db: 10 · log10(range² / mean squared error); None where they are identical, which would be infinite.
        relative_l2: ‖new − old‖ / ‖old‖.
        largest: Of all differences.
        value_range: What PSNR took for the range: 1 for images from 0 to 1, else the old one's own.
        non_finite: NaN and Inf in the new one that the old one has not.
        blank: Whether a picture of the new one is a single value throughout, where the old one shows something: what
            pipelines make of NaN once they turn it into bytes.
    """

    identical: bool | None = None
    psnr_db: float | None = None
    relative_l2: float | None = None
    largest: float | None = None
    value_range: float | None = None
    non_finite: int | None = None
    blank: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.identical:
            return "identical"
        if self.non_finite:
            return f"{self.non_finite} values are NaN or Inf"
        if self.psnr_db is None or self.relative_l2 is None:
            return f"not compared ({next(iter(self.unavailable.values()), 'nothing ran')})"
        return f"{self.psnr_db:.1f} dB, {100 * self.relative_l2:.2g} %"


def compare_images(new: Tensor | None, old: Tensor | None) -> ImageChange:
    """Compare two outputs.

    Args:
        new: From `image_of`.
        old: The same, of the set-up before.
    """
    if new is None or old is None:
        return _unavailable("the output holds no image that is known")
    if new.shape != old.shape:
        return _unavailable(f"shapes differ: {tuple(new.shape)} and {tuple(old.shape)}")
    non_finite = int((~new.isfinite() & old.isfinite()).sum())
    if torch.equal(new, old):
        return ImageChange(identical=True, relative_l2=0.0, largest=0.0, non_finite=0, blank=False)
    both = new.isfinite() & old.isfinite()
    difference, reference = (new - old)[both], old[both]
    squared = float(difference.square().mean()) if len(difference) else math.nan
    norm = float(reference.norm())
    value_range = _range(reference)
    gaps = {} if norm > 0 else {"relative_l2": "the image before is all zeros"}
    if not value_range or not squared > 0:
        gaps["psnr_db"] = "there is nothing to compare"
    return ImageChange(
        identical=False,
        psnr_db=None if "psnr_db" in gaps else 10 * math.log10(value_range**2 / squared),
        relative_l2=float(difference.norm()) / norm if norm > 0 else None,
        largest=float(difference.abs().max()) if len(difference) else None,
        value_range=value_range,
        non_finite=non_finite,
        blank=_became_blank(new, old),
        unavailable=gaps,
    )


def _unavailable(reason: str) -> ImageChange:
    return ImageChange(unavailable=dict.fromkeys(("identical", "psnr_db", "relative_l2", "largest"), reason))


def _range(reference: Tensor) -> float:
    if not len(reference):
        return 0.0
    low, high = float(reference.min()), float(reference.max())
    return 1.0 if low >= 0 and high <= 1 else high - low


def _became_blank(new: Tensor, old: Tensor) -> bool:
    """Whether any picture of a batch, or the one there is, lost all that the old one shows."""
    if not new.numel():
        return False
    pictures = (one.reshape(len(one), -1) if one.dim() > 3 else one.reshape(1, -1) for one in (new, old))
    is_flat, was_flat = (one.amin(1) == one.amax(1) for one in pictures)
    return bool((is_flat & ~was_flat).any())


def image_of(output: object) -> Tensor | None:
    """The images or frames in a pipeline's output, as float64 in RAM; None if there are none.

    Args:
        output: Of a diffusers pipeline: an object or a dict with `images` or `frames`, a tuple, PIL images, arrays or
            tensors. Bytes become values from 0 to 1.
    """
    for name in ("images", "frames"):
        held = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if held is not None:
            return _as_tensor(held)
    if isinstance(output, tuple) and output:
        return _as_tensor(output[0])
    return _as_tensor(output)


def _as_tensor(held: object) -> Tensor | None:
    if isinstance(held, Tensor):
        return held.detach().to("cpu", torch.float64) / (_BYTE if held.dtype == torch.uint8 else 1.0)
    if isinstance(held, np.ndarray):
        return _as_tensor(torch.from_numpy(np.ascontiguousarray(held)))
    if isinstance(held, Sequence) and not isinstance(held, str):
        parts = [_as_tensor(one) for one in held]
        found = [part for part in parts if part is not None]
        same = len({part.shape for part in found}) == 1 and len(found) == len(parts)
        return torch.stack(found) if same else None
    return _of_pil(held)


def _of_pil(held: Any) -> Tensor | None:
    if not hasattr(held, "getbands"):
        return None
    return torch.from_numpy(np.asarray(held).astype(np.float64) / _BYTE)
