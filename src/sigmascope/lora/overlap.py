"""Whether two LoRAs act in the same directions of the same weights: principal angles and overlap.

For each weight that both change, `overlap` compares the spaces that the changes write to (the columns of ΔW, its left
singular vectors) and read from (its rows, the right ones), from their factors alone. A sum of low-rank changes,
LoHa's product of two and LoKr's Kronecker product are pairs of factors too, as long as their rank is small.

For orthonormal bases U₁ (m, r₁) and U₂ (m, r₂) the singular values of U₁ᵀU₂ are the cosines of the principal angles
between the spaces (Björck and Golub, Math. Comp. 27, 1973). The bases need not be formed (`shared_spaces`): with
up = Q·R and downᵀ = P·S, the spaces that ΔW = up·down acts in are those of Q·U and P·V for R·Sᵀ = U·Σ·Vᵀ. R and S come
from the Cholesky factors of upᵀup and down·downᵀ, and the cosines of two changes from upₐᵀup_b and downₐ·down_bᵀ: no
basis as long as the weight is formed (CholeskyQR; Yamamoto et al., ETNA 44, 2015). Squares cost digits, so factors
that are nearly dependent are compared by bases after all (`bases_of`), and so are the angles themselves
(`principal_angles`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import fsum, prod
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.effect import effect_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.linalg import as_float64, root_sum_square
from sigmascope.lora.patches import as_factors, sort_patches, weight_shape_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.reading import attempt

__all__ = ["KeyOverlap", "LoraOverlap", "angles_of", "overlap"]

_Changes = Mapping[str, list[AppliedPatch]]
_WORST_CONDITION: Final = 1e3
"""The bases are off by its square times float64's precision: 10⁻¹⁰ here."""
_NOISE: Final = 1e-6
"""Singular values below this share of the largest are rounding of the stored factors, not directions."""
_NEAR_ONE: Final = 1.0 - 1e-7
"""Above, a cosine has lost half of the digits of its angle."""


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
        column_angles: In degrees, rising, as `row_angles` are; none where angles were not asked for.
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
    overlaps: list[KeyOverlap] = []
    for key in shared:
        compared = attempt(partial(_compared, key, first[key], second[key], angles))
        if compared.value is not None:
            overlaps.append(compared.value)
        else:
            unavailable[key] = compared.reason or ""
    sizes = _length(first, overlaps, 0, unavailable), _length(second, overlaps, 1, unavailable)
    total = sizes[0] * sizes[1]
    if total == 0.0:
        unavailable["overall"] = "one of the two changes nothing that could be compared"
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
    a: Sequence[AppliedPatch], b: Sequence[AppliedPatch]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The principal angles of two changes of one weight in degrees, rising: of columns, and of rows.

    Raises:
        SigmascopeError: One of them has no small factors, or they are for weights of other shape.
    """
    return _angles(*_both(list(a), list(b)))


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    patches_by_key: dict[str, list[AppliedPatch]] = {}
    for patch in sort_patches(patches).acting:
        patches_by_key.setdefault(patch.key, []).append(patch)
    return patches_by_key


def _compared(key: str, first: list[AppliedPatch], second: list[AppliedPatch], angles: bool) -> KeyOverlap:
    a, b = _both(first, second)
    spaces = shared_spaces(a, b)
    column_angles, row_angles = _angles(a, b) if angles else ((), ())
    return KeyOverlap(
        key=key,
        columns=spaces.columns,
        rows=spaces.rows,
        overall=(spaces.columns + spaces.rows) / 2,
        chance=_chance(spaces.ranks, a.weight_shape),
        cosine=max(-1.0, min(1.0, spaces.inner / prod(spaces.norms))) if prod(spaces.norms) > 0.0 else 0.0,
        column_angles=column_angles,
        row_angles=row_angles,
        ranks=spaces.ranks,
        norms=spaces.norms,
    )


def _both(first: list[AppliedPatch], second: list[AppliedPatch]) -> tuple[LoraFactors, LoraFactors]:
    a, b = _factors(first), _factors(second)
    if a.weight_shape != b.weight_shape:
        raise ModelMismatchError(f"the two are for weights {a.weight_shape} and {b.weight_shape}.")
    return a, b.to(device=a.up.device)


def _factors(patches: list[AppliedPatch]) -> LoraFactors:
    shape = weight_shape_of(patches, None)
    if shape is None:
        raise LoraFormatError("the shape of the weight is not known.")
    return as_factors(patches, shape)


def _chance(ranks: tuple[int, int], shape: tuple[int, ...]) -> float:
    return sum(min(1.0, max(ranks) / size) for size in shape) / 2 if all(ranks) else 0.0


def _angles(a: LoraFactors, b: LoraFactors) -> tuple[tuple[float, ...], tuple[float, ...]]:
    first, second = bases_of(a), bases_of(b)
    if not (len(first.values) and len(second.values)):
        return (), ()
    pairs = (first.columns, second.columns), (first.rows, second.rows)
    columns, rows = (tuple(principal_angles(*pair).tolist()) for pair in pairs)
    return columns, rows


def _length(
    patches: _Changes, overlaps: Sequence[KeyOverlap], side: int, unavailable: dict[str, str]
) -> float:
    """‖Δ‖ over all weights but those that are out of the comparison."""
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
    """Σ ‖ΔAₖ‖·‖ΔBₖ‖·figureₖ / (‖ΔA‖·‖ΔB‖), which the figures' bounds hold for by Cauchy and Schwarz."""
    if total == 0.0:
        return None
    value = (
        fsum(prod(key_overlap.norms) * float(getattr(key_overlap, figure)) for key_overlap in overlaps)
        / total
    )
    return max(-1.0, min(1.0, value))


