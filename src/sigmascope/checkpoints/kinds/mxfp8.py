"""MXFP8: 8-bit floats in blocks of 32 along the rows, each times a power of two (OCP Microscaling Formats, 1.0)."""

from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import TensorInfo
from sigmascope.checkpoints.kinds import comfy_kitchen
from sigmascope.checkpoints.kinds.kind import (
    BLOCK_SCALE_TYPES,
    BYTE,
    E4M3,
    E8M0,
    Config,
    Kind,
    Layer,
    Scale,
    Scales,
    in_tiles,
    named,
)
from sigmascope.checkpoints.rounding import Spread, to_fp8

_TITLE: Final = "MXFP8"
_LAYOUT: Final = "TensorCoreMXFP8Layout"
_BLOCK: Final = 32


def _told(info: TensorInfo, beside: Layer) -> Config | None:
    scale = beside.info(".weight_scale")
    return {} if scale is not None and info.dtype == E4M3 and scale.dtype in {E8M0, BYTE} else None


def _numbers(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return comfy_kitchen.dequantised(
        _LAYOUT, codes.view(E4M3), codes.shape[1], scale=scales["blocks"].view(E8M0)
    )


def _again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return comfy_kitchen.stored(_LAYOUT, numbers)


def _merged(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Spread:
    """With the smallest power of two that keeps each block within the range of its 8-bit floats."""
    blocks = numbers.reshape(numbers.shape[0], -1, _BLOCK)
    largest = blocks.abs().amax(2, keepdim=True).clamp_(min=2.0**-118)
    scale = torch.exp2(torch.ceil(torch.log2(largest / torch.finfo(E4M3).max)))
    return to_fp8(blocks / scale, E4M3).times(scale).reshape(numbers.shape)


KIND: Final = Kind(
    _TITLE,
    frozenset({E4M3, BYTE}),
    scales={"blocks": Scale((".weight_scale",), BLOCK_SCALE_TYPES, in_tiles(_BLOCK))},
    named=named("mxfp8"),
    told=_told,
    numbers=_numbers,
    again=_again,
    merged=_merged,
    unusable=lambda config, shape: comfy_kitchen.missing(_TITLE),
    filled_up=32,
)
