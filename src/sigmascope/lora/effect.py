"""How much the changes on a model change its weights: ‖ΔW‖ and ‖ΔW‖ / ‖W‖, by weight and block.

`effect_of` calculates what all changes of one weight do to it together, `measured_effect` compares a weight before and
after, and `by_block` sums effects up by block. Sums are in float64.

`overlap` compares two LoRAs on each weight that both change: the spaces that ΔW writes to (its columns, the left
singular vectors) and reads from (its rows, the right ones). It needs only the factors. A sum of low-rank changes, LoHa's
product and LoKr's Kronecker product are pairs of factors too, as long as their rank is small.

For orthonormal bases U₁ (m, r₁) and U₂ (m, r₂) the singular values of U₁ᵀU₂ are the cosines of the principal angles
between the spaces (Björck and Golub, Math. Comp. 27, 1973). The bases need not be formed (`shared_spaces`): with
up = Q·R and downᵀ = P·S, the spaces that ΔW = up·down acts in are those of Q·U and P·V for R·Sᵀ = U·Σ·Vᵀ. R and S come
from the Cholesky factors of upᵀup and down·downᵀ, and the cosines of two changes from upₐᵀup_b and downₐ·down_bᵀ: no
basis as long as the weight is formed (CholeskyQR; Yamamoto et al., ETNA 44, 2015). Squaring costs digits, so nearly
dependent factors are compared by their bases (`bases_of`), and the angles themselves always are (`principal_angles`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from math import fsum, isfinite, prod
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError, NonFiniteError
from sigmascope.lora.adapters import require_memory
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.layer_names import block_of_module, block_position
from sigmascope.lora.linalg import (
    as_float64,
    blocked_norm,
    frobenius_norm,
    is_real,
    max_rank,
    read_numbers,
    root_sum_square,
)
from sigmascope.lora.norms_at_once import known_norm_of_sum, known_weight_norm
from sigmascope.lora.patches import (
    as_factors,
    change_by,
    factors_of,
    fits,
    is_by_peft,
    is_product,
    kept_of_weight,
    needs_weight,
    norm_of_sum,
    sort_patches,
    strength_of,
    weight_shape_of,
)
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import copy_to_device
from sigmascope.probes.reading import Reading, attempt

__all__ = [
    "BlockEffect",
    "Effect",
    "KeyOverlap",
    "LoraOverlap",
    "angles_of",
    "by_block",
    "effect_of",
    "measured_effect",
    "overlap",
    "overlaps",
]


NOT_GIVEN: Final = "the weight was not given"
_NOT_FINITE: Final = "{what} holds NaN or Inf, or numbers too large for float64."
WEIGHT_NOT_FINITE: Final = _NOT_FINITE.format(what="the weight")
_CHUNK_ELEMENTS: Final = 1 << 20
_MOST_BYTES: Final = 1 << 26
"""Of factors that are compared in float64 at once."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What is done to one weight.

    Attributes:
        delta_norm: ‖ΔW‖, the Frobenius norm of all changes together; 0 if none acts.
        relative_change: ‖ΔW‖ / ‖W‖.
        weight_norm: ‖W‖ without the changes.
        predicted: True if calculated from the changes, False if measured as the difference of two contents.
        acting: How many changes act.
        left_out: Why the others do not act: inactive, strength 0, or another shape than the weight.
        unavailable: The reason for each figure that is None.
    """

    delta_norm: float | None
    relative_change: float | None
    weight_norm: float | None
    predicted: bool = True
    acting: int = 0
    left_out: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The effect as JSON values."""
        return asdict(self) | {"left_out": list(self.left_out), "unavailable": dict(self.unavailable)}


def effect_of(patches: Sequence[AppliedPatch], weight: Tensor | None) -> Effect:
    """Calculate what the changes of one weight do to it, the way their host applies them.

    A sum of plain low-rank changes is measured from rank-sized matrices, without forming it. Any other change is
    formed in float64, in the host's order if it depends on the changes before it.

    Args:
        patches: All changes of the weight, in any order, with their strengths; several LoRAs and parts of the weight
            are fine.
        weight: The weight without the changes, on any device; it is read, not kept. If None, figures that depend on it
            are unavailable.

    Returns:
        The effect. Nothing is raised: a figure that cannot be calculated is None, with its reason.
    """
    patches_by_use = sort_patches(patches)
    values = None if weight is None or weight.is_meta else weight
    acting = patches_by_use.acting
    return _effect_from(
        lambda: _change_norm(acting, values), weight, True, len(acting), patches_by_use.left_out
    )


