"""Layouts under which the shapes of two tensors fit, whatever their values.

Every one is a pair of views of the same shape, so nothing is copied, but for the swapped halves of a batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations, product

import torch
from torch import Tensor

from sigmascope.analysis.layout_search import best_offset
from sigmascope.analysis.layout_words import axis_name, order_words, range_words, repeat_words

_MOST_PERMUTATIONS = 120
_MOST_PART_AXES = 3
_MOST_REPEATS = 16
_MOST_COPIED = 64 * 2**20


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


def fitting(start: Layout) -> Iterator[Layout]:
    """All that bring two different shapes together."""
    yield from _permuted(start)
    yield from _repeated(start)
    yield from parts(start)
    yield from _reshaped(start)


def reordered(start: Layout) -> Iterator[Layout]:
    """Other orders of the axes, or of the batch, under which two equal shapes stay equal."""
    yield from _permuted(start)
    yield from _halves_swapped(start)


def squeezed(start: Layout) -> Layout:
    """Both without their axes of size 1."""
    if 1 not in start.a.shape and 1 not in start.b.shape:
        return start
    kept = [axis for axis, size in enumerate(start.a.shape) if size != 1]
    token_axis = kept.index(start.token_axis) if start.token_axis in kept else None
    words = "axes of size 1 left out"
    return Layout("axes_of_size_1", words, start.a.squeeze(), start.b.squeeze(), token_axis)


def axis_orders(dims: int) -> Iterator[tuple[int, ...]]:
    """Every other order of the axes."""
    return (order for order in permutations(range(dims)) if order != tuple(range(dims)))


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
        words = repeat_words(*names, times, axis_name(axis, small.dim()), each=each)
        yield Layout("repeated", words, seen_a, seen_b, tokens)


def parts(start: Layout) -> Iterator[Layout]:
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


def _halves_swapped(start: Layout) -> Iterator[Layout]:
    """The two halves of the first axis swapped, as negative before positive; B is copied, if it is not large."""
    b = start.b
    if b.dim() == 0 or b.shape[0] < 2 or b.shape[0] % 2 or b.numel() * b.element_size() > _MOST_COPIED:
        return
    halves = b.detach().chunk(2)
    swapped = torch.cat([halves[1], halves[0]])
    words = "the halves of B's batch swapped, as when one puts the negative prompt first"
    yield Layout("parts_swapped", words, start.a, swapped, start.token_axis)


def only_axis(start: Layout) -> int | None:
    """The one axis in which shapes differ."""
    if start.a.dim() != start.b.dim():
        return None
    axes = [axis for axis in range(start.a.dim()) if start.a.shape[axis] != start.b.shape[axis]]
    return axes[0] if len(axes) == 1 else None
