"""Whether two LoRAs on one model act in the same directions of the same weights.

For each weight that both change, the principal angles between the spaces that the changes write to (their columns)
and read from (their rows), from their factors alone. A sum of low-rank changes, LoHa's product of two and LoKr's
Kronecker product are pairs of factors too, as long as their rank is small.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import fsum, prod

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.effect.acting import sort_patches
from sigmascope.lora.effect.key_effect import effect_of
from sigmascope.lora.effect.patch_factors import weight_shape_of
from sigmascope.lora.effect.small_factors import as_factors
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspection.overlap_facts import KeyOverlap, LoraOverlap
from sigmascope.lora.inspection.principal_angles import principal_angles
from sigmascope.lora.inspection.shared_spaces import shared_spaces
from sigmascope.lora.inspection.subspaces import bases_of
from sigmascope.lora.norms import root_sum_square
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import attempt

__all__ = ["KeyOverlap", "LoraOverlap", "angles_of", "overlap"]


def overlap(a: Sequence[AppliedPatch], b: Sequence[AppliedPatch], *, angles: bool = True) -> LoraOverlap:
    """Compare the changes of two LoRAs, weight by weight, from their factors.

    Args:
        a: All changes of one LoRA, of any number of weights, with the strengths that they have now. What does not
            act (inactive, failed, of strength 0) counts for nothing.
        b: Those of the other.
        angles: Also the angles themselves, of each weight. They take bases as long as the weight; all other
            figures come from matrices as small as the ranks, several times faster.

    Returns:
        The overlap. Nothing is raised: a weight whose changes are no small factors (differences, DoRA, rotations)
        is in `unavailable`, and then out of the overall figures.
    """
    first, second = _by_key(a), _by_key(b)
    shared = [key for key in first if key in second]
    unavailable: dict[str, str] = {}
    found: list[KeyOverlap] = []
    for key in shared:
        compared = attempt(partial(_compared, key, first[key], second[key], angles), Exception)
        if compared.value is not None:
            found.append(compared.value)
        else:
            unavailable[key] = compared.reason or ""
    sizes = _length(first, found, 0, unavailable), _length(second, found, 1, unavailable)
    total = sizes[0] * sizes[1]
    if total == 0.0:
        unavailable["overall"] = "one of the two changes nothing that could be compared"
    return LoraOverlap(
        overall=_weighted(found, "overall", total),
        columns=_weighted(found, "columns", total),
        rows=_weighted(found, "rows", total),
        chance=_weighted(found, "chance", total),
        cosine=_weighted(found, "cosine", total),
        keys=tuple(found),
        only_a=tuple(key for key in first if key not in second),
        only_b=tuple(key for key in second if key not in first),
        unavailable=unavailable,
    )


def angles_of(
    a: Sequence[AppliedPatch], b: Sequence[AppliedPatch]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The principal angles of two changes of one weight in degrees, rising: of columns, and of rows.

    Raises:
        SigmascopeError: One of them has no small factors, or they are for weights of other shape.
    """
    return _angles(*_both(list(a), list(b)))


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    found: dict[str, list[AppliedPatch]] = {}
    for patch in sort_patches(patches).acting:
        found.setdefault(patch.key, []).append(patch)
    return found


def _compared(key: str, first: list[AppliedPatch], second: list[AppliedPatch], angles: bool) -> KeyOverlap:
    a, b = _both(first, second)
    found = shared_spaces(a, b)
    column_angles, row_angles = _angles(a, b) if angles else ((), ())
    return KeyOverlap(
        key=key,
        columns=found.columns,
        rows=found.rows,
        overall=(found.columns + found.rows) / 2,
        chance=_chance(found.ranks, a.weight_shape),
        cosine=max(-1.0, min(1.0, found.inner / prod(found.norms))) if prod(found.norms) > 0.0 else 0.0,
        column_angles=column_angles,
        row_angles=row_angles,
        ranks=found.ranks,
        norms=found.norms,
    )


def _both(first: list[AppliedPatch], second: list[AppliedPatch]) -> tuple[LoraFactors, LoraFactors]:
    a, b = _factors(first), _factors(second)
    if a.weight_shape != b.weight_shape:
        raise ModelMismatchError(f"the two are for weights {a.weight_shape} and {b.weight_shape}.")
    return a, b.to(device=a.up.device)


def _chance(ranks: tuple[int, int], shape: tuple[int, ...]) -> float:
    return sum(min(1.0, max(ranks) / size) for size in shape) / 2 if all(ranks) else 0.0


def _angles(a: LoraFactors, b: LoraFactors) -> tuple[tuple[float, ...], tuple[float, ...]]:
    one, two = bases_of(a), bases_of(b)
    if not (len(one.values) and len(two.values)):
        return (), ()
    pairs = (one.columns, two.columns), (one.rows, two.rows)
    columns, rows = (tuple(principal_angles(*pair).tolist()) for pair in pairs)
    return columns, rows


def _factors(patches: list[AppliedPatch]) -> LoraFactors:
    shape = weight_shape_of(patches, None)
    if shape is None:
        raise LoraFormatError("the shape of the weight is not known.")
    return as_factors(patches, shape)


_Changes = Mapping[str, list[AppliedPatch]]


def _length(patches: _Changes, found: Sequence[KeyOverlap], side: int, unavailable: dict[str, str]) -> float:
    """‖Δ‖ over all weights but those that are out of the comparison."""
    norms = {one.key: one.norms[side] for one in found}
    for key, changes in patches.items():
        if key in norms or key in unavailable:
            continue
        effect = effect_of(changes, None)
        if effect.delta_norm is None:
            unavailable[key] = effect.unavailable["delta_norm"]
        else:
            norms[key] = effect.delta_norm
    return root_sum_square(list(norms.values()))


def _weighted(found: Sequence[KeyOverlap], figure: str, total: float) -> float | None:
    """Σ ‖ΔAₖ‖·‖ΔBₖ‖·figureₖ / (‖ΔA‖·‖ΔB‖), which the figures' bounds hold for by Cauchy and Schwarz."""
    if total == 0.0:
        return None
    value = fsum(prod(one.norms) * float(getattr(one, figure)) for one in found) / total
    return max(-1.0, min(1.0, value))
