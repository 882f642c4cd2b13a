"""Which layout would bring two tensors of different shapes together.

Every candidate is a pair of views of the same shape, so nothing is copied. Of several that fit the shapes, that one is
taken under which a sample of the values agrees best.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, permutations, product
from typing import Literal

import torch
from torch import Tensor

from sigmascope.analysis.layout_search import best_offset, remainder_of, sample_distance
from sigmascope.analysis.layout_words import axis_name, range_words, repeat_words

LayoutKind = Literal["axes_of_size_1", "permuted", "repeated", "part", "reshaped", "parts_swapped"]

_MOST_PERMUTATIONS = 120
_MOST_TURNED_AXES = 4
_MOST_PART_AXES = 3
_MOST_REPEATS = 16
_MOST_COPIED = 64 * 2**20
_AGREES = 0.05
"""Relative distance of a sample below which values of one shape are taken to be in another order."""
_CORNER_AGREES = 0.5
"""The same for a tensor that is set against a corner of the other, along several axes."""


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
    """The layout that best explains two different shapes; None if none fits.

    Args:
        a: The reference.
        b: A tensor of another shape.
        token_axis: The token axis of `a`.
    """
    if not (a.numel() and b.numel()):
        return None  # without values nothing tells one layout from another
    start = Layout("", "", a, b, token_axis)
    if a.dim() != b.dim():
        start = _squeezed(start)
    candidates = [start] if start.a.shape == start.b.shape else [*_candidates(start)]
    scored = [(sample_distance(layout.a, layout.b), layout) for layout in candidates]
    distance, best = min(scored, key=lambda pair: pair[0], default=(math.inf, start))
    if distance > _AGREES:
        turned = _turned_part(start)
        if turned is not None:
            return _joined(start, turned)
    if not candidates:
        return None
    if _differing_axes(start) > 1 and best.kind == "part" and distance > _CORNER_AGREES:
        return None  # some corner of one is of the other's shape always: that explains nothing
    return _with_remainder(_joined(start, best), start)


def find_order(a: Tensor, b: Tensor, token_axis: int | None) -> Layout | None:
    """Another order of the axes, or of the batch, in which the values of two tensors of one shape agree.

    Returns:
        None if they agree no better in any.
    """
    direct = sample_distance(a, b)
    start = Layout("", "", a, b, token_axis)
    candidates = [*_permuted(start), *_swapped(start)]
    if not candidates:
        return None
    scored = [(sample_distance(layout.a, layout.b), layout) for layout in candidates]
    distance, best = min(scored, key=lambda pair: pair[0])
    return best if distance <= _AGREES and distance < direct / 4 else None


def _candidates(start: Layout) -> Iterator[Layout]:
    yield from _permuted(start)
    yield from _repeated(start)
    yield from _parts(start)
    yield from _reshaped(start)


def _squeezed(start: Layout) -> Layout:
    """Both without their axes of size 1."""
    if 1 not in start.a.shape and 1 not in start.b.shape:
        return start
    kept = [axis for axis, size in enumerate(start.a.shape) if size != 1]
    token_axis = kept.index(start.token_axis) if start.token_axis in kept else None
    words = "axes of size 1 left out"
    return Layout("axes_of_size_1", words, start.a.squeeze(), start.b.squeeze(), token_axis)


def _joined(start: Layout, best: Layout) -> Layout:
    if not start.kind or best is start:
        return best
    return replace(best, kind=f"{start.kind}+{best.kind}", words=f"{start.words} and {best.words}")


def _turned_part(start: Layout) -> Layout | None:
    """A part of one under another order of B's axes, as of a tensor that is transposed and padded; None if none agrees."""
    if not 2 <= start.a.dim() == start.b.dim() <= _MOST_TURNED_AXES:
        return None
    found: list[tuple[float, Layout]] = []
    for order in _orders(start.b.dim()):
        turned = replace(start, b=start.b.permute(order))
        for part in _parts(turned) if _only_axis(turned) is not None else ():
            distance = sample_distance(part.a, part.b)
            if distance <= _AGREES:
                part = _with_remainder(part, turned)
                found.append(
                    (distance, replace(part, kind="permuted+part", words=f"B's {_how(order)}, {part.words}"))
                )
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _orders(dims: int) -> Iterator[tuple[int, ...]]:
    """Every other order of the axes."""
    return (order for order in permutations(range(dims)) if order != tuple(range(dims)))


