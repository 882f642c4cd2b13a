"""What the demo proves, on the very pictures that it made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH
from sigmascope.lora.apply import merge_lora
from sigmascope.lora.file import LoraFile
from sigmascope.lora.validate import ValidationReport

FULL_RANK_ERROR = 0.005
"""Of the worst layer: storage in 16 bits leaves less than this."""


@dataclass(frozen=True)
class Check:
    """One thing that was proved, with what was measured."""

    claim: str
    measured: str
    passed: bool


def check_promises(
    relight: Callable[[LbmModel], Image.Image],
    pictures: Mapping[str, Image.Image],
    lora: LoraFile,
    full_rank: ValidationReport,
) -> tuple[Check, ...]:
    """Prove what the documentation promises.

    Args:
        relight: Makes the demo's picture with a model.
        pictures: What was made, by name.
        lora: What was applied.
        full_rank: Of the LoRA of full rank.
    """
    base = load_lbm(BASE_PATH, CONFIG_PATH)
    unwatched = relight(base)
    with merge_lora(base, lora):
        merged = relight(base)
    restored = relight(base)
    worst = max((module.relative_error or 0.0 for module in full_rank.modules), default=1.0)
    exact = full_rank.success_rate == 100 and worst <= FULL_RANK_ERROR
    difference = _largest_difference(merged, pictures["base + LoRA at 1"])
    zero = _largest_difference(pictures["base"], pictures["base + LoRA at 0"])
    watched = _largest_difference(unwatched, pictures["base"])
    back = _largest_difference(restored, unwatched)
    return (
        Check("At full rank the LoRA is the fine-tuning", f"worst layer {100 * worst:.2f} % off", exact),
        Check("A LoRA at scale 0 changes nothing", _levels(zero), zero == 0),
        Check("Merged and hot-applied pictures agree", _levels(difference), difference <= 1),
        Check("Unmerging gives the base back", _levels(back), back == 0),
        Check("Watching does not change the picture", _levels(watched), watched == 0),
    )


def _largest_difference(first: Image.Image, second: Image.Image) -> int:
    a, b = (np.asarray(image.convert("RGB"), np.int16) for image in (first, second))
    return int(np.abs(a - b).max())


def _levels(difference: int) -> str:
    return "identical pixels" if difference == 0 else f"at most {difference} of 255 levels apart"
