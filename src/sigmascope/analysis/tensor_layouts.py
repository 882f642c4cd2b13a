"""Which layout would bring two tensors of different shapes together.

Of several candidates that fit the shapes, that one is taken under which a sample of the values agrees best.
"""

import math
from dataclasses import replace

from torch import Tensor

from sigmascope.analysis.layout_candidates import (
    Layout,
    axis_orders,
    fitting,
    only_axis,
    parts,
    reordered,
    squeezed,
)
from sigmascope.analysis.layout_search import remainder_of, sample_distance
from sigmascope.analysis.layout_words import order_words

_MOST_TURNED_AXES = 4
_AGREES = 0.05
"""Relative distance of a sample below which values of one shape are taken to be in another order."""
_CORNER_AGREES = 0.5
"""The same for a tensor that is set against a corner of the other, along several axes."""


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
        start = squeezed(start)
    candidates = [start] if start.a.shape == start.b.shape else [*fitting(start)]
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
    candidates = [*reordered(start)]
    if not candidates:
        return None
    scored = [(sample_distance(layout.a, layout.b), layout) for layout in candidates]
    distance, best = min(scored, key=lambda pair: pair[0])
    return best if distance <= _AGREES and distance < direct / 4 else None


def _joined(start: Layout, best: Layout) -> Layout:
    if not start.kind or best is start:
        return best
    return replace(best, kind=f"{start.kind}+{best.kind}", words=f"{start.words} and {best.words}")


def _turned_part(start: Layout) -> Layout | None:
    """A part of one under another order of B's axes, as of a tensor that is transposed and padded; None if none agrees."""
    if not 2 <= start.a.dim() == start.b.dim() <= _MOST_TURNED_AXES:
        return None
    found: list[tuple[float, Layout]] = []
    for order in axis_orders(start.b.dim()):
        turned = replace(start, b=start.b.permute(order))
        for part in parts(turned) if only_axis(turned) is not None else ():
            distance = sample_distance(part.a, part.b)
            if distance <= _AGREES:
                part = _with_remainder(part, turned)
                found.append(
                    (
                        distance,
                        replace(part, kind="permuted+part", words=f"B's {order_words(order)}, {part.words}"),
                    )
                )
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _differing_axes(start: Layout) -> int:
    if start.a.dim() != start.b.dim():
        return 0
    return sum(size != other for size, other in zip(start.a.shape, start.b.shape, strict=True))


def _with_remainder(layout: Layout, start: Layout) -> Layout:
    axis = only_axis(start)
    if axis is None or not layout.kind.endswith("part"):
        return layout
    larger, part = (start.a, layout.a) if start.a.shape[axis] > start.b.shape[axis] else (start.b, layout.b)
    offset = (part.storage_offset() - larger.storage_offset()) // max(larger.stride(axis), 1)
    kind = remainder_of(larger, axis, offset, part.shape[axis])
    what = {"zeros": "zeros", "repeated": "one slice over and over, as padding is", "values": "other values"}[
        kind
    ]
    return replace(layout, words=f"{layout.words}, the rest {what}", remainder=kind)
