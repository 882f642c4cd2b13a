"""The rule by which a text-to-image backbone becomes an LBM: what changes shape, what is dropped, what is refused.

LBM has no text: its cross attention attends to the hidden states, so that keys and values are as wide as those,
where the backbone's are as wide as its text encoders. Conditioning pictures and masks widen the first convolution.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sigmascope.errors import ModelMismatchError
from sigmascope.lbm.basing.backbone import Backbone

Change = Literal["cut", "zero-filled", "cut and zero-filled"]
Shape = tuple[int, ...]

ITERATIONS = "num_iterations"
"""The LBM's only tensor that no backbone has: how many steps it was trained."""

DROPPED = "denoiser.add_embedding."
"""The UNet's embedding of sizes and pooled text: an LBM has none."""

_FIRST_OF_LEVEL = re.compile(r"denoiser\.down_blocks\.(\d+)\.resnets\.0\.conv1\.weight")


@dataclass(frozen=True, slots=True)
class Adaptation:
    """A weight whose shape changed, from `had` in the backbone to `shape` in the LBM."""

    change: Change
    had: Shape
    shape: Shape


def adapt_weight(weight: Tensor, shape: Shape) -> Tensor:
    """Bring a weight to another shape: what is too long is cut at the end, what is too short filled with zeros.

    Raises:
        ModelMismatchError: The number of dimensions differs.
    """
    if weight.ndim != len(shape):
        raise ModelMismatchError(
            f"A weight of shape {list(weight.shape)} cannot become {list(shape)}.",
            hint="Use a backbone of the architecture that the config describes.",
        )
    common = tuple(slice(0, min(had, wanted)) for had, wanted in zip(weight.shape, shape, strict=True))
    adapted = torch.zeros(shape, dtype=weight.dtype)
    adapted[common] = weight[common]
    return adapted


def find_adaptations(backbone: Backbone, shapes: Mapping[str, Shape]) -> dict[str, Adaptation]:
    """Say for each weight of the LBM whose shape is not the backbone's how it changes.

    Args:
        backbone: Open.
        shapes: Of every tensor of the LBM, by key.

    Raises:
        ModelMismatchError: Names every weight that the backbone lacks, that has no place in the LBM, or whose
            shape cannot be adapted, with both shapes.
    """
    wanted = {key: shape for key, shape in shapes.items() if key != ITERATIONS}
    differing = {
        key: (backbone.weights[key].shape, shape)
        for key, shape in wanted.items()
        if key in backbone.weights and backbone.weights[key].shape != shape
    }
    _refuse(
        backbone,
        wanted,
        missing={key: shape for key, shape in wanted.items() if key not in backbone.weights},
        homeless=[key for key in backbone.weights if key not in wanted and not key.startswith(DROPPED)],
        misfits={key: pair for key, pair in differing.items() if not _may_change(key, *pair)},
    )
    return {key: Adaptation(_change(had, shape), had, shape) for key, (had, shape) in differing.items()}


def _refuse(
    backbone: Backbone,
    wanted: Mapping[str, Shape],
    missing: Mapping[str, Shape],
    homeless: list[str],
    misfits: Mapping[str, tuple[Shape, Shape]],
) -> None:
    """Raise if anything does not fit: a base made of the rest would be wrong unseen."""
    wrong = {
        "the LBM needs and the backbone lacks": [f"{key} {list(shape)}" for key, shape in missing.items()],
        "the LBM has no place for": [backbone.weights[key].key for key in homeless],
        "cannot be adapted, only the first convolution and the attentions' keys and values can be": [
            f"{key}: {list(had)} in the backbone, {list(shape)} in the LBM"
            for key, (had, shape) in misfits.items()
        ],
    }
    if any(wrong.values()):
        lists = [
            f"Weights that {what} ({len(names)}):\n  " + "\n  ".join(names)
            for what, names in wrong.items()
            if names
        ]
        raise ModelMismatchError(
            "\n".join([f"{backbone.path}: does not fit the LBM.", *_other_levels(backbone, wanted), *lists]),
            hint="Use a backbone of the architecture that the config describes (--config_path).",
        )


def _other_levels(backbone: Backbone, wanted: Mapping[str, Shape]) -> list[str]:
    """What a thousand misfits come from when the backbone is of another size: an SDXL refiner, say."""
    had = _widths({key: weight.shape for key, weight in backbone.weights.items()})
    asked = _widths(wanted)
    if had == asked:
        return []
    return [f"Its levels have {had} channels, the config's have {asked} (denoiser.block_out_channels)."]


def _widths(shapes: Mapping[str, Shape]) -> str:
    matches = ((_FIRST_OF_LEVEL.fullmatch(key), shape) for key, shape in shapes.items())
    widths = sorted((int(match[1]), shape[0]) for match, shape in matches if match)
    return ", ".join(str(width) for _, width in widths)


def _may_change(key: str, had: Shape, shape: Shape) -> bool:
    attention = key.startswith("denoiser.") and (".attn1." in key or ".attn2." in key)
    adaptable = key == "denoiser.conv_in.weight" or (
        attention and key.endswith((".to_k.weight", ".to_v.weight"))
    )
    return adaptable and len(had) == len(shape)


def _change(had: Shape, shape: Shape) -> Change:
    cut = any(before > after for before, after in zip(had, shape, strict=True))
    filled = any(before < after for before, after in zip(had, shape, strict=True))
    return "cut and zero-filled" if cut and filled else "cut" if cut else "zero-filled"