def measured_effect(before: Tensor, after: Tensor) -> Effect:
    """Measure how far a weight has moved: ‖after − before‖, summed in float64.

    Args:
        before: The weight before.
        after: The weight now, of the same shape. The difference is formed on its device.
    """
    return _effect_from(lambda: difference(before, after), before, False)


def _effect_from(
    measure: Callable[[], float],
    weight: Tensor | None,
    predicted: bool,
    acting: int = 0,
    left_out: tuple[str, ...] = (),
) -> Effect:
    """‖ΔW‖, ‖W‖ and their ratio; a figure that cannot be calculated is None, with its reason."""
    unavailable: dict[str, str] = {}
    delta = attempt(measure)
    whole: Reading[float] = Reading(None, NOT_GIVEN)
    if weight is not None:
        whole = attempt(lambda: weight_norm(weight))
    for figure, reading in (("delta_norm", delta), ("weight_norm", whole)):
        if reading.reason is not None:
            unavailable[figure] = _plain(reading.reason)
    relative = _ratio(delta.value, whole.value, unavailable)
    return Effect(delta.value, relative, whole.value, predicted, acting, left_out, unavailable)


def _change_norm(acting: Sequence[AppliedPatch], weight: Tensor | None) -> float:
    if not acting:
        return 0.0
    shape = weight_shape_of(acting, weight)
    if shape is not None and all(_is_added(patch, shape) for patch in acting):
        known = known_norm_of_sum(acting)
        return finite(norm_of_sum([factors_of(patch, shape) for patch in acting]) if known is None else known)
    return finite(frobenius_norm(delta_of(acting, weight)))


def _is_added(patch: AppliedPatch, shape: tuple[int, ...]) -> bool:
    """Whether a change only adds factors of the weight's own matrix."""
    return is_product(patch) and patch.strength_model == 1.0 and fits(patch, shape)


def _ratio(delta: float | None, whole: float | None, unavailable: dict[str, str]) -> float | None:
    if delta is None or whole is None:
        unavailable["relative_change"] = unavailable.get("delta_norm") or unavailable["weight_norm"]
        return None
    if whole == 0.0:
        unavailable["relative_change"] = "the weight is all zeros"
        return None
    return delta / whole


def _plain(reason: str) -> str:
    """The reason without the name of our own error types; other types' names stay."""
    name, _, message = reason.partition(": ")
    return message if name in {"LoraFormatError", "ModelMismatchError", "NonFiniteError"} else reason


def delta_of(acting: Sequence[AppliedPatch], weight: Tensor | None) -> Tensor:
    """Form ΔW of changes that act, in float64, on the weight's device.

    Raises:
        SigmascopeError: A change cannot be calculated, or not without the weight.
    """
    shape = weight_shape_of(acting, weight)
    if weight is None and any(map(needs_weight, acting)):
        raise LoraFormatError(f"{NOT_GIVEN}, and its change depends on it.")
    if shape is None:
        raise LoraFormatError(f"{NOT_GIVEN}, and its shape is not known.")
    if weight is None or tuple(weight.shape) != shape:  # the host enlarges the weight
        require_memory("the change", shape, torch.float64)
    base = torch.zeros(shape, dtype=torch.float64) if weight is None else enlarged(wide(weight), shape)
    delta = torch.zeros_like(base)
    for patch in acting:
        part, change = (_part(whole, patch) for whole in (base, delta))
        before = part + change
        if patch.strength_model != 1.0:
            kept = kept_of_weight(patch)
            change += (kept - 1.0) * before
            before = before * kept
        if strength_of(patch) != 0.0 or patch.adapter_type in {"set", "dora"}:
            change += change_by(patch, before, part if _is_beside(patch) else before)
    return delta


def _is_beside(patch: AppliedPatch) -> bool:
    """Whether PEFT runs the change as a branch beside an unchanged weight."""
    return is_by_peft(patch) and patch.state != "merged"


