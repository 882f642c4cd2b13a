"""NVFP4: 4-bit floats (E2M1) in blocks of 16 along the rows, each times an 8-bit float, all times a scale."""

from functools import cache
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import TensorInfo
from sigmascope.checkpoints.kinds import comfy_kitchen
from sigmascope.checkpoints.kinds.kind import (
    BLOCK_SCALE_TYPES,
    BYTE,
    E4M3,
    REAL,
    Config,
    Kind,
    Layer,
    Scale,
    Scales,
    in_tiles,
    is_one,
    named,
)
from sigmascope.checkpoints.rounding import Spread, power_below, to_multiple

_TITLE: Final = "NVFP4"
_LAYOUT: Final = "TensorCoreNVFP4Layout"
_BLOCK: Final = 16
_LIMIT: Final = 6.0
_SEED: Final = 1

_NOISE: Final = 0.625
"""The width of the noise that ComfyUI adds, times the power of two below a number (at least 0.5)."""
_DRAWN: Final = 1 << 20  # numbers, that most pieces of weights share


@cache
def _uniform(count: int) -> Tensor:
    """Uniform between −0.5 and 0.5, by a seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(_SEED)).sub_(0.5)


def _numbers(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return comfy_kitchen.dequantised(
        _LAYOUT,
        codes,
        2 * codes.shape[1],
        scale=scales["tensor"].to(torch.float32).reshape(()),
        block_scale=scales["blocks"].view(E4M3),
    )


def _scale(peak: Tensor) -> Tensor:
    return peak / (torch.finfo(E4M3).max * _LIMIT)


def _again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    return comfy_kitchen.stored(_LAYOUT, numbers, scale=_scale(peak))


def _merged(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Spread:
    """One draw by a seed: noise is added and the sum rounded to the nearest, so that the mean is not the number."""
    whole = _scale(peak).clamp(min=1e-30)
    blocks = numbers.reshape(numbers.shape[0], -1, _BLOCK)
    scale = (blocks.abs().amax(2, keepdim=True) / _LIMIT / whole).clamp_(max=torch.finfo(E4M3).max)
    scale = scale.to(E4M3).to(torch.float32).mul_(whole)
    codes = (blocks / scale).nan_to_num_().reshape(-1)
    noise = _uniform(max(codes.numel(), _DRAWN))[: codes.numel()].to(codes.device)
    drawn = power_below(codes).clamp_(0.5, 4.0).mul_(_NOISE).mul_(noise).add_(codes).abs_()
    levels = to_multiple(drawn, power_below(drawn).clamp_(1.0, 4.0).mul_(0.5))
    levels.masked_fill_(levels > _LIMIT, 4.0)  # in ComfyUI 0.33 the bits from 7 on overflow into those of 4
    return Spread(levels.copysign_(codes).reshape(blocks.shape).mul_(scale).reshape(numbers.shape))


def _told(info: TensorInfo, beside: Layer) -> Config | None:
    return {} if beside.info(".weight_scale_2") else None


KIND: Final = Kind(
    _TITLE,
    frozenset({BYTE}),
    2,
    {
        "blocks": Scale((".weight_scale",), BLOCK_SCALE_TYPES, in_tiles(_BLOCK)),
        "tensor": Scale((".weight_scale_2",), REAL, is_one),
    },
    named=named("nvfp4"),
    told=_told,
    numbers=_numbers,
    again=_again,
    merged=_merged,
    unusable=lambda config, shape: comfy_kitchen.missing(_TITLE),
    filled_up=16,
)
