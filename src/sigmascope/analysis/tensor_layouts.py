"""Which layout would bring two tensors of different shapes, or of one shape and other values, together.

Of several candidates that fit the shapes, that one is taken under which a sample of the values agrees best.
Every candidate is a pair of views of the same shape, so nothing is copied, but for the swapped halves of a
batch.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations, product

import torch
from torch import Tensor

from sigmascope.analysis.tensor_errors import pair_pieces

_MOST_TURNED_AXES = 4
_AGREEING_DISTANCE = 0.05
"""Relative distance of a sample below which values of one shape are taken to be in another order."""
_AGREEING_CORNER_DISTANCE = 0.5
"""The same for a tensor that is set against a corner of the other, along several axes."""
_MOST_PERMUTATIONS = 120
_MOST_PART_AXES = 3
_MOST_REPEATS = 16
_MOST_COPIED = 64 * 2**20  # bytes, of a batch whose halves are swapped
_SAMPLES = 4096
_OFFSET_SAMPLES = 256
_MOST_OFFSET_ELEMENTS = 1 << 22
_SEED = 20200
_AXIS_NAMES = {3: ("batch", "tokens", "width"), 2: ("tokens", "width")}
_CLIP_WINDOW = 77  # tokens
_REMAINDER_WORDS = {
    "zeros": "zeros",
    "repeated": "one slice over and over, as padding is",
    "values": "other values",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay two tensors beside each other.

    Attributes:
        kind: `axes_of_size_1`, `permuted` (transposed too), `repeated` (a batch duplicated), `part` (padding, another
            number of tokens, a part of the batch or of the width), `reshaped`, `parts_swapped`; joined by `+` where
            axes of size 1 are left out as well.
        words: The same in words.
        a: The first tensor so seen.
        b: The second.
        token_axis: Where the first one's token axis has gone; None if it is not one axis any more.
        remainder: Of a part along one axis, what the rest of the larger tensor holds: `zeros`, `repeated` (one slice
            over and over, as padding is) or `values`.
    """

    kind: str
    words: str
    a: Tensor
    b: Tensor
    token_axis: int | None
    remainder: str | None = None


def find_layout(a: Tensor, b: Tensor, token_axis: int | None) -> Layout | None:
    """The layout that best explains two different shapes; None if none fits."""
    if not (a.numel() and b.numel()):
        return None  # without values nothing tells one layout from another
    start = Layout("", "", a, b, token_axis)
    if a.dim() != b.dim():
        start = squeezed(start)
    distance, best = _nearest([start] if start.a.shape == start.b.shape else fitting(start))
    if distance > _AGREEING_DISTANCE:
        turned = _turned_part(start)
        if turned is not None:
            return _joined(start, turned)
    if best is None:
        return None
    if len(_differing_axes(start)) > 1 and best.kind == "part" and distance > _AGREEING_CORNER_DISTANCE:
        return None  # some corner of one is of the other's shape always: that explains nothing
    return _with_remainder(_joined(start, best), start)


def _turned_part(start: Layout) -> Layout | None:
    """A part of one under another order of B's axes, as if transposed and padded; None if none agrees."""
    if not 2 <= start.a.dim() == start.b.dim() <= _MOST_TURNED_AXES:
        return None
    candidates: list[Layout] = []
    for order in axis_orders(start.b.dim()):
        turned = replace(start, b=start.b.permute(order))
        distance, part = _nearest(parts(turned) if only_axis(turned) is not None else ())
        if part is not None and distance <= _AGREEING_DISTANCE:
            part = _with_remainder(part, turned)
            words = f"B's {order_words(order)}, {part.words}"
            candidates.append(replace(part, kind="permuted+part", words=words))
    return _nearest(candidates)[1]


def _with_remainder(layout: Layout, start: Layout) -> Layout:
    axis = only_axis(start)
    if axis is None or not layout.kind.endswith("part"):
        return layout
    larger, part = (start.a, layout.a) if start.a.shape[axis] > start.b.shape[axis] else (start.b, layout.b)
    offset = (part.storage_offset() - larger.storage_offset()) // max(larger.stride(axis), 1)
    kind = remainder_of(larger, axis, offset, part.shape[axis])
    return replace(layout, words=f"{layout.words}, the rest {_REMAINDER_WORDS[kind]}", remainder=kind)


def _joined(start: Layout, best: Layout) -> Layout:
    if not start.kind or best is start:
        return best
    return replace(best, kind=f"{start.kind}+{best.kind}", words=f"{start.words} and {best.words}")


def find_order(a: Tensor, b: Tensor, token_axis: int | None) -> Layout | None:
    """Another order of the axes, or of the batch, in which the values of two tensors of one shape agree.

    Returns:
        None if they agree no better in any.
    """
    start = Layout("", "", a, b, token_axis)
    distance, best = _nearest([*_permuted(start), *_halves_swapped(start)])
    return best if distance <= _AGREEING_DISTANCE and distance < sample_distance(a, b) / 4 else None