def _part(whole: Tensor, patch: AppliedPatch) -> Tensor:
    if patch.offset is None:
        return whole
    axis, start, length = patch.offset
    if axis >= whole.ndim or start + length > whole.shape[axis]:
        raise ModelMismatchError(
            f"{patch.key}: the part {patch.offset} lies outside the weight {tuple(whole.shape)}."
        )
    return whole.narrow(axis, start, length)


@dataclass(frozen=True, slots=True)
class BlockEffect:
    """What is done to the changed weights of one block.

    Attributes:
        name: Such as `up_blocks.1` or `text_encoder.3`.
        keys: How many of its weights have changes.
        delta_norm: ‖ΔW‖ of the weights that could be measured; None if none could.
        weight_norm: ‖W‖ of all its changed weights; None unless all are known.
        relative_change: ‖ΔW‖ / ‖W‖ of the weights for which both are known; None if there are none.
        share: Its share of all blocks' ‖ΔW‖², 0 to 1.
        predicted: Whether any figure was calculated from the changes instead of measured.
        unavailable: The reason for each figure that is missing.
    """

    name: str
    keys: int
    delta_norm: float | None
    weight_norm: float | None
    relative_change: float | None
    share: float
    predicted: bool
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The block as JSON values."""
        return asdict(self) | {"unavailable": dict(self.unavailable)}


def by_block(effects: Mapping[str, Effect]) -> tuple[BlockEffect, ...]:
    """Sum effects up by block, in the order in which a latent passes the blocks.

    Args:
        effects: By the weight's name in a model's state dict, or by the module's name in a LoRA file.
    """
    placed = sorted(
        ((block_of_module(key), effect) for key, effect in effects.items()),
        key=lambda item: block_position(item[0]),
    )
    total = root_sum_square([effect.delta_norm or 0.0 for effect in effects.values()])
    return tuple(
        _block(name, [effect for _, effect in members], total)
        for name, members in groupby(placed, key=lambda item: item[0])
    )


def _block(name: str, effects: list[Effect], total: float) -> BlockEffect:
    deltas = [effect.delta_norm for effect in effects if effect.delta_norm is not None]
    weights = [effect.weight_norm for effect in effects if effect.weight_norm is not None]
    both = [effect for effect in effects if effect.delta_norm is not None and effect.weight_norm is not None]
    delta = root_sum_square(deltas) if deltas else None
    below = root_sum_square([effect.weight_norm or 0.0 for effect in both])
    above = root_sum_square([effect.delta_norm or 0.0 for effect in both])
    return BlockEffect(
        name=name,
        keys=len(effects),
        delta_norm=delta,
        weight_norm=root_sum_square(weights) if len(weights) == len(effects) else None,
        relative_change=above / below if below > 0.0 else None,
        share=((delta or 0.0) / total) ** 2 if total > 0.0 else 0.0,
        predicted=any(effect.predicted for effect in effects),
        unavailable=_reasons(effects),
    )


def _reasons(effects: list[Effect]) -> dict[str, str]:
    """For each figure, how many weights lack it and the first reason."""
    reasons_by_figure: dict[str, list[str]] = {}
    for effect in effects:
        for figure, reason in effect.unavailable.items():
            reasons_by_figure.setdefault(figure, []).append(reason)
    return {
        figure: f"missing for {len(reasons)} of {len(effects)} weights: {reasons[0]}"
        for figure, reasons in reasons_by_figure.items()
    }


def weight_norm(weight: Tensor | None) -> float:
    """‖W‖.

    Raises:
        LoraFormatError: There is no weight, or its stored numbers are not the layer's.
        NonFiniteError: It holds NaN or Inf.
    """
    if weight is None:
        raise LoraFormatError(NOT_GIVEN)
    _require_numbers(weight)
    known = known_weight_norm(weight)
    return finite(blocked_norm(weight) if known is None else known, "the weight")


def difference(before: Tensor, after: Tensor) -> float:
    """‖after − before‖, formed piece by piece on the device of `after`; raises what `weight_norm` does.

    Raises:
        ModelMismatchError: Their shapes differ.
    """
    if before.shape != after.shape:
        raise ModelMismatchError(
            f"the weight's shape was {tuple(before.shape)} and is now {tuple(after.shape)}."
        )
    _require_numbers(before)
    _require_numbers(after)
    first, second = before.detach().to(after.device).reshape(-1), after.detach().reshape(-1)
    squares = []
    for start in range(0, prod(after.shape), _CHUNK_ELEMENTS):
        some = slice(start, start + _CHUNK_ELEMENTS)
        chunk = as_float64(second[some]) - as_float64(first[some])
        squares.append(torch.dot(chunk, chunk))
    return finite(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)


def finite(norm: float, what: str = "the change") -> float:
    """Return the norm if it is finite.

    Raises:
        NonFiniteError: It is NaN or infinite.
    """
    if not isfinite(norm):
        raise NonFiniteError(_NOT_FINITE.format(what=what))
    return norm


def wide(weight: Tensor) -> Tensor:
    """The weight in float64; raises what `weight_norm` does for its dtype."""
    _require_numbers(weight)
    return as_float64(weight)


def enlarged(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight padded with zeros at the end of each axis, up to a shape."""
    if tuple(weight.shape) == shape:
        return weight
    whole = weight.new_zeros(shape)
    whole[tuple(map(slice, weight.shape))] = weight
    return whole