@dataclass(frozen=True, slots=True)
class SharedSpaces:
    """Two changes A and B of one weight.

    Attributes:
        columns: `subspace_overlap` of the spaces that they write to, 0 to 1.
        rows: The same of those that they read from.
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
        ModelMismatchError: They change weights of different shape.
    """
    first, second = _Spaces.of(a), _Spaces.of(b)
    inner = a.inner(b)
    if first is None or second is None:
        return _by_bases(a, b, inner)
    columns = first.columns.mT @ (as_float64(a.up).mT @ as_float64(b.up)) @ second.columns
    rows = first.rows.mT @ (as_float64(a.down) @ as_float64(b.down).mT) @ second.rows
    ranks = len(first.values), len(second.values)
    return SharedSpaces(_share(columns), _share(rows), ranks, (first.norm, second.norm), inner)


@dataclass(frozen=True, slots=True, eq=False)
class _Spaces:
    """up·columns and downᵀ·rows are orthonormal bases, of as many directions as there are values."""

    columns: Tensor
    rows: Tensor
    values: Tensor

    @property
    def norm(self) -> float:
        return float(self.values.norm())

    @classmethod
    def of(cls, factors: LoraFactors) -> "_Spaces | None":
        """None if the factors are too nearly dependent, or zero."""
        up, down = as_float64(factors.up), as_float64(factors.down)
        left, right = _triangle(up.mT @ up), _triangle(down @ down.mT)
        if left is None or right is None:
            return None
        u, values, vh = torch.linalg.svd((left[0] @ right[0].mT).mul(factors.scale))
        kept = kept_values(values)
        if kept == 0:
            return None
        return cls(left[1] @ u[:, :kept], right[1] @ vh[:kept].mT, values[:kept])


def _triangle(gram: Tensor) -> tuple[Tensor, Tensor] | None:
    """R and R⁻¹ for Gram = RᵀR, with the lengths of the vectors taken out before the condition is looked at."""
    lengths = gram.diagonal().sqrt()
    if not bool((lengths > 0.0).all()):
        return None
    lower, failed = torch.linalg.cholesky_ex(gram / torch.outer(lengths, lengths))
    if int(failed):
        return None
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower.mT, identity, upper=True)
    if not float(lower.norm() * inverse.norm()) < _WORST_CONDITION * len(gram):
        return None
    return lower.mT * lengths, inverse / lengths[:, None]


def _share(cosines: Tensor) -> float:
    return min(1.0, float(cosines.square().sum()) / min(cosines.shape))


def _by_bases(a: LoraFactors, b: LoraFactors, inner: float) -> SharedSpaces:
    first, second = bases_of(a), bases_of(b)
    columns, rows = (
        min(1.0, subspace_overlap(*pair))
        for pair in ((first.columns, second.columns), (first.rows, second.rows))
    )
    norms = float(first.values.norm()), float(second.values.norm())
    return SharedSpaces(columns, rows, (len(first.values), len(second.values)), norms, inner)


@dataclass(frozen=True, eq=False)
class ChangeBases:
    """Orthonormal bases of the space a change writes to and of the one it reads from.

    Attributes:
        columns: (out, r), left singular vectors.
        rows: (in·kh·kw, r), right singular vectors.
        values: (r,), the singular values, falling and above rounding.
    """

    columns: Float[Tensor, "out r"]
    rows: Float[Tensor, "inner r"]
    values: Float[Tensor, " r"]


def bases_of(factors: LoraFactors) -> ChangeBases:
    """Give the singular vectors of ΔW that are more than rounding, in float64."""
    left, core, right = factors.orthogonal_form()
    u, sigma, vh = torch.linalg.svd(core, full_matrices=False)
    kept = kept_values(sigma)
    return ChangeBases(left @ u[:, :kept], right @ vh[:kept].mT, sigma[:kept])


def kept_values(sigma: Float[Tensor, " k"]) -> int:
    """How many of falling singular values are more than rounding."""
    return int((sigma > _NOISE * sigma[0]).sum()) if float(sigma[0]) > 0.0 else 0


def subspace_overlap(first: Float[Tensor, "n r"], second: Float[Tensor, "n s"]) -> float:
    """‖U₁ᵀU₂‖² / min(r, s), the mean squared cosine of the principal angles.

    1 where one space holds the other, 0 where they are orthogonal (the measure of section 7.2 of Hu et al.,
    arXiv 2106.09685); 0 too when either is empty. Two random spaces have max(r, s) / n.

    Args:
        first: Orthonormal columns.
        second: The same, of the same length.
    """
    smaller = min(first.shape[1], second.shape[1])
    return float((first.mT @ second).square().sum()) / smaller if smaller else 0.0


def principal_angles(first: Float[Tensor, "n r"], second: Float[Tensor, "n s"]) -> Float[Tensor, " k"]:
    """The min(r, s) angles between two spaces in degrees, rising; small ones from their sines.

    Args:
        first: Orthonormal columns.
        second: The same, of the same length.
    """
    large, small = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    core = large.mT @ small
    cosines = torch.linalg.svdvals(core).clamp(max=1.0)
    near = cosines > _NEAR_ONE
    if not bool(near.any()):
        return torch.rad2deg(cosines.acos())
    _, beside = torch.linalg.qr(small - large @ core, mode="r")
    sines = torch.linalg.svdvals(beside).clamp(max=1.0).flip(0)
    return torch.rad2deg(torch.where(near, sines.asin(), cosines.acos()))