def _nearest(layouts: Iterable[Layout]) -> tuple[float, Layout | None]:
    """The layout under which samples of both lie nearest, and how far apart they lie."""
    scored = [(sample_distance(layout.a, layout.b), layout) for layout in layouts]
    return min(scored, key=lambda pair: pair[0], default=(math.inf, None))


def fitting(start: Layout) -> Iterator[Layout]:
    """All that bring two different shapes together."""
    yield from _permuted(start)
    yield from _repeated(start)
    yield from parts(start)
    yield from _reshaped(start)


def _permuted(start: Layout) -> Iterator[Layout]:
    a, b = start.a, start.b
    if sorted(a.shape) != sorted(b.shape):
        return
    orders = (
        order
        for order in axis_orders(b.dim())
        if all(b.shape[axis] == size for axis, size in zip(order, a.shape, strict=True))
    )
    for order in islice(orders, _MOST_PERMUTATIONS):
        yield Layout("permuted", f"B's {order_words(order)}", a, b.permute(order), start.token_axis)


def _repeated(start: Layout) -> Iterator[Layout]:
    """One axis of one is k times as long: the other is repeated along it, as a whole or item by item."""
    axis = only_axis(start)
    if axis is None:
        return
    small, large = sorted((start.a, start.b), key=lambda tensor: tensor.shape[axis])
    size = small.shape[axis]
    times, rest = divmod(large.shape[axis], size)
    if rest or not 2 <= times <= _MOST_REPEATS:
        return
    token_axis = (
        start.token_axis if start.token_axis is None or start.token_axis < axis else start.token_axis + 1
    )
    names = ("A", "B") if small is start.a else ("B", "A")
    for each in (False, True) if size > 1 else (False,):
        split = torch.unflatten(large, axis, (size, times) if each else (times, size))
        spread = small.unsqueeze(axis + 1 if each else axis).expand(split.shape)
        seen_a, seen_b = (spread, split) if small is start.a else (split, spread)
        tokens = axis if each and start.token_axis == axis else token_axis
        what = f"each item of {names[0]}" if each else names[0]
        along = axis_name(axis, small.dim())
        along = along if along.startswith("axis") else f"the {along}"
        words = f"{what} repeated {times} times along {along} to fit {names[1]}"
        yield Layout("repeated", words, seen_a, seen_b, tokens)


def _reshaped(start: Layout) -> Iterator[Layout]:
    """The same number of elements: the values in row-major order, where that needs no copy."""
    a, b = start.a, start.b
    if a.numel() != b.numel() or sorted(a.shape) == sorted(b.shape):
        return
    try:
        yield Layout("reshaped", f"B reshaped to {tuple(a.shape)}", a, b.view(a.shape), start.token_axis)
    except RuntimeError:
        return


def _halves_swapped(start: Layout) -> Iterator[Layout]:
    """The two halves of the first axis swapped, as negative before positive; B is copied, if it is not large."""
    b = start.b
    if b.dim() == 0 or b.shape[0] < 2 or b.shape[0] % 2 or b.numel() * b.element_size() > _MOST_COPIED:
        return
    halves = b.detach().chunk(2)
    swapped = torch.cat([halves[1], halves[0]])
    words = "the halves of B's batch swapped, as when one puts the negative prompt first"
    yield Layout("parts_swapped", words, start.a, swapped, start.token_axis)


def squeezed(start: Layout) -> Layout:
    """Both without their axes of size 1."""
    if 1 not in start.a.shape and 1 not in start.b.shape:
        return start
    kept = [axis for axis, size in enumerate(start.a.shape) if size != 1]
    token_axis = kept.index(start.token_axis) if start.token_axis in kept else None
    words = "axes of size 1 left out"
    return Layout("axes_of_size_1", words, start.a.squeeze(), start.b.squeeze(), token_axis)


def parts(start: Layout) -> Iterator[Layout]:
    """One is a part of the other along some axes, from their beginning or up to their end."""
    a, b, axes = start.a, start.b, _differing_axes(start)
    if a.dim() != b.dim() or len(axes) > _MOST_PART_AXES:
        return
    choices = []
    for axis in axes:
        room = abs(a.shape[axis] - b.shape[axis])
        found = best_offset(a, b, axis) if len(axes) == 1 else None
        choices.append(list(dict.fromkeys(offset for offset in (0, room, found) if offset is not None)))
    for offsets in product(*choices):
        part_a, part_b, words = a, b, []
        for axis, offset in zip(axes, offsets, strict=True):
            words.append(range_words(a.shape[axis], b.shape[axis], offset, axis, a.dim()))
            length = min(a.shape[axis], b.shape[axis])
            if a.shape[axis] > length:
                part_a = part_a.narrow(axis, offset, length)
            else:
                part_b = part_b.narrow(axis, offset, length)
        yield Layout("part", ", ".join(words), part_a, part_b, start.token_axis)


def axis_orders(dims: int) -> Iterator[tuple[int, ...]]:
    """Every other order of the axes."""
    return (order for order in permutations(range(dims)) if order != tuple(range(dims)))


def only_axis(start: Layout) -> int | None:
    """The one axis in which shapes differ."""
    axes = _differing_axes(start)
    return axes[0] if len(axes) == 1 else None


