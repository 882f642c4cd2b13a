"""How numbers are rounded when they are stored like a weight: to the nearest, or as ComfyUI stores a sum with a LoRA.

ComfyUI rounds stochastically. A number between two neighbours of a grid becomes the upper one with the probability f of
how far it lies above the lower one, in steps. So the mean is the number itself, and the variance f·(1 − f)·step².
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_MANTISSA: Final = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}
"""Bits of the mantissa, and the exponent of the smallest normal number, of the types that ComfyUI rounds so."""
_NAN: Final = 0x7F
_EXPONENT_BITS: Final = 0x7F800000  # of a float32: with them alone it is the power of two below its magnitude


@dataclass(frozen=True, slots=True)
class Spread:
    """What is read of numbers once they are stored, where chance decides how each is rounded.

    Attributes:
        mean: On average.
        variance: Of each number; None if `mean` is one draw.
    """

    mean: Tensor
    variance: Tensor | None = None

    def times(self, scale: Tensor) -> "Spread":
        """The same of all numbers times a scale. It changes them in place."""
        variance = None if self.variance is None else self.variance.mul_(scale.square())
        return Spread(self.mean.mul_(scale), variance)

    def reshape(self, shape: torch.Size) -> "Spread":
        """The same in another shape."""
        return Spread(
            self.mean.reshape(shape), None if self.variance is None else self.variance.reshape(shape)
        )


@dataclass(frozen=True, slots=True)
class Rounding:
    """How numbers are rounded when they are stored like a tensor.

    Attributes:
        stored: How that is, in words.
        again: The largest magnitude of all numbers, and some rows of them as a float32 matrix (the first row a multiple
            of 128), to what is read once they are stored with rounding to the nearest.
        merged: The same to what is read once ComfyUI has stored them as the sum of a weight and a LoRA, which it rounds
            stochastically; None if it does not store sums in this format.
    """

    stored: str
    again: Callable[[Tensor, Tensor], Tensor]
    merged: Callable[[Tensor, Tensor], Spread] | None = None


Sums = Callable[[slice], Tensor]
"""Some rows (the first a multiple of 128) of the numbers to store, as a float32 matrix."""
_RECODED_ELEMENTS: Final = 1 << 20
_RECODED_ROWS: Final = 128


@dataclass(frozen=True, slots=True)
class Storage:
    """How new numbers of a quantised tensor are stored.

    Attributes:
        stored: In words.
        added_bytes: How many bytes more that takes than now.
        keys: The tensors of the file that hold them: the codes first, then their scales.
    """

    stored: str
    keys: tuple[str, ...]
    added_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recoded:
    """New numbers as a file stores them.

    Attributes:
        tensors: The tensors of the file, by its keys.
        numbers: What is read of some rows, as a float32 matrix.
        has_new_scale: Whether a scale had to be made anew, since the numbers grew beyond it.
    """

    tensors: Mapping[str, Tensor]
    numbers: Callable[[slice], Tensor]
    has_new_scale: bool = False


def recoded_rows(rows: int, columns: int) -> list[slice]:
    """Rows that are stored at once: of about a million numbers."""
    step = max(_RECODED_ELEMENTS // max(columns, 1) // _RECODED_ROWS, 1) * _RECODED_ROWS
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def plain_rounding(dtype: torch.dtype) -> Rounding:
    """How numbers are rounded when they are stored as they are in a floating-point type."""
    if dtype in _MANTISSA:
        return Rounding(
            str(dtype).removeprefix("torch."),
            lambda _, rows: nearest_fp8(rows, dtype),
            lambda _, rows: to_fp8(rows, dtype),
        )
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return Rounding(
        str(dtype).removeprefix("torch."),
        lambda _, rows: rows.clamp(-limit, limit).to(dtype).to(torch.float32),
    )


def numbers_of(codes: Tensor) -> Tensor:
    """A plain tensor in float32. 8-bit floats are read by their bits, which takes a tenth of the time of a cast.

    Those of E5M2 are the upper half of a float16; those of E4M3 become one that is 2⁻⁸ of their value if sign and the
    other bits move to where a float16 has them.
    """
    bits = codes.contiguous().view(torch.int8).to(torch.int16) if codes.dtype in _MANTISSA else None
    if bits is None:
        return codes.to(torch.float32)
    if codes.dtype == torch.float8_e5m2:
        return bits.bitwise_left_shift_(8).view(torch.float16).to(torch.float32)
    not_numbers = bits.bitwise_and(_NAN) == _NAN
    moved = bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))  # bit 14 is a copy of the sign
    numbers = moved.view(torch.float16).to(torch.float32).mul_(2.0**8)
    return numbers.masked_fill_(not_numbers, torch.nan) if bool(not_numbers.any()) else numbers


def nearest_fp8(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as they are read once they are stored as 8-bit floats, with rounding to the nearest."""
    if dtype not in _MANTISSA:
        limit = torch.finfo(dtype).max
        return numbers.clamp(-limit, limit).to(dtype).to(torch.float32)
    limit = torch.finfo(dtype).max
    rounded = numbers.clamp(-limit, limit)
    return to_multiple(rounded, _step(rounded, dtype))


def _step(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the neighbours of each number lie apart."""
    bits, least = _MANTISSA[dtype]
    return power_below(numbers).clamp_(min=2.0**least).mul_(2.0**-bits)


def power_below(numbers: Tensor) -> Tensor:
    """The power of two at or below the magnitude of each float32."""
    return numbers.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)


def to_multiple(numbers: Tensor, step: Tensor) -> Tensor:
    """The nearest multiple of the step, in place: a number so much larger leaves a float32 just those digits."""
    much = step.mul(1.5 * 2.0**23)
    return numbers.add_(much).sub_(much)


def to_fp8(numbers: Tensor, dtype: torch.dtype) -> Spread:
    """The mean and variance of numbers stored as 8-bit floats: ComfyUI rounds them to float16 first."""
    limit = torch.finfo(dtype).max
    mean = numbers.to(torch.float16).to(torch.float32).clamp_(-limit, limit)
    step = _step(mean, dtype)
    away = to_multiple(mean.clone(), step).sub_(mean).abs_()
    return Spread(mean, step.sub_(away).mul_(away))


def to_integers(numbers: Tensor, limit: int = 127) -> Spread:
    """The same for numbers stored as integers of at most this magnitude."""
    mean = numbers.clamp(-limit, limit)
    part = mean.frac().abs_()
    return Spread(mean, part.sub_(part.square()))