def _require_numbers(weight: Tensor) -> None:
    if not is_real(weight.dtype):
        raise LoraFormatError(
            f"the weight is stored as {str(weight.dtype).removeprefix('torch.')}: packed codes, not the layer's numbers."
        )


_Changes = Mapping[str, list[AppliedPatch]]
_MAX_GRAM_CONDITION: Final = 1e3
"""The bases' error is its square times float64's precision: 10⁻¹⁰ here."""
_ROUNDING_SHARE: Final = 1e-6
"""Singular values below this share of the largest come from rounding of the stored factors."""
_MAX_ACCURATE_COSINE: Final = 1.0 - 1e-7
"""Above it, a cosine has lost half of its angle's digits."""


@dataclass(frozen=True, slots=True)
class KeyOverlap:
    """Two changes of one weight.

    Attributes:
        key: The weight.
        columns: Mean squared cosine of the principal angles between the spaces that they write to: 1 if one contains
            the other, 0 if they are orthogonal.
        rows: The same for the spaces that they read from.
        overall: The mean of both.
        chance: The `overall` of two random changes of these ranks.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖): 1 for the same change, −1 for its opposite.
        ranks: How many directions each has.
        norms: ‖ΔA‖ and ‖ΔB‖.
    """

    key: str
    columns: float
    rows: float
    overall: float
    chance: float
    cosine: float
    ranks: tuple[int, int]
    norms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class LoraOverlap:
    """Two LoRAs on one model.

    Attributes:
        overall: 0 to 1: each shared weight's overlap, weighted by how much of both LoRAs is in it. 1 for a LoRA
            and itself or a scaled copy, 0 without a shared direction or weight. None if nothing can be compared.
        columns: The same for the spaces that they write to.
        rows: The same for the spaces that they read from.
        chance: The `overall` of random changes of the same ranks and sizes.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖) over all weights.
        keys: Each shared weight that could be compared.
        only_a: Weights that only the first changes.
        only_b: Weights that only the second changes.
        unavailable: Why a weight, or a figure, could not be compared.
    """

    overall: float | None
    columns: float | None
    rows: float | None
    chance: float | None
    cosine: float | None
    keys: tuple[KeyOverlap, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)


def overlap(a: Sequence[AppliedPatch], b: Sequence[AppliedPatch]) -> LoraOverlap:
    """Compare the changes of two LoRAs, weight by weight, from their factors.

    Args:
        a: All changes of one LoRA, for any number of weights, with their current strengths. Changes that do not act
            (inactive, failed, strength 0) are ignored.
        b: All changes of the other.

    Returns:
        The overlap. Nothing is raised: a weight whose changes have no small factors (differences, DoRA, rotations)
        is listed in `unavailable` and does not count in the overall figures.
    """
    return overlaps([(a, b)])[0]


