"""What each patch on a model does to its weight, as its host applies it: as factors, or formed whole.

`sort_patches` tells which patches of a weight act. `change_by` forms what one of them adds to the weight as it is when
the patch comes, in float64. Hosts differ: DoRA's magnitudes per output are divided by the norm of the unchanged weight
in ComfyUI and by that of the changed one in PEFT (and in the paper, Liu et al., arXiv 2402.09353), and PEFT's strength
acts inside the norm. This module does what each host does, right or wrong.

Rotations of a weight's rows are OFT (Qiu et al., arXiv 2306.07280) and BOFT (Liu et al., arXiv 2311.06243). A block's
rotation is the Cayley transform of a skew matrix, R = (I + Q)(I − Q)⁻¹ with Q = B − Bᵀ, whose length is limited by the
stored alpha (`sigmascope.lora.kinds.oft`). ComfyUI's way of applying them is followed, strengths included.

A patch that is a product is not formed: `factors_of` gives it as two factors, so that its norm needs no product
(`norm_of_sum`). `as_factors` gives all changes of one weight as a single pair, where they are low-rank in any way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from operator import attrgetter
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError, ModelMismatchError
from sigmascope.lora.adapters import Adapter, DiffChange, LohaChange, LokrChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.kinds.boft import butterfly
from sigmascope.lora.kinds.glora import glora_product
from sigmascope.lora.kinds.oft import cayley, turned_rows
from sigmascope.lora.linalg import as_float64, is_real
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.reading import attempt

_PEFT_TYPE_MARK: Final = "peft."
_ACTING_AT_STRENGTH_0: Final = frozenset({"set", "dora"})

_NEEDS_WEIGHT: Final = frozenset({"glora", "oft", "boft", "set", "dora"})
_COMFYUI_NORM_EPSILON: Final = torch.finfo(
    torch.float32
).eps  # what ComfyUI adds to norms of weights in float32

Shape = tuple[int, ...]
_ADAPTERS: Final[dict[str, tuple[str, type[Adapter]]]] = {
    "loha": ("hada_", LohaChange),
    "lokr": ("lokr_", LokrChange),
}

CANCELLATION_SHARE: Final = 1e-6
"""If a sum is this much shorter than its parts, squares have lost half of float64's digits, and QR is used."""
_ROUNDING_SHARE: Final = 1e-13
"""If a sum is this much shorter than its parts, they cancel, and it is only float64 rounding."""
_MAX_COMPARED_RANK: Final = 2048  # above, the bases take seconds a weight


class Sorted(NamedTuple):
    """The changes of one weight, sorted.

    Attributes:
        acting: Those that change it, in the order in which the host applies them.
        left_out: Of the others, why not, each once.
    """

    acting: tuple[AppliedPatch, ...]
    left_out: tuple[str, ...]


def sort_patches(patches: Sequence[AppliedPatch]) -> Sorted:
    """Separate the changes that act on a weight from those that do not.

    A change of strength 0 acts where its host still multiplies the weight itself, or sets it whatever the strength.
    """
    acting: list[AppliedPatch] = []
    left_out: dict[str, None] = {}
    for patch in sorted(patches, key=_INDEX) if len(patches) > 1 else patches:
        reason = _why_idle(patch)
        if reason is None:
            acting.append(patch)
        else:
            left_out[reason] = None
    return Sorted(tuple(acting), tuple(left_out))


_INDEX: Final = attrgetter("index")


def _why_idle(patch: AppliedPatch) -> str | None:
    if patch.state == "failed":
        return f"it cannot be applied: {patch.state_reason}" if patch.state_reason else "it cannot be applied"
    if patch.strength_model not in (1.0, None):
        return None
    if patch.state == "inactive":
        return f"inactive: {patch.state_reason}" if patch.state_reason else "inactive"
    if patch.strength == 0.0 and (patch.adapter_type not in _ACTING_AT_STRENGTH_0 or keeps_norms(patch)):
        return "its strength is 0"
    return None


