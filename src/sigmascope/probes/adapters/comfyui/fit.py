"""Whether the host can add a change to a weight, from shapes alone.

ComfyUI registers what does not fit and raises nothing: when it merges it logs `ERROR lora <key>` or
`WARNING SHAPE MISMATCH` and leaves the weight as it was.
"""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from sigmascope.probes.adapters.comfyui.values import Change

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


class _Unfit(Exception):
    """Carries why, in words."""


def misfit(change: Change, weight: Shape, offset: tuple[int, int, int] | None = None) -> str | None:
    """Why the host cannot apply a change to a weight of this shape; None if it can, or nobody knows.

    Args:
        change: As read.
        weight: The weight's shape.
        offset: (dimension, start, length) of the part that is changed.
    """
    check = _CHECKS.get(change.kind)
    if check is None:
        return None
    try:
        check(change, _enlarged(change, _part(weight, offset)))
    except _Unfit as why:
        return str(why)
    except (IndexError, KeyError) as error:
        return f"a factor is missing or has too few dimensions ({error})"
    return None


def _part(weight: Shape, offset: tuple[int, int, int] | None) -> Shape:
    if offset is None:
        return weight
    dimension, start, length = offset
    if not 0 <= dimension < len(weight) or start < 0 or start + length > weight[dimension]:
        raise _Unfit(f"the part {offset} lies outside the weight's {_text(weight)}")
    return (*weight[:dimension], length, *weight[dimension + 1 :])


def _enlarged(change: Change, weight: Shape) -> Shape:
    wanted = change.reshape
    if change.pads and "diff" in change.tensors:
        wanted = tuple(change.tensors["diff"].shape)
    if wanted is None or wanted == weight:
        return weight
    if len(wanted) != len(weight) or any(a < b for a, b in zip(wanted, weight, strict=True)):
        raise _Unfit(f"the weight's {_text(weight)} cannot be enlarged to {_text(wanted)}")
    return wanted


def _lora(change: Change, weight: Shape) -> None:
    out, inner = _matrix(change.tensors["up"])
    down, mid = change.tensors["down"], change.tensors.get("mid")
    rank, width = _matrix(down)
    if mid is not None:
        width = _middle_width(down, mid)
    _multiplied("up", inner, "down", rank)
    _same_count((out, width), weight)
    _magnitudes(change, weight)


def _middle_width(down: Tensor, mid: Tensor) -> int:
    _multiplied("down", down.shape[0], "mid", mid.shape[1])
    return int(down.shape[1] * mid.shape[2] * mid.shape[3])


def _loha(change: Change, weight: Shape) -> None:
    first, second = (_product(change.tensors, f"w{side}", f"t{side}") for side in (1, 2))
    if first != second:
        raise _Unfit(f"its two products are {_text(first)} and {_text(second)}")
    _same_count(first, weight)
    _magnitudes(change, weight)


def _lokr(change: Change, weight: Shape) -> None:
    first = _product(change.tensors, "w1", "")
    second = _product(change.tensors, "w2", "t2")
    if not change.takes_rows or first[0] * second[0] <= weight[0]:
        _same_count((math.prod(first), math.prod(second)), weight)
    _magnitudes(change, weight)


def _product(tensors: Tensors, name: str, core: str) -> Shape:
    """The shape of a factor, whole or made of two, or of two and a core."""
    if name in tensors:
        return tuple(tensors[name].shape)
    first, second = tensors[f"{name}_a"].shape, tensors[f"{name}_b"].shape
    if core in tensors:
        middle = tensors[core].shape
        _multiplied(core, middle[0], f"{name}_a", first[0])
        _multiplied(core, middle[1], f"{name}_b", second[0])
        return (first[1], second[1], *middle[2:])
    _multiplied(f"{name}_a", first[1], f"{name}_b", second[0])
    return (first[0], second[1])


def _glora(change: Change, weight: Shape) -> None:
    sides = {name: _matrix(change.tensors[name]) for name in ("a1", "a2", "b1", "b2")}
    rank, out, width = change.rank, weight[0], math.prod(weight[1:])
    newer = {"a1": (weight[1], rank), "a2": (rank, weight[1]), "b1": (out, rank), "b2": (rank, width)}
    older = {"a1": (rank, width), "a2": (width, rank), "b1": (rank, width), "b2": (out, rank)}
    if sides not in (newer, older):
        found = ", ".join(f"{name} {_text(shape)}" for name, shape in sides.items())
        raise _Unfit(f"its factors {found} are not those of a weight of {_text(weight)}")
    _magnitudes(change, weight)


def _rotation(change: Change, weight: Shape) -> None:
    *_, blocks, size, _same = change.tensors["blocks"].shape
    if blocks * size != weight[0]:
        raise _Unfit(
            f"it turns {blocks} blocks of {size}, the weight of {_text(weight)} has {weight[0]} rows"
        )
    _magnitudes(change, weight)


def _difference(change: Change, weight: Shape) -> None:
    found = tuple(change.tensors["diff"].shape)
    if found != weight:
        raise _Unfit(f"the difference is {_text(found)}, the weight {_text(weight)}")


def _replacement(change: Change, weight: Shape) -> None:
    found = tuple(next(iter(change.tensors.values())).shape) if change.tensors else ()
    if not change.tensors or not _broadcasts(found, weight):
        raise _Unfit(f"what is to be set is {_text(found)}, the weight {_text(weight)}")


def _magnitudes(change: Change, weight: Shape) -> None:
    """The magnitudes of a DoRA are divided by norms of rows, or of columns where there are not as many."""
    if "dora_scale" not in change.tensors:
        return
    found = tuple(change.tensors["dora_scale"].shape)
    rows = bool(found) and found[0] == weight[0]
    norms = (weight[0], *[1] * (len(weight) - 1)) if rows else (1, *weight[1:2], *[1] * (len(weight) - 2))
    ratio = _broadcast(found, norms)
    if len(weight) < 2 or ratio is None or not _broadcasts(ratio, weight):
        raise _Unfit(f"its magnitudes are {_text(found)}, the weight {_text(weight)}")


def _matrix(factor: Tensor) -> tuple[int, int]:
    return int(factor.shape[0]), math.prod(factor.shape[1:])


def _multiplied(left: str, columns: int, right: str, rows: int) -> None:
    if columns != rows:
        raise _Unfit(f"the rank is {columns} in {left} and {rows} in {right}")


def _same_count(product: Shape, weight: Shape) -> None:
    """The host reshapes what it multiplied: only the number of elements must agree."""
    if math.prod(product) != math.prod(weight):
        raise _Unfit(f"the change is {_text(product)}, the weight {_text(weight)}")


def _broadcast(first: Shape, second: Shape) -> Shape | None:
    longest = max(len(first), len(second))
    pairs = zip((1,) * (longest - len(first)) + first, (1,) * (longest - len(second)) + second, strict=True)
    sizes = [(max(pair), min(pair)) for pair in pairs]
    return tuple(large for large, _ in sizes) if all(b in (1, a) for a, b in sizes) else None


def _broadcasts(found: Shape, weight: Shape) -> bool:
    return _broadcast(found, weight) == weight


def _text(shape: Shape) -> str:
    return "×".join(str(size) for size in shape) or "a single number"


_CHECKS: Mapping[str, Callable[[Change, Shape], None]] = {
    "lora": _lora,
    "loha": _loha,
    "lokr": _lokr,
    "glora": _glora,
    "oft": _rotation,
    "boft": _rotation,
    "diff": _difference,
    "set": _replacement,
    "model_as_lora": _replacement,
}