def overlaps(pairs: Sequence[tuple[Sequence[AppliedPatch], Sequence[AppliedPatch]]]) -> list[LoraOverlap]:
    """`overlap` of many pairs of LoRAs: the factors of each weight are looked at once, and alike ones together."""
    changes = [(_by_key(a), _by_key(b)) for a, b in pairs]
    jobs = [
        _Job(number, key, first[key], second[key])
        for number, (first, second) in enumerate(changes)
        for key in first
        if key in second
    ]
    compared: dict[tuple[int, str], Reading[KeyOverlap]] = {}
    for some in _some_at_once(sorted(jobs, key=lambda job: job.key)):
        compared |= _compared_at_once(some)
    return [
        _overlap_of(first, second, {key: compared[number, key] for key in first if key in second})
        for number, (first, second) in enumerate(changes)
    ]


class _Job(NamedTuple):
    """A weight that both LoRAs of a pair change."""

    pair: int
    key: str
    first: list[AppliedPatch]
    second: list[AppliedPatch]


def _some_at_once(jobs: Iterable[_Job]) -> Iterator[list[_Job]]:
    """Jobs whose factors take up to `_MOST_BYTES` in float64, those of one weight together."""
    some: list[_Job] = []
    seen: set[int] = set()
    size = 0
    for job in jobs:
        for patch in (*job.first, *job.second):
            if id(patch) not in seen:
                seen.add(id(patch))
                size += 8 * sum(tensor.numel() for tensor in patch.tensors.values())
        if some and size > _MOST_BYTES and job.key != some[-1].key:
            yield some
            some, seen, size = [], set(), 0
        some.append(job)
    if some:
        yield some


def _compared_at_once(jobs: Sequence[_Job]) -> dict[tuple[int, str], Reading[KeyOverlap]]:
    known: dict[tuple[int, ...], LoraFactors] = {}
    both = [attempt(partial(_both, job.first, job.second, known)) for job in jobs]
    pairs = [pair.value for pair in both if pair.value is not None]
    at_once = iter(spaces_at_once(pairs))
    found: dict[tuple[int, str], Reading[KeyOverlap]] = {}
    for job, pair in zip(jobs, both, strict=True):
        if pair.value is None:
            found[job.pair, job.key] = Reading(None, pair.reason)
            continue
        spaces = next(at_once)
        if spaces.value is None:
            found[job.pair, job.key] = Reading(None, spaces.reason)
        else:
            found[job.pair, job.key] = Reading(
                _key_overlap(job.key, spaces.value, pair.value[0].weight_shape)
            )
    return found


def _overlap_of(
    first: _Changes, second: _Changes, compared: Mapping[str, Reading[KeyOverlap]]
) -> LoraOverlap:
    overlaps = [reading.value for reading in compared.values() if reading.value is not None]
    unavailable = {key: reading.reason or "" for key, reading in compared.items() if reading.value is None}
    sizes = _length(first, overlaps, 0, unavailable), _length(second, overlaps, 1, unavailable)
    total = sizes[0] * sizes[1]
    if total == 0.0:
        unavailable["overall"] = "one of the two LoRAs has no change that could be compared"
    return LoraOverlap(
        overall=_weighted(overlaps, "overall", total),
        columns=_weighted(overlaps, "columns", total),
        rows=_weighted(overlaps, "rows", total),
        chance=_weighted(overlaps, "chance", total),
        cosine=_weighted(overlaps, "cosine", total),
        keys=tuple(overlaps),
        only_a=tuple(key for key in first if key not in second),
        only_b=tuple(key for key in second if key not in first),
        unavailable=unavailable,
    )