def strength_of(patch: AppliedPatch) -> float:
    """The strength of a change without its scale; 0 for one that is switched off.

    Raises:
        LoraFormatError: It could not be read.
    """
    return 0.0 if patch.state == "inactive" else _required(patch, "strength", patch.strength)


def scale_of_patch(patch: AppliedPatch) -> float:
    """The host's alpha / rank.

    Raises:
        LoraFormatError: It could not be read.
    """
    return _required(patch, "scale", patch.scale)


def kept_of_weight(patch: AppliedPatch) -> float:
    """What the weight itself is multiplied with before the change.

    Raises:
        LoraFormatError: It could not be read.
    """
    return _required(patch, "strength_model", patch.strength_model)


def _required(patch: AppliedPatch, name: str, value: float | None) -> float:
    if value is None:
        reason = patch.unavailable.get(name, "the host does not say")
        raise LoraFormatError(f"the {name} of a change of {patch.key} could not be read: {reason}.")
    return value


def is_by_peft(patch: AppliedPatch) -> bool:
    """Whether PEFT applies it; PEFT applies some kinds differently from ComfyUI."""
    return _PEFT_TYPE_MARK in patch.data_type


def needs_weight(patch: AppliedPatch) -> bool:
    """Whether what a patch changes depends on the weight that is there."""
    by_type = patch.adapter_type in _NEEDS_WEIGHT or "dora_scale" in patch.tensors
    return by_type or patch.strength_model != 1.0


def change_by(patch: AppliedPatch, weight: Tensor, held: Tensor) -> Tensor:
    """ΔW of one patch with its strength, in the weight's shape, float64; without `strength_model`.

    Args:
        patch: A patch that acts.
        weight: The weight just before the patch, in float64; only the part that the patch is for. Zeros if it does not
            matter.
        held: What the weight's own tensor holds then, without the branches that PEFT runs beside it.

    Raises:
        SigmascopeError: A kind that is not known, or tensors that do not fit the weight.
    """
    strength = strength_of(patch)
    if patch.adapter_type == "set":
        return _tensor(patch, "set", weight).reshape(weight.shape) - weight
    if "dora_scale" in patch.tensors and is_by_peft(patch):
        return _magnified_by_peft(patch, weight, held, strength * _direction(patch, weight))
    change = _direction(patch, weight)
    if "dora_scale" in patch.tensors:
        if patch.adapter_type in {"oft", "boft"}:  # ComfyUI takes the limit for a scale here
            change = change * (patch.alpha or 0.0)
        change = _magnified(patch, weight, change)
    return change * strength


def _magnified(patch: AppliedPatch, weight: Tensor, change: Tensor) -> Tensor:
    """m·(W + δ)/norm − W."""
    magnitude = _tensor(patch, "dora_scale", weight)
    changed = weight + change
    # Until April 2025 ComfyUI kept changes as tuples, and took all magnitudes for those of inputs.
    by_output = magnitude.shape[:1] == weight.shape[:1] and "tuple" not in patch.data_type
    norm = _norms_along(weight, 0) if by_output else _norms_along(changed, 1)
    result: Tensor = changed * (magnitude / (norm + _COMFYUI_NORM_EPSILON)) - weight
    return result


def _magnified_by_peft(patch: AppliedPatch, weight: Tensor, held: Tensor, change: Tensor) -> Tensor:
    """m·(W + δ)/‖W₀ + δ‖ − W: a second DoRA acts on the output of the first, and takes its norm of W₀ alone.

    PEFT has the norm in the magnitudes' type: half precision is taken over, so that an untrained DoRA changes nothing.
    """
    magnitude = _tensor(patch, "dora_scale", weight).flatten()
    axis = 0 if len(magnitude) == weight.shape[0] else 1
    shape = [size if number == axis else 1 for number, size in enumerate(weight.shape)]
    dtype = patch.tensors["dora_scale"].dtype
    norm = _norms_along(held + change, axis)
    norm = (norm.to(dtype).to(torch.float64) if dtype.itemsize == 2 else norm).clamp_min(
        torch.finfo(torch.float64).tiny
    )
    result: Tensor = (weight + change) * (magnitude.reshape(shape) / norm) - weight
    return result


