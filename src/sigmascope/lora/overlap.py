"""Whether two LoRAs on one model act in the same directions of the same weights.

For each weight that both change, the principal angles between the spaces that the changes write to (their columns)
and read from (their rows), from their factors alone. A sum of low-rank changes, LoHa's product of two and LoKr's
Kronecker product are pairs of factors too, as long as their rank is small.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import fsum, prod
from typing import Any

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.effect.acting import sort_patches
from sigmascope.lora.effect.key_effect import effect_of
from sigmascope.lora.effect.patch_factors import weight_shape_of
from sigmascope.lora.effect.small_factors import as_factors
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.inspection.principal_angles import principal_angles
from sigmascope.lora.inspection.subspaces import bases_of
from sigmascope.lora.inspection.subspaces import overlap as mean_squared_cosine
from sigmascope.lora.norms import root_sum_square
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import attempt

__all__ = ["KeyOverlap", "LoraOverlap", "overlap"]


@dataclass(frozen=True, slots=True)
class KeyOverlap:
    """Two changes of one weight.

    Attributes:
        key: The weight.
        columns: Mean squared cosine of the principal angles between the spaces that they write to: 1 where one
            holds the other, 0 where they are orthogonal.
        rows: The same of the spaces that they read from.
        overall: The mean of both.
        chance: What `overall` would be for two random changes of these ranks.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖): 1 the same change, −1 its opposite.
        column_angles: In degrees, rising, as `row_angles` are.
        ranks: How many directions each has.
        norms: ‖ΔA‖ and ‖ΔB‖.
    """

    key: str
    columns: float
    rows: float
    overall: float
    chance: float
    cosine: float
    column_angles: tuple[float, ...]
    row_angles: tuple[float, ...]
    ranks: tuple[int, int]
    norms: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """The overlap as JSON values."""
        listed = ("column_angles", "row_angles", "ranks", "norms")
        return asdict(self) | {name: list(getattr(self, name)) for name in listed}


@dataclass(frozen=True, slots=True)
class LoraOverlap:
    """Two LoRAs on one model.

    Attributes:
        overall: 0 to 1: each shared weight's overlap, weighted by how much of both LoRAs is in it. 1 for a LoRA
            and itself or a scaled copy, 0 without a shared direction or weight. None where it cannot be had.
        columns: The same of the spaces that they write to.
        rows: The same of the spaces that they read from.
        chance: What `overall` would be for random changes of the same ranks and sizes.
        cosine: <ΔA, ΔB> / (‖ΔA‖·‖ΔB‖) over all weights.
        keys: Each shared weight that could be compared.
        only_a: Weights that the first alone changes.
        only_b: Weights that the second alone changes.
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

    def as_dict(self) -> dict[str, Any]:
        """The overlap as JSON values."""
        return asdict(self) | {
            "keys": [key.as_dict() for key in self.keys],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "unavailable": dict(self.unavailable),
        }


def overlap(a: Sequence[AppliedPatch], b: Sequence[AppliedPatch]) -> LoraOverlap:
    """Compare the changes of two LoRAs, weight by weight, from their factors.

    Args:
        a: All changes of one LoRA, of any number of weights, with the strengths that they have now. What does not
            act (inactive, failed, of strength 0) counts for nothing.
        b: Those of the other.

    Returns:
        The overlap. Nothing is raised: a weight whose changes are no small factors (differences, DoRA, rotations)
        is in `unavailable`, and then out of the overall figures.
    """
    first, second = _by_key(a), _by_key(b)
    shared = [key for key in first if key in second]
    unavailable: dict[str, str] = {}
    found: list[KeyOverlap] = []
    for key in shared:
        compared = attempt(partial(_compared, key, first[key], second[key]), Exception)
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


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    found: dict[str, list[AppliedPatch]] = {}
    for patch in sort_patches(patches).acting:
        found.setdefault(patch.key, []).append(patch)
    return found


def _compared(key: str, first: list[AppliedPatch], second: list[AppliedPatch]) -> KeyOverlap:
    a, b = _factors(first), _factors(second)
    if a.weight_shape != b.weight_shape:
        raise ModelMismatchError(f"the two are for weights {a.weight_shape} and {b.weight_shape}.")
    b = b.to(device=a.up.device)
    one, two = bases_of(a), bases_of(b)
    columns, rows = (
        min(1.0, mean_squared_cosine(*pair)) for pair in ((one.columns, two.columns), (one.rows, two.rows))
    )
    ranks = len(one.values), len(two.values)
    norms = float(one.values.norm()), float(two.values.norm())
    return KeyOverlap(
        key=key,
        columns=columns,
        rows=rows,
        overall=(columns + rows) / 2,
        chance=sum(min(1.0, max(ranks) / size) for size in a.weight_shape) / 2 if all(ranks) else 0.0,
        cosine=max(-1.0, min(1.0, a.inner(b) / prod(norms))) if prod(norms) > 0.0 else 0.0,
        column_angles=tuple(principal_angles(one.columns, two.columns).tolist()) if all(ranks) else (),
        row_angles=tuple(principal_angles(one.rows, two.rows).tolist()) if all(ranks) else (),
        ranks=ranks,
        norms=norms,
    )


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
