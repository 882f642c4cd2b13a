"""One entry of a ComfyUI patcher, read as the changes to a weight that it stands for.

`applied` takes the entry apart (`read_entry`), resolves merged models into sums (`parts_of`), reads each adapter,
whatever its version (`read_value`), and checks whether its shapes fit the weight (`patch_misfit`). The check is needed since
ComfyUI registers what does not fit and raises nothing: when it merges, it logs `ERROR lora <key>` or
`WARNING SHAPE MISMATCH` and leaves the weight as it was. `settled` adds what is known to fail though its shapes fit,
and looks at the weight to decide where it can.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from sigmascope.probes.applied_patch import (
    AdapterType,
    AppliedPatch,
    PatchType,
    Standing,
    patch_type_by_words,
)
from sigmascope.probes.reading import attribute, describe, has, number, sequence

_PATCH_TYPES: dict[str, PatchType] = {"lora": "lora_up", "diff": "diff"}
"""The coarse type by kind; words tell it of all others. A LoRA's entry holds up and down both, and is 'lora_up'."""

# Why a change may fail though its shapes fit (`doubt`).
_NO_ALPHA = (
    "ComfyUI compares alpha with 0 (for OFT until mid-2025, for BOFT still in 0.18); this file has none"
)
_GLORA_ORDER = "until autumn 2024 ComfyUI knew only the first order of a GLoRA's factors"
_FUSED_LOKR = "ComfyUI takes the rows of one projection from it, by offset or by name"
_KRON_STRIDES = "torch.kron refuses the strides of a factor that ComfyUI puts together from a core"

_ADDED = ("lora", "loha", "lokr", "diff")
"""Kinds that add the same to any weight, if they have no magnitudes: they can be told apart from it."""

_PART_NAMES: Mapping[str, tuple[str, ...]] = {
    "lora": ("up", "down", "alpha", "mid", "dora_scale", "reshape"),
    "loha": ("w1_a", "w1_b", "alpha", "w2_a", "w2_b", "t1", "t2", "dora_scale"),
    "lokr": ("w1", "w2", "alpha", "w1_a", "w1_b", "w2_a", "w2_b", "t2", "dora_scale"),
    "glora": ("a1", "a2", "b1", "b2", "alpha", "dora_scale"),
    "oft": ("blocks", "rescale", "alpha", "dora_scale"),
    "boft": ("blocks", "rescale", "alpha", "dora_scale"),
    "diff": ("diff", "options"),
    "set": ("set",),
    "model_as_lora": ("target",),
}
"""The order in which each kind keeps its parts. Earlier versions have fewer: no dora_scale, no reshape."""
_KIND_BY_LENGTH = {1: "diff", 4: "lora", 7: "loha", 8: "lokr"}
"""Before August 2023 a tuple said what it is by its length alone; length 1 is a difference to this day."""
_ROTATIONS = ("oft", "boft")  # their alpha bounds the rotation and scales nothing

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]


class PatcherEntry(NamedTuple):
    """One entry of a patcher.

    Attributes:
        key: The weight's name.
        kept: The entry as the host keeps it, or made in its form where the host keeps it otherwise.
        standing: How far it has come.
        source: What it came from.
        bypass: Whether it acts beside the layer, where ComfyUI looks at no magnitudes.
    """

    key: str
    kept: object
    standing: Standing
    source: str | None = None
    bypass: bool = False


def applied(held: PatcherEntry, index: int, weight: Tensor | None) -> Iterator[AppliedPatch]:
    """The changes that one entry stands for; an entry that cannot be read is one change of the type "unknown".

    Args:
        held: The entry.
        index: Its place among those of its weight.
        weight: The weight before any change; None if the model has none of that name.
    """
    try:
        parts = parts_of(read_entry(held.kept), weight)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        yield _unreadable(held, index, describe(error))
        return
    for part in parts:
        yield _applied_part(held, index, _without_magnitudes(part) if held.bypass else part, weight)