def norms_of_dora(patch: AppliedPatch) -> Tensor | None:
    """What the magnitudes of PEFT's DoRA are divided by where its factors add nothing, flat and in float64.

    None where nobody kept it, or an accelerator would be waited for.
    """
    magnitude, norm, weight = (patch.tensors.get("dora_scale"), *map(patch.stored.get, ("norm", "weight")))
    if magnitude is None or any(
        part is not None and part.device.type != "cpu" for part in (magnitude, norm, weight)
    ):
        return None
    with torch.no_grad():
        if norm is None and weight is not None:
            norm = _norms_along(as_float64(weight), 0 if magnitude.numel() == weight.shape[0] else 1)
        return None if norm is None else as_float64(norm).flatten()


def keeps_norms(patch: AppliedPatch) -> bool | None:
    """Whether the magnitudes of PEFT's DoRA are these norms, but for rounding; None if that is not known."""
    norm = attempt(lambda: norms_of_dora(patch)).value
    if norm is None:
        return None
    magnitude = patch.tensors["dora_scale"].detach()
    own, within = as_float64(magnitude).flatten(), 4 * torch.finfo(magnitude.dtype).eps
    return own.shape == norm.shape and bool(((own - norm).abs() <= within * norm).all())


def _norms_along(weight: Tensor, axis: int) -> Tensor:
    others = [number for number in range(weight.ndim) if number != axis]
    norms: Tensor = torch.linalg.vector_norm(weight, dim=others, keepdim=True)
    return norms


def _direction(patch: AppliedPatch, weight: Tensor) -> Tensor:
    """The change at strength 1, before magnitudes; rotations have a strength of their own inside."""
    form = _FORMS.get(patch.adapter_type)
    if form is None:
        why = f": {'; '.join(patch.unavailable.values())}" if patch.unavailable else ""
        raise LoraFormatError(f"{patch.key}: a {patch.adapter_type} change cannot be computed{why}.")
    if patch.adapter_type in {"oft", "boft"} and is_by_peft(patch):
        raise LoraFormatError(f"{patch.key}: rotations in PEFT's form cannot be computed.")
    change = form(patch, weight)
    _require_size(patch, tuple(change.shape), weight)
    return change.reshape(weight.shape)


def _require_size(patch: AppliedPatch, shape: tuple[int, ...], weight: Tensor) -> None:
    """Before a change is formed, where its tensors tell its shape: small ones may declare terabytes.

    Raises:
        ModelMismatchError: The patch does not fit the weight.
    """
    if prod(shape) != weight.numel():
        raise ModelMismatchError(
            f"{patch.key}: a change of shape {shape} does not fit a weight {tuple(weight.shape)}."
        )


def _product(patch: AppliedPatch, weight: Tensor) -> Tensor:
    whole = replace(patch, offset=None, adapter_type="lora")
    _require_size(patch, own_shape(whole), weight)
    factors = factors_of(whole, own_shape(whole))
    return (factors.up @ factors.down).to(weight.device) * scale_of_patch(patch)


def _of_adapter(patch: AppliedPatch, weight: Tensor) -> Tensor:
    start, kind = _ADAPTERS[patch.adapter_type]
    parts = {start + name: _tensor(patch, name, weight) for name in patch.tensors if name != "dora_scale"}
    change = kind(parts, scale_of_patch(patch))
    _require_size(patch, change.weight_shape, weight)
    return change.delta(dtype=torch.float64)


def _diff(patch: AppliedPatch, weight: Tensor) -> Tensor:
    return DiffChange({"diff": _tensor(patch, "diff", weight)}, weight_shape=tuple(weight.shape)).delta(
        dtype=torch.float64
    )


def _glora(patch: AppliedPatch, weight: Tensor) -> Tensor:
    """W·A + B; see `sigmascope.lora.kinds.glora`."""
    factors = (_tensor(patch, name, weight) for name in ("a1", "a2", "b1", "b2"))
    return glora_product(weight, *factors).mul(scale_of_patch(patch))