def angles_of(
    a: Sequence[AppliedPatch],
    b: Sequence[AppliedPatch],
    known: "dict[tuple[int, ...], ChangeBases] | None" = None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The principal angles between two changes of one weight, in rising degrees: of the columns, and of the rows.

    They need bases as long as the weight, and take several times as long as the figures of `overlap`.

    Args:
        a: The changes of one LoRA.
        b: Those of the other.
        known: Keeps the bases for the next call, where the same changes are compared with others.

    Raises:
        SigmascopeError: A change has no small factors, or the two are for weights of different shapes.
    """
    known = {} if known is None else known
    sides = [(*map(id, patches),) for patches in (a, b)]
    if any(side not in known for side in sides):
        known |= zip(sides, map(bases_of, _both(list(a), list(b))), strict=True)
    first, second = (known[side] for side in sides)
    if not (len(first.values) and len(second.values)):
        return (), ()
    pairs = (first.columns, second.columns), (first.rows, second.rows)
    columns, rows = (tuple(principal_angles(*pair).tolist()) for pair in pairs)
    return columns, rows


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    patches_by_key: dict[str, list[AppliedPatch]] = {}
    for patch in sort_patches(patches).acting:
        patches_by_key.setdefault(patch.key, []).append(patch)
    return patches_by_key


def _key_overlap(key: str, spaces: "SharedSpaces", shape: tuple[int, ...]) -> KeyOverlap:
    return KeyOverlap(
        key=key,
        columns=spaces.columns,
        rows=spaces.rows,
        overall=(spaces.columns + spaces.rows) / 2,
        chance=_chance(spaces.ranks, shape),
        cosine=max(-1.0, min(1.0, spaces.inner / prod(spaces.norms))) if prod(spaces.norms) > 0.0 else 0.0,
        ranks=spaces.ranks,
        norms=spaces.norms,
    )


def _both(
    first: list[AppliedPatch],
    second: list[AppliedPatch],
    known: dict[tuple[int, ...], LoraFactors] | None = None,
) -> tuple[LoraFactors, LoraFactors]:
    """The factors of both; `known` keeps them for the next pair, while the patches live."""
    known = {} if known is None else known
    for patches in (first, second):
        if (*map(id, patches),) not in known:
            known[(*map(id, patches),)] = _factors(patches)
    a, b = (known[(*map(id, patches),)] for patches in (first, second))
    if a.weight_shape != b.weight_shape:
        raise ModelMismatchError(
            f"the two change weights of different shapes, {a.weight_shape} and {b.weight_shape}."
        )
    return a, b if b.up.device == a.up.device else b.to(device=a.up.device)


def _factors(patches: list[AppliedPatch]) -> LoraFactors:
    shape = weight_shape_of(patches, None)
    if shape is None:
        raise LoraFormatError("the shape of the weight is not known.")
    return as_factors(patches, shape)


def _chance(ranks: tuple[int, int], shape: tuple[int, ...]) -> float:
    return sum(min(1.0, max(ranks) / size) for size in shape) / 2 if all(ranks) else 0.0


def _length(
    patches: _Changes, overlaps: Sequence[KeyOverlap], side: int, unavailable: dict[str, str]
) -> float:
    """‖Δ‖ over all weights that could be compared."""
    norms = {key_overlap.key: key_overlap.norms[side] for key_overlap in overlaps}
    for key, changes in patches.items():
        if key in norms or key in unavailable:
            continue
        effect = effect_of(changes, None)
        if effect.delta_norm is None:
            unavailable[key] = effect.unavailable["delta_norm"]
        else:
            norms[key] = effect.delta_norm
    return root_sum_square(list(norms.values()))


def _weighted(overlaps: Sequence[KeyOverlap], figure: str, total: float) -> float | None:
    """Σ ‖ΔAₖ‖·‖ΔBₖ‖·figureₖ / (‖ΔA‖·‖ΔB‖). By Cauchy and Schwarz it keeps the figures' bounds."""
    if total == 0.0:
        return None
    value = (
        fsum(prod(key_overlap.norms) * float(getattr(key_overlap, figure)) for key_overlap in overlaps)
        / total
    )
    return max(-1.0, min(1.0, value))


@dataclass(frozen=True, slots=True)
class SharedSpaces:
    """How far two changes A and B of one weight act in the same spaces.

    Attributes:
        columns: ‖U₁ᵀU₂‖² / min(r₁, r₂), the mean squared cosine of the principal angles between the spaces that they
            write to (section 7.2 of Hu et al., arXiv 2106.09685): 1 if one contains the other, 0 if they are
            orthogonal or a change is zero. Two random spaces have about max(r₁, r₂) / n.
        rows: The same for the spaces that they read from.
        ranks: How many directions each has.
        norms: ‖ΔA‖ and ‖ΔB‖.
        inner: <ΔA, ΔB>.
    """

    columns: float
    rows: float
    ranks: tuple[int, int]
    norms: tuple[float, float]
    inner: float


def shared_spaces(a: LoraFactors, b: LoraFactors) -> SharedSpaces:
    """Compare two changes of one weight, on the device of the first.

    Raises:
        ModelMismatchError: They change weights of different shapes.
    """
    return _of_like_pairs([(a, b)]).get(0) or _spaces_by_bases(a, b)


def spaces_at_once(pairs: Sequence[tuple[LoraFactors, LoraFactors]]) -> list[Reading[SharedSpaces]]:
    """`shared_spaces` of each pair, those of the same sizes together. Never raises."""
    found = attempt(lambda: _of_like_pairs(pairs)).value or {}
    return [
        Reading(found[number]) if number in found else attempt(partial(_spaces_by_bases, a, b))
        for number, (a, b) in enumerate(pairs)
    ]


def _spaces_by_bases(a: LoraFactors, b: LoraFactors) -> SharedSpaces:
    first, second = bases_of(a), bases_of(b)
    columns, rows = first.columns.mT @ second.columns, first.rows.mT @ second.rows
    return SharedSpaces(
        columns=min(1.0, _mean_square(columns)),
        rows=min(1.0, _mean_square(rows)),
        ranks=(len(first.values), len(second.values)),
        norms=(float(first.values.norm()), float(second.values.norm())),
        inner=a.inner(b),
    )


def _of_like_pairs(pairs: Sequence[tuple[LoraFactors, LoraFactors]]) -> dict[int, SharedSpaces]:
    """By number of the pair; those that need their bases are left out."""
    distinct = {id(factors): factors for pair in pairs for factors in pair}
    coordinates = _coordinates(distinct)
    alike: dict[object, list[int]] = {}
    for number, (a, b) in enumerate(pairs):
        if id(a) in coordinates and id(b) in coordinates and a.weight_shape == b.weight_shape:
            alike.setdefault((_form(a), _form(b)), []).append(number)
    found: dict[int, SharedSpaces] = {}
    for numbers in alike.values():
        sides = [[pairs[number][side] for number in numbers] for side in (0, 1)]
        known = [[coordinates[id(factors)] for factors in side] for side in sides]
        (ups, other_ups), (downs, other_downs) = (
            [as_float64(torch.stack([getattr(factors, name) for factors in side])) for side in sides]
            for name in ("up", "down")
        )
        of_ups, of_downs = ups.mT @ other_ups, downs @ other_downs.mT
        (columns, other_columns), (rows, other_rows) = (
            [torch.stack([getattr(one, name) for one in side]) for side in known]
            for name in ("columns", "rows")
        )
        cosines = columns.mT @ of_ups @ other_columns, rows.mT @ of_downs @ other_rows
        sums = [*(part.square().sum((1, 2)) for part in cosines), (of_ups * of_downs).sum((1, 2))]
        read = read_numbers([torch.stack(sums, dim=1).flatten()])
        for place, number in enumerate(numbers):
            of_columns, of_rows, inner = read[3 * place : 3 * place + 3]
            (a, b), (one, other) = pairs[number], (side[place] for side in known)
            smaller = min(one.rank, other.rank)
            found[number] = SharedSpaces(
                columns=min(1.0, of_columns / smaller),
                rows=min(1.0, of_rows / smaller),
                ranks=(one.rank, other.rank),
                norms=(one.norm, other.norm),
                inner=a.scale * b.scale * inner,
            )
    return found


def _form(factors: LoraFactors) -> tuple[object, ...]:
    return factors.up.shape, factors.down.shape, factors.up.dtype, factors.down.dtype, factors.up.device


@dataclass(frozen=True, slots=True, eq=False)
class _Coordinates:
    """C and D such that up·C and downᵀ·D are the bases, with zeros for directions that are only rounding."""

    columns: Tensor
    rows: Tensor
    rank: int
    norm: float


def _coordinates(distinct: Mapping[int, LoraFactors]) -> dict[int, _Coordinates]:
    """Those of each; left out where the factors are zero, dependent or nearly so."""
    alike: dict[object, list[int]] = {}
    for name, factors in distinct.items():
        if 0 < factors.rank <= max_rank(factors.weight_shape):  # else Gram matrices are larger than the bases
            alike.setdefault(_form(factors), []).append(name)
    found: dict[int, _Coordinates] = {}
    for names in alike.values():
        ups, downs = (
            as_float64(torch.stack([getattr(distinct[name], side) for name in names]))
            for side in ("up", "down")
        )
        left, right = _triangles(ups.mT @ ups), _triangles(downs @ downs.mT)
        fine = [place for place, is_fine in enumerate((left.is_fine & right.is_fine).tolist()) if is_fine]
        if not fine:
            continue
        scales = copy_to_device(
            torch.tensor([distinct[names[place]].scale for place in fine]).double(), ups.device
        )
        core = left.triangle[fine] @ right.triangle[fine].mT
        u, values, vh = torch.linalg.svd(core * scales[:, None, None])
        is_kept = (values > _ROUNDING_SHARE * values[:, :1]) & (values[:, :1] > 0.0)
        norms = (values * is_kept).norm(dim=1)
        read = read_numbers([torch.stack([is_kept.sum(1).double(), norms], dim=1).flatten()])
        columns = left.inverse[fine] @ u * is_kept[:, None]
        rows = right.inverse[fine] @ vh.mT * is_kept[:, None]
        for place, index in enumerate(fine):
            rank, norm = read[2 * place : 2 * place + 2]
            if rank:
                found[names[index]] = _Coordinates(columns[place], rows[place], int(rank), norm)
    return found


class _Triangles(NamedTuple):
    """R and R⁻¹ for each Gram = RᵀR, and whether the vectors, scaled to length 1, are far from dependent."""

    triangle: Tensor
    inverse: Tensor
    is_fine: Tensor


def _triangles(grams: Float[Tensor, "n k k"]) -> _Triangles:
    lengths = grams.diagonal(dim1=1, dim2=2).sqrt()
    lower, failed = torch.linalg.cholesky_ex(grams / (lengths[:, :, None] * lengths[:, None, :]))
    identity = torch.eye(grams.shape[1], dtype=grams.dtype, device=grams.device).expand_as(grams)
    inverse = torch.linalg.solve_triangular(lower.mT, identity, upper=True)
    condition = lower.flatten(1).norm(dim=1) * inverse.flatten(1).norm(dim=1)
    is_fine = (failed == 0) & (lengths > 0.0).all(1) & (condition < _MAX_GRAM_CONDITION * grams.shape[1])
    return _Triangles(lower.mT * lengths[:, None, :], inverse / lengths[:, :, None], is_fine)


def _mean_square(cosines: Tensor) -> float:
    smaller = min(cosines.shape)
    return float(cosines.square().sum()) / smaller if smaller else 0.0


@dataclass(frozen=True, eq=False)
class ChangeBases:
    """Orthonormal bases of the spaces that a change writes to and reads from.

    Attributes:
        columns: (out, r), left singular vectors.
        rows: (in·kh·kw, r), right singular vectors.
        values: (r,), the singular values above rounding, falling.
    """

    columns: Float[Tensor, "out r"]
    rows: Float[Tensor, "inner r"]
    values: Float[Tensor, " r"]


def bases_of(factors: LoraFactors) -> ChangeBases:
    """The singular vectors of ΔW that are more than rounding, in float64."""
    left, core, right = factors.orthogonal_form()
    u, sigma, vh = torch.linalg.svd(core, full_matrices=False)
    kept = kept_values(sigma)
    return ChangeBases(left @ u[:, :kept], right @ vh[:kept].mT, sigma[:kept])


def kept_values(sigma: Float[Tensor, " k"]) -> int:
    """How many of the falling singular values are more than rounding."""
    return int((sigma > _ROUNDING_SHARE * sigma[0]).sum()) if float(sigma[0]) > 0.0 else 0


def principal_angles(first: Float[Tensor, "n r"], second: Float[Tensor, "n s"]) -> Float[Tensor, " k"]:
    """The min(r, s) angles between two spaces, in rising degrees; small ones come from their sines.

    Args:
        first: Orthonormal columns.
        second: Orthonormal columns of the same length.
    """
    large, small = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    core = large.mT @ small
    cosines = torch.linalg.svdvals(core).clamp(max=1.0)
    near = cosines > _MAX_ACCURATE_COSINE
    if not bool(near.any()):
        return torch.rad2deg(cosines.acos())
    _, beside = torch.linalg.qr(small - large @ core, mode="r")
    sines = torch.linalg.svdvals(beside).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.where(near, sines.asin(), cosines.acos()))
