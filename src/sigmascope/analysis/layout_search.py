"""Looks at a few values of two tensors to tell how they lie beside each other."""

import math

import torch
from torch import Tensor

from sigmascope.analysis.pieces import pair_pieces

_SAMPLES = 4096
_OFFSET_SAMPLES = 256
_MOST_OFFSET_ELEMENTS = 1 << 22
_SEED = 20200


def sample_distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance at up to 4096 random places, the same in every call; infinite without a finite place."""
    if a.numel() == 0 or a.shape != b.shape:
        return math.inf
    index = _places(tuple(a.shape), _SAMPLES)
    left, right = _at(a, index), _at(b, index)
    finite = left.isfinite() & right.isfinite()
    if not finite.any():
        return math.inf
    left, right = left[finite], right[finite]
    norm = max(float(left.norm()), float(right.norm()))
    # A place that is finite in one alone counts as wholly wrong.
    missing = 1.0 - float(finite.to(torch.float64).mean())
    return (float((left - right).norm()) / norm if norm else 0.0) + missing


def best_offset(a: Tensor, b: Tensor, axis: int) -> int | None:
    """Where along an axis of the longer tensor the first and last slice of the shorter fit best.

    None where the longer one has too many slices to try.
    """
    short, long = (a, b) if a.shape[axis] < b.shape[axis] else (b, a)
    short, long = short.movedim(axis, 0), long.movedim(axis, 0)
    length, whole = short.shape[0], long.shape[0]
    index = _places(tuple(short.shape[1:]), _OFFSET_SAMPLES)
    if long.shape[0] * max(len(index[0]) if index else 1, 1) > _MOST_OFFSET_ELEMENTS:
        return None
    rows = torch.stack([_at(short[0], index), _at(short[length - 1], index)])
    every = _at_rows(long, index)
    room = whole - length + 1
    distance = (every[:room] - rows[0]).square().sum(1) + (every[length - 1 :] - rows[1]).square().sum(1)
    return int(distance.nan_to_num(nan=math.inf, posinf=math.inf).argmin())


def remainder_of(tensor: Tensor, axis: int, offset: int, length: int) -> str:
    """What a tensor holds outside a range of an axis: `zeros`, `repeated` (one slice over and over) or `values`."""
    end = offset + length
    parts = [
        part
        for part in (tensor.narrow(axis, 0, offset), tensor.narrow(axis, end, tensor.shape[axis] - end))
        if part.numel()
    ]
    if all(_is_zero(part) for part in parts):
        return "zeros"
    slices = sum(part.shape[axis] for part in parts)
    first = parts[0].narrow(axis, 0, 1)
    same = slices > 1 and all(_same(part, first.expand_as(part)) for part in parts)
    return "repeated" if same else "values"


def _is_zero(tensor: Tensor) -> bool:
    return _same(tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(tensor))


def _same(a: Tensor, b: Tensor) -> bool:
    return not any(bool(piece.unequal.any()) for piece in pair_pieces(a, b))


def _places(shape: tuple[int, ...], most: int) -> tuple[Tensor, ...]:
    """Random places, or all of them where there are few."""
    elements = math.prod(shape)
    if elements <= most:
        flat = torch.arange(elements, device="cpu")
    else:
        # A generator of our own: the host's random state stays as it is.
        own = torch.Generator("cpu").manual_seed(_SEED)
        flat = torch.randint(elements, (most,), generator=own, device="cpu")
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat = flat // size
    return tuple(reversed(index))


def _at(tensor: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    return _gathered(tensor, index) if index else tensor.detach().reshape(1).cpu().to(torch.float64)


def _at_rows(tensor: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    if not index:
        return tensor.detach().reshape(-1, 1).cpu().to(torch.float64)
    return _gathered(tensor, (slice(None), *index))


def _gathered(tensor: Tensor, index: tuple[Tensor | slice, ...]) -> Tensor:
    """The values at some places, float64 on the CPU."""
    tensor, dtype = tensor.detach(), tensor.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # not every device gathers 8-bit floats
        tensor = tensor.view(torch.uint8)
    places = tuple(each.to(tensor.device) if isinstance(each, Tensor) else each for each in index)
    return tensor[places].cpu().view(dtype).to(torch.float64)
