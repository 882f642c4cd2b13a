"""bitsandbytes: NF4 and FP4 (Dettmers et al., QLoRA, arXiv 2305.14314) and int8 (LLM.int8(), arXiv 2208.07339)."""

import math
from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import TensorInfo
from sigmascope.checkpoints.kinds.kind import (
    BYTE,
    INT8,
    REAL,
    Config,
    Kind,
    Layer,
    Scale,
    Scales,
    Shape,
    is_vector,
    per_row,
)

_STATES: Final = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_FORMAT: Final = ".weight_format"


def _told(info: TensorInfo, beside: Layer) -> Config | None:
    state = next((ending for ending in _STATES if beside.info(ending)), None)
    if state is not None:
        return beside.text(state)
    return {} if beside.info(".weight.absmax") else None


def _numbers(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    """Two codes in a byte, the first in its upper half, each a place in the map of 16 values."""
    flat = codes.reshape(-1).view(BYTE)
    places = torch.stack((flat >> 4, flat & 15), 1).reshape(-1).long()[: math.prod(config["shape"])]
    numbers: Tensor = scales["map"].to(torch.float32)[places].reshape(-1, config["blocksize"])
    return numbers.mul_(_absmax(scales, config)[:, None]).reshape(config["shape"])


def _absmax(scales: Scales, config: Config) -> Tensor:
    """The largest magnitude of each block, quantised to 8 bits itself where there is a nested map."""
    if "nested_map" not in scales:
        return scales["absmax"].to(torch.float32)
    coarse = scales["nested_map"].to(torch.float32)[scales["absmax"].long()]
    size = config["nested_blocksize"]
    nested = scales["nested_absmax"].to(torch.float32).repeat_interleave(size)[: coarse.numel()]
    return (coarse * nested).add_(float(config["nested_offset"]))


def _again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    blocks = numbers.reshape(-1, config["blocksize"])
    largest = blocks.abs().amax(1, keepdim=True)
    codes = _nearest(scales["map"], blocks / largest.clamp(min=1e-30))
    return (codes * _absmax_again(largest, scales, config)).reshape(numbers.shape)


def _nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """The nearest of a map's values."""
    values = values.to(torch.float32).sort().values
    return values[torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)]


def _absmax_again(largest: Tensor, scales: Scales, config: Config) -> Tensor:
    """The largest magnitudes as they are read once stored: a change below half a step of their 8 bits is lost in each.

    bitsandbytes first takes off their mean, anew each time. Here it is that of the rows at hand, which hardly differs.
    """
    if "nested_map" not in scales:
        return largest
    mean, size = largest.mean(), config["nested_blocksize"]
    rest = (largest - mean).flatten()
    nested = torch.nn.functional.pad(rest, (0, -rest.numel() % size)).reshape(-1, size)
    peaks = nested.abs().amax(1, keepdim=True)
    coarse = _nearest(scales["nested_map"], nested / peaks.clamp(min=1e-30)) * peaks
    return coarse.flatten()[: rest.numel(), None] + mean


def _unusable(config: Config, shape: Shape) -> str | None:
    needed = {"blocksize", "shape"} - {fact for fact in config if isinstance(config[fact], int | tuple)}
    return "its quant_state, with shape and blocksize, is missing" if needed else None


FOUR_BITS: Final = Kind(
    "bitsandbytes {quant_type}",
    frozenset({BYTE}),
    2,
    {
        "absmax": Scale((".weight.absmax",), REAL | {BYTE}, is_vector),
        "map": Scale((".weight.quant_map",), REAL, lambda weight, scale: scale == (16,)),
        "nested_map": Scale((".weight.nested_quant_map",), REAL, lambda weight, scale: scale == (256,), True),
        "nested_absmax": Scale((".weight.nested_absmax",), REAL, is_vector, True),
    },
    told=_told,
    numbers=_numbers,
    again=_again,
    unusable=_unusable,
    by_row=False,
    served=_STATES,
)


def _told_int8(info: TensorInfo, beside: Layer) -> Config | None:
    if beside.info(".SCB") is None and (info.dtype != INT8 or beside.info(_FORMAT) is None):
        return None
    return {"weight_format": beside.number(_FORMAT) if beside.info(_FORMAT) else 0}


def _largest(scales: Scales) -> Tensor:
    return scales["largest"].to(torch.float32).reshape(-1, 1)


def _numbers_int8(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return codes.to(torch.float32).mul_(_largest(scales) / 127)


def _again_int8(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    step = numbers.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
    return (numbers / step).round_().mul_(step)


def _unusable_int8(config: Config, shape: Shape) -> str | None:
    layout = config["weight_format"]
    return None if layout == 0 else f"its codes are in the layout {layout} of an old GPU kernel, not in rows"


INT8_ROWS: Final = Kind(
    "bitsandbytes int8",
    frozenset({INT8}),
    scales={"largest": Scale((".SCB",), REAL, per_row)},
    told=_told_int8,
    numbers=_numbers_int8,
    again=_again_int8,
    unusable=_unusable_int8,
    served=(_FORMAT,),
)
