"""8-bit floats and integers times a scale per tensor, per channel or in blocks of 128×128.

ComfyUI writes `scale_weight` (with a mark `scaled_fp8`) or `weight_scale`, compressed-tensors `weight_scale`, and others
`weight_scale_inv`.
"""

from typing import Final

import torch
from torch import Tensor

from sigmascope.checkpoints.checkpoint import TensorInfo
from sigmascope.checkpoints.kinds.kind import (
    FP8,
    INT8,
    REAL,
    Config,
    Kind,
    Layer,
    Scale,
    Scales,
    Shape,
    named,
)
from sigmascope.checkpoints.rounding import (
    Spread,
    Sums,
    nearest_fp8,
    numbers_of,
    recoded_rows,
    to_fp8,
    to_integers,
)

BLOCK_SIZE: Final = 128
_ENDINGS: Final = (".weight_scale_inv", ".weight_scale", ".scale_weight")


def scale_kind(weight: Shape, scale: Shape) -> str | None:
    """How a scale of one shape acts on a weight of another: per tensor, channel or block; None if it cannot."""
    if set(scale) <= {1}:
        return "per tensor"
    if weight and scale[0] == weight[0] and set(scale[1:]) <= {1} and len(scale) <= len(weight):
        return "per channel"
    blocks = tuple(-(-size // BLOCK_SIZE) for size in weight)
    return f"in blocks of {BLOCK_SIZE}" if len(weight) == 2 and scale == blocks else None


def _told(info: TensorInfo, beside: Layer) -> Config | None:
    return {} if any(beside.info(ending) for ending in _ENDINGS) else None


def _spread(scale: Tensor, shape: Shape) -> Tensor:
    """The scale in a shape that multiplies the weight."""
    kind = scale_kind(shape, tuple(scale.shape))
    if kind == "per tensor":
        return scale.reshape(())
    if kind == "per channel":
        return scale.reshape(-1, *(1 for _ in shape[1:]))
    rows, columns = shape
    return scale.repeat_interleave(BLOCK_SIZE, 0)[:rows].repeat_interleave(BLOCK_SIZE, 1)[:, :columns]


def _numbers(codes: Tensor, scales: Scales, config: Config) -> Tensor:
    return numbers_of(codes).mul_(_spread(scales["scale"].to(torch.float32), tuple(codes.shape)))


def _step(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> tuple[Tensor, float]:
    """The scale anew, with the largest magnitude that it stands for at the end of the codes' range; and that end."""
    dtype: torch.dtype = config["dtype"]
    limit = 127.0 if dtype == INT8 else torch.finfo(dtype).max
    kind = scale_kind(config["shape"], tuple(scales["scale"].shape))
    if kind == "per tensor":
        largest = peak
    elif kind == "per channel":
        largest = numbers.abs().amax(1, keepdim=True)
    else:
        rows, columns = numbers.shape
        size = BLOCK_SIZE
        padded = torch.nn.functional.pad(numbers, (0, -columns % size, 0, -rows % size)).abs()
        largest = padded.reshape(padded.shape[0] // size, size, -1, size).amax((1, 3))
        largest = largest.repeat_interleave(size, 0)[:rows].repeat_interleave(size, 1)[:, :columns]
    return (largest / limit).clamp(min=1e-30), limit


def _again(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Tensor:
    step, limit = _step(peak, numbers, scales, config)
    dtype: torch.dtype = config["dtype"]
    codes = numbers / step
    rounded = codes.clamp_(-limit, limit).round_() if dtype == INT8 else nearest_fp8(codes, dtype)
    return rounded.mul_(step)


def _merged(peak: Tensor, numbers: Tensor, scales: Scales, config: Config) -> Spread:
    step, _ = _step(peak, numbers, scales, config)
    codes = numbers / step
    dtype: torch.dtype = config["dtype"]
    stored = to_integers(codes) if dtype == INT8 else to_fp8(codes, dtype)
    return stored.times(step)


def _store(sums: Sums, scales: Scales, config: Config, size: tuple[int, int]) -> tuple[Tensor, Scales]:
    """Scales stay where the numbers fit, so that an unchanged one gets its old code; others are made anew."""
    dtype: torch.dtype = config["dtype"]
    limit = 127.0 if dtype == INT8 else torch.finfo(dtype).max
    old, pieces = scales["scale"], recoded_rows(*size)
    kind = scale_kind(config["shape"], tuple(old.shape))
    needed = torch.cat([_largest(sums(some), kind) for some in pieces])
    if kind == "per tensor":
        needed = needed.amax()
    kept = old.to(torch.float32)
    needed = needed.reshape(old.shape).div_(limit)
    scale = torch.where(needed > kept, needed, kept).to(old.dtype)
    whole = _spread(scale.to(torch.float32), size)
    codes = torch.empty(size, dtype=dtype)
    for some in pieces:
        numbers = sums(some) / (whole[some] if whole.ndim else whole)
        numbers = numbers.clamp_(-limit, limit)
        codes[some] = (numbers.round_() if dtype == INT8 else numbers).to(dtype)
    return codes, {"scale": scale}


def _largest(numbers: Tensor, kind: str | None) -> Tensor:
    """The largest magnitude of each cell of rows that a scale is for; of each row, if there is one for all."""
    magnitudes = numbers.abs()
    if kind != f"in blocks of {BLOCK_SIZE}":
        return magnitudes.amax(1)
    rows, columns = numbers.shape
    padded = torch.nn.functional.pad(magnitudes, (0, -columns % BLOCK_SIZE, 0, -rows % BLOCK_SIZE))
    return padded.reshape(padded.shape[0] // BLOCK_SIZE, BLOCK_SIZE, -1, BLOCK_SIZE).amax((1, 3))


KIND: Final = Kind(
    "{dtype} scaled {scale}",
    FP8 | {INT8},
    scales={
        "scale": Scale(_ENDINGS, REAL, lambda weight, scale: scale_kind(weight, scale) is not None),
    },
    named=named("float8_e4m3fn", "float8_e5m2", "int8_tensorwise"),
    told=_told,
    numbers=_numbers,
    again=_again,
    merged=_merged,
    store=_store,
)