def _unreadable(held: PatcherEntry, index: int, reason: str) -> AppliedPatch:
    return AppliedPatch(
        held.key,
        "unknown",
        patch_type_by_words(held.kept),
        str(type(held.kept)),
        held.standing.state,
        held.standing.reason,
        held.source,
        index,
        strength=None,
        strength_model=None,
        scale=None,
        unavailable=dict.fromkeys(("patch", "strength", "strength_model", "scale"), reason),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """How one change is to be applied, and the change itself as the host keeps it.

    Attributes:
        strength: The factor of the change; None if it is not a number.
        value: The adapter, tuple or list that says what the change is.
        strength_model: The factor of the weight before the change is added; None if it is not a number.
        offset: (dimension, start, length) of the part of the weight that is changed.
        unavailable: What could not be read, with the reason.
    """

    strength: float | None
    value: Any
    strength_model: float | None = 1.0
    offset: tuple[int, int, int] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What is added to a weight or done to it, before any strength.

    Attributes:
        kind: Its adapter type, or "model_as_lora".
        tensors: By the names of `AppliedPatch.tensors`, and `target` for model_as_lora.
        rank: Of a low-rank change.
        alpha: As the file had it.
        scale: What the host makes of alpha and rank.
        reshape: The shape that the host enlarges the weight to before it adds this.
        pads: Whether a difference larger than the weight enlarges it.
        takes_rows: Whether the host takes the rows of one projection from a LoKr of fused ones.
        unavailable: What could not be read, with the reason.
    """

    kind: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    rank: int | None = None
    alpha: float | None = None
    scale: float | None = 1.0
    reshape: tuple[int, ...] | None = None
    pads: bool = False
    takes_rows: bool = False
    unavailable: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapter_type(self) -> AdapterType:
        """The actual type: a LoRA with magnitudes is a DoRA."""
        if self.kind == "lora" and "dora_scale" in self.tensors:
            return "dora"
        return next((name for name in get_args(AdapterType) if name == self.kind), "unknown")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One change of an entry, and the value that the host keeps for the entry."""

    entry: Entry
    change: Change
    kept_value: object


def _applied_part(held: PatcherEntry, index: int, part: Part, weight: Tensor | None) -> AppliedPatch:
    entry, change = part.entry, part.change
    shape = None if weight is None else tuple(weight.shape)
    unavailable = {**change.unavailable, **entry.unavailable}
    if shape is None:
        unavailable["weight_shape"] = "the model has no weight of that name"
    standing = _standing_of_part(part, shape, held.standing)
    return AppliedPatch(
        held.key,
        change.adapter_type,
        _PATCH_TYPES.get(change.kind) or patch_type_by_words(part.kept_value),
        str(type(part.kept_value)),
        standing.state,
        standing.reason,
        held.source,
        index,
        strength=entry.strength,
        strength_model=entry.strength_model,
        rank=change.rank,
        alpha=change.alpha,
        scale=change.scale,
        tensors=change.tensors,
        weight_shape=shape,
        offset=entry.offset,
        unavailable=unavailable,
        cause=standing.cause,
    )


def _standing_of_part(part: Part, shape: tuple[int, ...] | None, standing: Standing) -> Standing:
    entry, change = part.entry, part.change
    if shape is None:
        return Standing("failed", "the model has no weight of that name")
    why = patch_misfit(change, shape, entry.offset)
    if why is not None:
        return Standing("failed", why)
    if entry.strength == 0 and entry.strength_model == 1 and change.kind != "set":
        why = f"its strength is 0 ({standing.state}: {standing.reason})"
        return Standing("inactive", why, "strength_zero")
    return standing


def _without_magnitudes(part: Part) -> Part:
    """Beside a layer the host multiplies factors and looks at no magnitudes."""
    if "dora_scale" not in part.change.tensors:
        return part
    tensors = {name: tensor for name, tensor in part.change.tensors.items() if name != "dora_scale"}
    unavailable = {**part.change.unavailable, "dora_scale": "is present, but a bypass ignores it"}
    return replace(part, change=replace(part.change, tensors=tensors, unavailable=unavailable))


def read_entry(kept: object) -> Entry:
    """Take an entry apart.

    Until June 2024 it was (strength, value, strength_model), since then (strength, value, strength_model,
    offset, function), and in some forks the same five with names.

    Raises:
        TypeError: It is not a tuple, or is too short.
    """
    if not isinstance(kept, Sequence) or isinstance(kept, str) or len(kept) < 2:
        raise TypeError(f"an entry of a patcher is a tuple of strength and value, not {type(kept).__name__}")
    parts = [*kept, *[None] * (5 - len(kept))]
    strength_model = 1.0 if len(kept) < 3 else parts[2]
    unavailable: dict[str, str] = {}
    return Entry(
        _number("strength", parts[0], unavailable),
        parts[1],
        _number("strength_model", strength_model, unavailable),
        _offset(parts[3], unavailable),
        _noting_function(parts[4], unavailable),
    )


def _number(name: str, value: object, unavailable: dict[str, str]) -> float | None:
    read = number(value)
    if read is None:
        unavailable[name] = f"is {type(value).__name__}, not a number"
    return read


def _offset(value: Any, unavailable: dict[str, str]) -> tuple[int, int, int] | None:
    if value is None:
        return None
    try:
        dimension, start, length = (int(part) for part in value)
    except (TypeError, ValueError):
        unavailable["offset"] = f"is {type(value).__name__}, not (dimension, start, length)"
        return None
    return dimension, start, length


def _noting_function(function: object, unavailable: dict[str, str]) -> dict[str, str]:
    """The fifth part rearranges a change before it is added, as for two layers of SD3 and FLUX."""
    if function is not None:
        name = getattr(function, "__qualname__", type(function).__name__)
        unavailable["function"] = f"the host applies {name} to the change before adding it"
    return unavailable


def parts_of(entry: Entry, original: Tensor | None) -> list[Part]:
    """The changes that an entry stands for; their sum is what the host does."""
    if is_list_of_patches(entry.value):
        return _parts_of_merge(entry)
    change = read_value(entry.value)
    if change.kind == "model_as_lora":
        return _parts_of_model(entry, change, original)
    if change.kind == "diff" and not change.tensors and entry.strength == 0 and original is not None:
        # ComfyUI's nodes that multiply a weight add nothing to it, at strength 0
        change = replace(change, tensors={"diff": torch.zeros(()).expand(original.shape)})
    return [Part(entry, change, entry.value)]


def is_list_of_patches(value: object) -> bool:
    """Whether a value is what a model merge registers: a list of a weight and the patches upon it."""
    return isinstance(value, Sequence) and not isinstance(value, tuple | str)


def _parts_of_merge(entry: Entry) -> list[Part]:
    """s·(V + Σ sᵢ·Δᵢ) for a list of a weight V and changes upon it."""
    base, *upon = entry.value
    weight = _weight_of(base)
    if weight is None:
        return [_unknown_part(entry, f"the merge starts with {type(base).__name__}, not with a weight")]
    nested = [part for kept in upon for part in parts_of(read_entry(kept), weight)]
    why = next((reason for part in nested if (reason := _why_not_added(entry, part)) is not None), None)
    if why is not None:
        return [_unknown_part(entry, f"{why} of the merged model, which a sum cannot show")]
    first = Part(entry, Change("diff", {"diff": weight}, unavailable=_conversion(weight)), entry.value)
    return [first, *(_nested_part(entry, part) for part in nested)]


def _weight_of(base: Any) -> Tensor | None:
    """The weight in front of a merge's list: a tensor, or (tensor, convert) since November 2024."""
    if isinstance(base, Sequence) and not isinstance(base, str) and base:
        base = base[0]
    return base if isinstance(base, Tensor) else None


def _unknown_part(entry: Entry, reason: str) -> Part:
    return Part(entry, _unknown_change(reason), entry.value)


def _unknown_change(reason: str) -> Change:
    return Change("unknown", scale=None, unavailable=dict.fromkeys(("adapter_type", "scale"), reason))


def _why_not_added(outer: Entry, part: Part) -> str | None:
    change, entry = part.change, part.entry
    if change.kind not in _ADDED or "dora_scale" in change.tensors:
        return f"a change of type {change.adapter_type}"
    if entry.strength is None or entry.strength_model != 1:
        return "a change that scales the weight"
    if outer.strength is None:
        return "a strength that is not a number"
    return "a part of a weight" if entry.offset is not None and outer.offset is not None else None


def _conversion(weight: Tensor) -> dict[str, str]:
    if weight.dtype.itemsize > 1:
        return {}
    return {"diff": f"is stored as {weight.dtype}, which the host converts before it merges"}


def _nested_part(outer: Entry, part: Part) -> Part:
    strength = (outer.strength or 0.0) * (part.entry.strength or 0.0)
    offset = part.entry.offset or outer.offset
    unavailable = {**outer.unavailable, **part.entry.unavailable}
    return Part(Entry(strength, outer.value, 1.0, offset, unavailable), part.change, outer.value)


def _parts_of_model(entry: Entry, change: Change, original: Tensor | None) -> list[Part]:
    """s·(T − W₀) for the weight T of another model and the original W₀, as two differences."""
    target = change.tensors.get("target")
    if target is None or original is None or entry.strength is None:
        return [_unknown_part(entry, "one of the two weights or the strength cannot be read")]
    added = Part(entry, Change("diff", {"diff": target}), entry.value)
    taken = replace(entry, strength=-entry.strength, strength_model=1.0)
    return [added, Part(taken, Change("diff", {"diff": original}), entry.value)]


def read_value(value: object) -> Change:
    """Read an adapter object or a tuple, of any version. Lists are taken apart by `parts_of`."""
    kind, parts = _kind_and_parts(value)
    if kind not in _PART_NAMES:
        return _unknown_change(f"{kind or type(value).__name__} is not a known kind of change")
    named = dict(zip(_PART_NAMES[kind], parts, strict=False))
    tensors = {name: part for name, part in named.items() if name != "alpha" and isinstance(part, Tensor)}
    alpha = number(named.get("alpha"))
    rank = _rank(kind, tensors)
    unavailable = {}
    if alpha is None and named.get("alpha") is not None:
        unavailable["alpha"] = f"is {type(named['alpha']).__name__}, not a number"
    return Change(
        kind,
        tensors,
        rank,
        alpha,
        _scale(kind, alpha, rank),
        _reshape(named.get("reshape")),
        _pads(named.get("options")),
        has(value, "row_offset"),  # LoKr since mid-2026
        unavailable,
    )


def _kind_and_parts(value: Any) -> tuple[str, tuple[Any, ...]]:
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str):
            return value[0], sequence(value[1])
        return _KIND_BY_LENGTH.get(len(value), ""), value
    name = attribute(value, "name")
    return (name.lower() if isinstance(name, str) else ""), sequence(attribute(value, "weights"))