def _oft(patch: AppliedPatch, weight: Tensor) -> Tensor:
    """ComfyUI applies the strength inside the rotation and multiplies by it again; it ignores a stored rescale."""
    rotations = cayley(_tensor(patch, "blocks", weight), patch.alpha or 0.0)
    return turned_rows(weight, rotations, strength_of(patch))


def _boft(patch: AppliedPatch, weight: Tensor) -> Tensor:
    rotations = cayley(_tensor(patch, "blocks", weight), patch.alpha or 0.0)
    changed = butterfly(weight, rotations, strength_of(patch))
    return (changed * _tensor(patch, "rescale", weight) if "rescale" in patch.tensors else changed) - weight


_FORMS: Final[Mapping[str, Callable[[AppliedPatch, Tensor], Tensor]]] = {
    "lora": _product,
    "dora": _product,
    "loha": _of_adapter,
    "lokr": _of_adapter,
    "glora": _glora,
    "oft": _oft,
    "boft": _boft,
    "diff": _diff,
}


def _tensor(patch: AppliedPatch, name: str, weight: Tensor) -> Tensor:
    if name not in patch.tensors:
        raise LoraFormatError(f"{patch.key}: a {patch.adapter_type} change lacks its {name}.")
    return as_float64(patch.tensors[name]).to(weight.device)


def is_product(patch: AppliedPatch) -> bool:
    """Whether a change is up · down and nothing else."""
    return patch.adapter_type == "lora" and patch.tensors.keys() >= _FACTORS


_FACTORS: Final = frozenset({"up", "down"})


def own_shape(patch: AppliedPatch) -> Shape:
    """The shape of a change according to its own tensors.

    Raises:
        LoraFormatError: Its parts do not fit together, or do not show a shape.
    """
    if patch.adapter_type == "diff" and "diff" in patch.tensors:
        return tuple(patch.tensors["diff"].shape)
    if patch.adapter_type in _ADAPTERS:
        start, kind = _ADAPTERS[patch.adapter_type]
        return kind.facts(
            {start + name: tuple(part.shape) for name, part in patch.tensors.items()}
        ).weight_shape
    if not is_product(patch):
        raise LoraFormatError(f"{patch.key}: a {patch.adapter_type} change does not show its shape.")
    down = patch.tensors["down"]
    kernel = patch.tensors["mid"].shape[2:] if "mid" in patch.tensors else down.shape[2:]
    return (patch.tensors["up"].shape[0], down.shape[1], *kernel)


def weight_shape_of(patches: Sequence[AppliedPatch], weight: Tensor | None) -> Shape | None:
    """The shape of a weight after its changes: its own, or what the changes say; None if neither is known.

    ComfyUI enlarges a weight by zeros for a change that says so. Packed codes have another shape than what they stand for.
    """
    own = [own_shape(patch) for patch in patches if patch.offset is None and _shows_shape(patch)]
    shapes = [patch.weight_shape for patch in patches if patch.weight_shape is not None]
    if weight is None and not shapes and not own:
        return None
    is_packed = weight is not None and bool(shapes) and not is_real(weight.dtype)
    given = (shapes or own)[0] if weight is None or is_packed else tuple(weight.shape)
    larger = [shape for shape in own if len(shape) == len(given) and prod(shape) > prod(given)]
    return tuple(map(max, given, *larger)) if larger else given


def _shows_shape(patch: AppliedPatch) -> bool:
    whole = patch.adapter_type == "diff" and "diff" in patch.tensors
    return whole or is_product(patch) or patch.adapter_type in _ADAPTERS