def _how(order: tuple[int, ...]) -> str:
    moved = [place for place, axis in enumerate(order) if place != axis]
    return f"axes {moved[0]} and {moved[1]} swapped" if len(moved) == 2 else f"axes in the order {order}"


def _permuted(start: Layout) -> Iterator[Layout]:
    a, b = start.a, start.b
    if sorted(a.shape) != sorted(b.shape):
        return
    orders = (
        order
        for order in _orders(b.dim())
        if all(b.shape[axis] == size for axis, size in zip(order, a.shape, strict=True))
    )
    for order in islice(orders, _MOST_PERMUTATIONS):
        yield Layout("permuted", f"B's {_how(order)}", a, b.permute(order), start.token_axis)


def _repeated(start: Layout) -> Iterator[Layout]:
    """One axis of one is k times as long: the other is repeated along it, as a whole or item by item."""
    axis = _only_axis(start)
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
        words = repeat_words(*names, times, axis_name(axis, small.dim()), each=each)
        yield Layout("repeated", words, seen_a, seen_b, tokens)


def _parts(start: Layout) -> Iterator[Layout]:
    """One is a part of the other along some axes, from their beginning or up to their end."""
    a, b = start.a, start.b
    if a.dim() != b.dim():
        return
    axes = [axis for axis in range(a.dim()) if a.shape[axis] != b.shape[axis]]
    if len(axes) > _MOST_PART_AXES:
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


def _reshaped(start: Layout) -> Iterator[Layout]:
    """The same number of elements: the values in row-major order, where that needs no copy."""
    a, b = start.a, start.b
    if a.numel() != b.numel() or sorted(a.shape) == sorted(b.shape):
        return
    try:
        yield Layout("reshaped", f"B reshaped to {tuple(a.shape)}", a, b.view(a.shape), start.token_axis)
    except RuntimeError:
        return


def _swapped(start: Layout) -> Iterator[Layout]:
    """The two halves of the first axis swapped, as negative before positive; B is copied, if it is not large."""
    b = start.b
    if b.dim() == 0 or b.shape[0] < 2 or b.shape[0] % 2 or b.numel() * b.element_size() > _MOST_COPIED:
        return
    halves = b.detach().chunk(2)
    swapped = torch.cat([halves[1], halves[0]])
    words = "the halves of B's batch swapped, as when one puts the negative prompt first"
    yield Layout("parts_swapped", words, start.a, swapped, start.token_axis)


def _only_axis(start: Layout) -> int | None:
    """The one axis in which shapes differ."""
    if start.a.dim() != start.b.dim():
        return None
    axes = [axis for axis in range(start.a.dim()) if start.a.shape[axis] != start.b.shape[axis]]
    return axes[0] if len(axes) == 1 else None


def _differing_axes(start: Layout) -> int:
    if start.a.dim() != start.b.dim():
        return 0
    return sum(size != other for size, other in zip(start.a.shape, start.b.shape, strict=True))


def _with_remainder(layout: Layout, start: Layout) -> Layout:
    axis = _only_axis(start)
    if axis is None or not layout.kind.endswith("part"):
        return layout
    larger, part = (start.a, layout.a) if start.a.shape[axis] > start.b.shape[axis] else (start.b, layout.b)
    offset = (part.storage_offset() - larger.storage_offset()) // max(larger.stride(axis), 1)
    kind = remainder_of(larger, axis, offset, part.shape[axis])
    what = {"zeros": "zeros", "repeated": "one slice over and over, as padding is", "values": "other values"}[
        kind
    ]
    return replace(layout, words=f"{layout.words}, the rest {what}", remainder=kind)