def _differing_axes(start: Layout) -> list[int]:
    """The axes in which shapes of as many axes differ."""
    if start.a.dim() != start.b.dim():
        return []
    return [axis for axis in range(start.a.dim()) if start.a.shape[axis] != start.b.shape[axis]]


def sample_distance(a: Tensor, b: Tensor) -> float:
    """Relative L2 distance at up to 4096 random places, the same in every call; infinite without a finite place."""
    if a.numel() == 0 or a.shape != b.shape:
        return math.inf
    index = _sample_places(tuple(a.shape), _SAMPLES)
    left, right = _values_at(a, index), _values_at(b, index)
    finite = left.isfinite() & right.isfinite()
    if not finite.any():
        return math.inf
    left, right = left[finite], right[finite]
    norm = max(float(left.norm()), float(right.norm()))
    # A place that is finite in one alone counts as wholly wrong.
    missing = 1.0 - float(finite.to(torch.float64).mean())
    return (float((left - right).norm()) / norm if norm else 0.0) + missing


def _sample_places(shape: tuple[int, ...], most: int) -> tuple[Tensor, ...]:
    """Random places, or all of them where there are few."""
    elements = math.prod(shape)
    if elements <= most:
        flat = torch.arange(elements, device="cpu")
    else:
        # A generator of our own: the host's random state stays as it is.
        own = torch.Generator("cpu").manual_seed(_SEED)
        flat = torch.randint(elements, (most,), generator=own, device="cpu")
    return torch.unravel_index(flat, shape) if shape else ()


def _values_at(tensor: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    return _gathered(tensor, index) if index else tensor.detach().reshape(1).cpu().to(torch.float64)


def _gathered(tensor: Tensor, index: tuple[Tensor | slice, ...]) -> Tensor:
    """The values at some places, float64 on the CPU."""
    tensor, dtype = tensor.detach(), tensor.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # not every device gathers 8-bit floats
        tensor = tensor.view(torch.uint8)
    places = tuple(each.to(tensor.device) if isinstance(each, Tensor) else each for each in index)
    return tensor[places].cpu().view(dtype).to(torch.float64)


def best_offset(a: Tensor, b: Tensor, axis: int) -> int | None:
    """Where along an axis of the longer tensor the first and last slice of the shorter fit best.

    None where the longer one has too many slices to try.
    """
    short, long = (a, b) if a.shape[axis] < b.shape[axis] else (b, a)
    short, long = short.movedim(axis, 0), long.movedim(axis, 0)
    length, whole = short.shape[0], long.shape[0]
    index = _sample_places(tuple(short.shape[1:]), _OFFSET_SAMPLES)
    if long.shape[0] * max(len(index[0]) if index else 1, 1) > _MOST_OFFSET_ELEMENTS:
        return None
    rows = torch.stack([_values_at(short[0], index), _values_at(short[length - 1], index)])
    every = _rows_at(long, index)
    room = whole - length + 1
    distance = (every[:room] - rows[0]).square().sum(1) + (every[length - 1 :] - rows[1]).square().sum(1)
    return int(distance.nan_to_num(nan=math.inf, posinf=math.inf).argmin())


def _rows_at(tensor: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    if not index:
        return tensor.detach().reshape(-1, 1).cpu().to(torch.float64)
    return _gathered(tensor, (slice(None), *index))


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
    same = slices > 1 and all(_are_equal(part, first.expand_as(part)) for part in parts)
    return "repeated" if same else "values"


def _is_zero(tensor: Tensor) -> bool:
    return _are_equal(tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand_as(tensor))


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return not any(bool(piece.unequal.any()) for piece in pair_pieces(a, b))


def axis_name(axis: int, dims: int) -> str:
    """What an axis of a conditioning of that many axes usually is, else its number."""
    names = _AXIS_NAMES.get(dims)
    return names[axis] if names else f"axis {axis}"


def range_words(size_a: int, size_b: int, offset: int, axis: int, dims: int) -> str:
    """Which part of the larger tensor's axis the smaller one's is set against."""
    small, large, length, whole = (
        ("A", "B", size_a, size_b) if size_a < size_b else ("B", "A", size_b, size_a)
    )
    name = axis_name(axis, dims)
    if offset == 0:
        where = f"the first {length} of the {whole}"
    elif offset == whole - length:
        where = f"the last {length} of the {whole}"
    else:
        where = f"{offset} to {offset + length - 1} of the {whole}"
    windows = ""
    if name == "tokens" and length % _CLIP_WINDOW == 0 and whole % _CLIP_WINDOW == 0:
        windows = f" ({length // _CLIP_WINDOW} against {whole // _CLIP_WINDOW} windows of {_CLIP_WINDOW})"
    return f"{small} set against {where} in {large}'s {name}{windows}"


def order_words(order: tuple[int, ...]) -> str:
    """How the axes are reordered."""
    moved = [place for place, axis in enumerate(order) if place != axis]
    return f"axes {moved[0]} and {moved[1]} swapped" if len(moved) == 2 else f"axes in the order {order}"