def _rank(kind: str, tensors: Mapping[str, Tensor]) -> int | None:
    """The number that ComfyUI divides alpha by. LoKr has one only where a factor is low-rank itself."""
    name = {"lora": ("down",), "loha": ("w1_b",), "lokr": _lokr_factor(tensors)}.get(kind, ())
    if kind == "glora":
        return _glora_rank(tensors)
    return next((int(tensors[part].shape[0]) for part in name if part in tensors), None)


def _lokr_factor(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    second = () if "w2" in tensors else ("w2_b",)
    return second if "w1" in tensors else (*second, "w1_b")


def _glora_rank(tensors: Mapping[str, Tensor]) -> int | None:
    """The side that all four factors share; two orders of the factors are in use."""
    if not {"a1", "a2", "b1", "b2"} <= tensors.keys():
        return None
    a1, a2 = tensors["a1"].shape, tensors["a2"].shape
    b1, b2 = tensors["b1"].shape, tensors["b2"].shape
    newer = [int(a2[0])] if b2[0] == b1[1] == a1[1] == a2[0] else []
    older = [int(a1[0])] if b2[1] == b1[0] == a1[0] == a2[1] else []
    return min([*newer, *older], default=None)  # of a square weight both hold, and the larger is its side


def _scale(kind: str, alpha: float | None, rank: int | None) -> float | None:
    if alpha is None or kind in _ROTATIONS:
        return 1.0
    if rank is None:
        return 1.0 if kind == "lokr" else None
    return alpha / rank if rank else None


def _reshape(value: object) -> tuple[int, ...] | None:
    sizes = sequence(value)
    return tuple(int(size) for size in sizes) if sizes else None


def _pads(options: object) -> bool:
    return isinstance(options, Mapping) and bool(options.get("pad_weight"))


def patch_misfit(change: Change, weight: Shape, offset: tuple[int, int, int] | None = None) -> str | None:
    """Why the host cannot apply a change to a weight of this shape; None if it can, or if that is unknown."""
    check = _CHECKS.get(change.kind)
    if check is None:
        return None
    try:
        check(change, _enlarged_shape(change, _part_shape(weight, offset)))
    except _Unfit as why:
        return str(why)
    except (IndexError, KeyError) as error:
        return f"a factor is missing or has too few dimensions ({error})"
    return None


def _check_lora(change: Change, weight: Shape) -> None:
    out, inner = _matrix_sizes(change.tensors["up"])
    down, mid = change.tensors["down"], change.tensors.get("mid")
    rank, width = _matrix_sizes(down)
    if mid is not None:
        width = _middle_width(down, mid)
    _check_ranks("up", inner, "down", rank)
    _check_count((out, width), weight)
    _check_magnitudes(change, weight)


def _check_loha(change: Change, weight: Shape) -> None:
    first, second = (_product_shape(change.tensors, f"w{side}", f"t{side}") for side in (1, 2))
    if first != second:
        raise _Unfit(f"its two products are {_shape_text(first)} and {_shape_text(second)}")
    _check_count(first, weight)
    _check_magnitudes(change, weight)


def _check_lokr(change: Change, weight: Shape) -> None:
    first = _product_shape(change.tensors, "w1", "")
    second = _product_shape(change.tensors, "w2", "t2")
    if not change.takes_rows or first[0] * second[0] <= weight[0]:
        _check_count((math.prod(first), math.prod(second)), weight)
    _check_magnitudes(change, weight)


def _check_glora(change: Change, weight: Shape) -> None:
    sides = {name: _matrix_sizes(change.tensors[name]) for name in ("a1", "a2", "b1", "b2")}
    rank, out, width = change.rank, weight[0], math.prod(weight[1:])
    newer = {"a1": (weight[1], rank), "a2": (rank, weight[1]), "b1": (out, rank), "b2": (rank, width)}
    older = {"a1": (rank, width), "a2": (width, rank), "b1": (rank, width), "b2": (out, rank)}
    if sides not in (newer, older):
        shapes = ", ".join(f"{name} {_shape_text(shape)}" for name, shape in sides.items())
        raise _Unfit(f"its factors {shapes} do not fit a weight of {_shape_text(weight)}")
    _check_magnitudes(change, weight)


def _check_rotation(change: Change, weight: Shape) -> None:
    *_, blocks, size, _same = change.tensors["blocks"].shape
    if blocks * size != weight[0]:
        raise _Unfit(
            f"it turns {blocks} blocks of {size}, the weight of {_shape_text(weight)} has {weight[0]} rows"
        )
    _check_magnitudes(change, weight)


def _check_difference(change: Change, weight: Shape) -> None:
    shape = tuple(change.tensors["diff"].shape)
    if shape != weight:
        raise _Unfit(f"the difference is {_shape_text(shape)}, the weight {_shape_text(weight)}")


def _check_replacement(change: Change, weight: Shape) -> None:
    found = tuple(next(iter(change.tensors.values())).shape) if change.tensors else ()
    if not change.tensors or not _broadcasts(found, weight):
        raise _Unfit(f"the new value is {_shape_text(found)}, the weight {_shape_text(weight)}")


_CHECKS: Mapping[str, Callable[[Change, Shape], None]] = {
    "lora": _check_lora,
    "loha": _check_loha,
    "lokr": _check_lokr,
    "glora": _check_glora,
    "oft": _check_rotation,
    "boft": _check_rotation,
    "diff": _check_difference,
    "set": _check_replacement,
    "model_as_lora": _check_replacement,
}


def _part_shape(weight: Shape, offset: tuple[int, int, int] | None) -> Shape:
    if offset is None:
        return weight
    dimension, start, length = offset
    if not 0 <= dimension < len(weight) or start < 0 or start + length > weight[dimension]:
        raise _Unfit(f"the part {offset} lies outside the weight's {_shape_text(weight)}")
    return (*weight[:dimension], length, *weight[dimension + 1 :])


def _enlarged_shape(change: Change, weight: Shape) -> Shape:
    wanted = change.reshape
    if change.pads and "diff" in change.tensors:
        wanted = tuple(change.tensors["diff"].shape)
    if wanted is None or wanted == weight:
        return weight
    if len(wanted) != len(weight) or any(a < b for a, b in zip(wanted, weight, strict=True)):
        raise _Unfit(f"the weight's {_shape_text(weight)} cannot be enlarged to {_shape_text(wanted)}")
    return wanted


def _middle_width(down: Tensor, mid: Tensor) -> int:
    _check_ranks("down", down.shape[0], "mid", mid.shape[1])
    return int(down.shape[1] * mid.shape[2] * mid.shape[3])


def _product_shape(tensors: Tensors, name: str, core: str) -> Shape:
    """The shape of a factor, whole or made of two, or of two and a core."""
    if name in tensors:
        return tuple(tensors[name].shape)
    first, second = tensors[f"{name}_a"].shape, tensors[f"{name}_b"].shape
    if core in tensors:
        middle = tensors[core].shape
        _check_ranks(core, middle[0], f"{name}_a", first[0])
        _check_ranks(core, middle[1], f"{name}_b", second[0])
        return (first[1], second[1], *middle[2:])
    _check_ranks(f"{name}_a", first[1], f"{name}_b", second[0])
    return (first[0], second[1])


def _matrix_sizes(factor: Tensor) -> tuple[int, int]:
    return int(factor.shape[0]), math.prod(factor.shape[1:])


def _check_ranks(left: str, columns: int, right: str, rows: int) -> None:
    if columns != rows:
        raise _Unfit(f"the rank is {columns} in {left} and {rows} in {right}")


def _check_count(product: Shape, weight: Shape) -> None:
    """The host reshapes what it multiplied: only the number of elements must agree."""
    if math.prod(product) != math.prod(weight):
        raise _Unfit(f"the change is {_shape_text(product)}, the weight {_shape_text(weight)}")


def _check_magnitudes(change: Change, weight: Shape) -> None:
    """The magnitudes of a DoRA are divided by norms of rows, or of columns where there are not as many."""
    if "dora_scale" not in change.tensors:
        return
    shape = tuple(change.tensors["dora_scale"].shape)
    rows = bool(shape) and shape[0] == weight[0]
    norms = (weight[0], *[1] * (len(weight) - 1)) if rows else (1, *weight[1:2], *[1] * (len(weight) - 2))
    ratio = _broadcast_shape(shape, norms)
    if len(weight) < 2 or ratio is None or not _broadcasts(ratio, weight):
        raise _Unfit(f"its magnitudes are {_shape_text(shape)}, the weight {_shape_text(weight)}")


def _broadcasts(found: Shape, weight: Shape) -> bool:
    return _broadcast_shape(found, weight) == weight


def _broadcast_shape(first: Shape, second: Shape) -> Shape | None:
    longest = max(len(first), len(second))
    pairs = zip((1,) * (longest - len(first)) + first, (1,) * (longest - len(second)) + second, strict=True)
    sizes = [(max(pair), min(pair)) for pair in pairs]
    return tuple(large for large, _ in sizes) if all(b in (1, a) for a, b in sizes) else None


class _Unfit(Exception):
    """Carries why, in words."""


def _shape_text(shape: Shape) -> str:
    return "×".join(str(size) for size in shape) or "a single number"


def settled(patch: AppliedPatch, original: Tensor | None, now: Tensor | None, *, alone: bool) -> AppliedPatch:
    """The change with its doubt (`doubt`), resolved if the weight's content decides."""
    reason = doubt(patch)
    if reason is None or patch.state in ("failed", "inactive"):
        return patch
    if patch.state == "merged" and alone and original is not None and now is not None:
        if not torch.equal(original, now.to(original.device)):
            return patch
        return replace(patch, state="failed", state_reason=f"the weight did not change: {reason}")
    return replace(patch, state_reason=f"{patch.state_reason}; it may fail: {reason}")


def doubt(patch: AppliedPatch) -> str | None:
    """Why a change may fail though its shapes fit; None if nothing is known against it."""
    if patch.adapter_type == "lokr" and _is_larger(patch):
        return _FUSED_LOKR
    if patch.adapter_type == "glora" and "tuple" in patch.data_type:
        return _GLORA_ORDER
    if patch.adapter_type in ("oft", "boft") and patch.alpha is None:
        return _NO_ALPHA
    if patch.adapter_type == "lokr" and "t2" in patch.tensors and "w2" not in patch.tensors:
        return _KRON_STRIDES
    return None


def _is_larger(patch: AppliedPatch) -> bool:
    """Whether the product of a LoKr's factors has more elements than the weight that it is for."""
    if patch.offset is not None or patch.weight_shape is None or "t2" in patch.tensors:
        return False
    count = 1
    for name in ("w1", "w2"):
        whole, rows, columns = (patch.tensors.get(f"{name}{end}") for end in ("", "_a", "_b"))
        if whole is not None:
            count *= whole.numel()
        elif rows is not None and columns is not None:
            count *= int(rows.shape[0] * columns.shape[-1])
    return count > math.prod(patch.weight_shape)