def fits(patch: AppliedPatch, shape: Shape) -> bool:
    """Whether a plain change has the shape of the weight's matrix, without reshaping."""
    own = own_shape(patch)
    return patch.offset is not None or (own[0], prod(own[1:])) == (shape[0], prod(shape[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class WeightedFactors:
    """weight · up · down, up (out, r) and down (r, in·kh·kw) of the whole weight that is changed."""

    up: Tensor
    down: Tensor
    weight: float


def factors_of(patch: AppliedPatch, shape: Shape) -> WeightedFactors:
    """Give a plain change as factors of the whole weight, in float64.

    Args:
        patch: One for which `is_product` holds.
        shape: Of the whole weight. A change of a part of it gets rows or columns of zeros.

    Raises:
        ModelMismatchError: The factors do not fit the weight.
        LoraFormatError: Strength or scale could not be read.
    """
    up, down = as_float64(patch.tensors["up"]).flatten(1), as_float64(patch.tensors["down"])
    if "mid" in patch.tensors:
        core = as_float64(patch.tensors["mid"]).to(down.device)
        down = torch.tensordot(core, down.flatten(1), dims=([1], [0])).movedim(-1, 1)
    up, down = placed(patch, up, down.to(up.device), shape)
    return WeightedFactors(up, down, strength_of(patch) * scale_of_patch(patch))


def placed(patch: AppliedPatch, up: Tensor, down: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Factors of the change of a part of a weight, with zeros for the rest.

    Raises:
        ModelMismatchError: They do not fit the weight, or the part.
    """
    if patch.offset is None:
        if (up.shape[0], down[0].numel()) != (shape[0], prod(shape[1:])):
            raise _shapes_error(patch, up, down, shape)
        return up, down.flatten(1)
    axis, start, length = patch.offset
    if axis == 0:
        if (up.shape[0], down[0].numel()) != (length, prod(shape[1:])) or start + length > shape[0]:
            raise _shapes_error(patch, up, down, shape)
        return _padded(up, 0, start, shape[0]), down.flatten(1)
    part = (*shape[1:axis], length, *shape[axis + 1 :])
    if (up.shape[0], down[0].numel()) != (shape[0], prod(part)) or start + length > shape[axis]:
        raise _shapes_error(patch, up, down, shape)
    return up, _padded(down.reshape(len(down), *part), axis, start, shape[axis]).flatten(1)


def _padded(tensor: Tensor, axis: int, start: int, size: int) -> Tensor:
    whole = tensor.new_zeros([size if number == axis else n for number, n in enumerate(tensor.shape)])
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole


def _shapes_error(patch: AppliedPatch, up: Tensor, down: Tensor, shape: Shape) -> ModelMismatchError:
    part = "" if patch.offset is None else f" at {patch.offset}"
    return ModelMismatchError(
        f"{patch.key}: up {tuple(up.shape)} and down {tuple(down.shape)} do not fit a weight {shape}{part}."
    )


def norm_of_sum(parts: Sequence[WeightedFactors]) -> float:
    """‖Σ wᵢ·upᵢ·downᵢ‖ from Gram matrices, at least one part.

    ‖ΔW‖² = tr((upᵀup)(down·downᵀ)) of all factors side by side, R×R matrices for R the sum of the ranks. Where
    the parts cancel, the squares do not tell what is left, and the norm is that of the R×R middle of two QR
    decompositions.
    """
    whole = concatenated(parts)
    norm = whole.frobenius_norm()
    if len(parts) == 1:
        return norm
    lengths = sqrt(sum(abs(part.weight) ** 2 * _unweighted(part).frobenius_norm() ** 2 for part in parts))
    if norm > CANCELLATION_SHARE * lengths:
        return norm
    _, core, _ = whole.orthogonal_form()
    left = float(torch.linalg.vector_norm(core))
    return 0.0 if left <= _ROUNDING_SHARE * lengths else left  # NaN stays NaN


def concatenated(parts: Sequence[WeightedFactors]) -> LoraFactors:
    """Σ wᵢ·upᵢ·downᵢ as one pair, in float64."""
    device = parts[0].up.device
    up = torch.cat([part.up.to(device) * part.weight for part in parts], dim=1)
    down = torch.cat([part.down.to(device) for part in parts])
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _unweighted(part: WeightedFactors) -> LoraFactors:
    return LoraFactors(part.up, part.down, float(part.up.shape[1]), (part.up.shape[0], part.down.shape[1]))


def as_factors(patches: Sequence[AppliedPatch], shape: Shape) -> LoraFactors:
    """Σ of the changes as up · down, in float64.

    Args:
        patches: Changes of one weight that act, at least one.
        shape: Of the weight.

    Raises:
        LoraFormatError: A change has no small factors (a difference, DoRA), or their combined rank is too large.
        ModelMismatchError: One does not fit the weight.
    """
    rank = rank_together(patches)
    if rank > _MAX_COMPARED_RANK:
        raise LoraFormatError(f"the changes have a combined rank of {rank}, which is too large to compare.")
    return concatenated([_weighted_factors(patch, shape) for patch in patches])


def _weighted_factors(patch: AppliedPatch, shape: Shape) -> WeightedFactors:
    if kept_of_weight(patch) != 1.0:
        raise LoraFormatError("the weight itself is scaled, which is not a low-rank change.")
    if is_product(patch):
        return factors_of(patch, shape)
    form = {"loha": _loha_factors, "lokr": _lokr_factors}.get(patch.adapter_type)
    if form is None or "dora_scale" in patch.tensors:
        kind = patch.adapter_type if form is None else f"{patch.adapter_type} with magnitudes"
        raise LoraFormatError(f"a {kind} change has no factors whose spaces could be compared.")
    up, down = form({name: as_float64(tensor) for name, tensor in patch.tensors.items()})
    up, down = placed(patch, up, down, shape)
    return WeightedFactors(up, down, strength_of(patch) * scale_of_patch(patch))


def _loha_factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A₁B₁) ⊙ (A₂B₂) = (A₁ ∗ A₂)(B₁ ∗ B₂) for the row-wise and column-wise Kronecker products."""
    if "t1" in parts:
        raise LoraFormatError("a loha change with cores has no factors whose spaces could be compared.")
    first, second = parts["w1_a"], parts["w2_a"]
    up = (first[:, :, None] * second[:, None, :]).flatten(1)
    down = (parts["w1_b"][:, None, :] * parts["w2_b"][None, :, :]).flatten(0, 1)
    return up, down


def _lokr_factors(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A₁B₁) ⊗ (A₂B₂) = (A₁ ⊗ A₂)(B₁ ⊗ B₂)."""
    if "t2" in parts or ("w2" in parts and parts["w2"].ndim > 2):
        raise LoraFormatError("a lokr change of a kernel has no factors whose spaces could be compared.")
    kronecker = [_side_factors(parts, "w1"), _side_factors(parts, "w2")]
    (one_up, one_down), (two_up, two_down) = kronecker
    return torch.kron(one_up, two_up), torch.kron(one_down, two_down)


def _side_factors(parts: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """A side as two factors; a whole matrix as itself and the identity on its smaller side."""
    if name not in parts:
        return parts[f"{name}_a"], parts[f"{name}_b"]
    whole = parts[name]
    identity = torch.eye(min(whole.shape), dtype=whole.dtype, device=whole.device)
    return (identity, whole) if whole.shape[0] <= whole.shape[1] else (whole, identity)


def rank_together(patches: Sequence[AppliedPatch]) -> int:
    """The combined rank of the changes of one weight as one pair of factors; changes without factors count 0."""
    return sum(
        _inner_dimension({name: tuple(part.shape) for name, part in patch.tensors.items()})
        for patch in patches
    )


def _inner_dimension(shapes: Mapping[str, Shape]) -> int:
    if "down" in shapes:
        return sum(shapes["down"][:1])
    if {"w1_b", "w2_b"} <= shapes.keys() and not {"w1", "w2"} & shapes.keys():
        return sum(shapes["w1_b"][:1]) * sum(shapes["w2_b"][:1])
    kronecker_shapes = [
        shapes[name] if name in shapes else shapes.get(f"{name}_b", (0,))[:1] for name in ("w1", "w2")
    ]
    return min(kronecker_shapes[0], default=0) * min(kronecker_shapes[1], default=0)
