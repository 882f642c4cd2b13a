"""Norms and elements of many weights and many low-rank changes at once: few operations, and few reads of each device.

Within `norms_at_once` the effects of single weights (`sigmascope.lora.effect`) find here what would take a dozen small
operations each, and on an accelerator a read each that waits. Changes of weights of one shape are stacked: with
U = [up₁ up₂ …] and D = [down₁; down₂; …] of a weight, all <ΔWᵢ, ΔWⱼ> are sums over blocks of (UᵀU) ∘ (DDᵀ).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from math import sqrt
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.lora.linalg import as_float64, blocked_norms, is_real, read_numbers
from sigmascope.lora.patches import CANCELLATION_SHARE, is_product, scale_of_patch, strength_of
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import copy_to_device
from sigmascope.probes.fingerprints import SAMPLE_SIZE, positions
from sigmascope.probes.reading import attempt
from sigmascope.probes.tensors import why_unreadable

_MOST_BYTES: Final = 1 << 26
"""Of factors that are stacked in float64 at once."""
_Factors = tuple[Tensor, Tensor]


Merged = Iterable[tuple[Tensor, Sequence[AppliedPatch]]]


class _PlainFactors:
    """`_plain_factors` of each change, looked for once; those that are known of a block around are."""

    def __init__(self, outer: "_PlainFactors | None" = None) -> None:
        self._known: dict[tuple[int, object, object], _Factors | None] = {**outer._known} if outer else {}

    def __call__(self, patch: AppliedPatch) -> _Factors | None:
        key = id(patch.tensors), patch.adapter_type, patch.offset
        if key not in self._known:
            self._known[key] = _plain_factors(patch)
        return self._known[key]


class _Known(NamedTuple):
    """What was calculated, of changes without their strengths, by the ids of their tensors and of weights.

    Attributes:
        products: <ΔWᵢ, ΔWⱼ>.
        weights: ‖W‖.
        inner: <W, ΔWᵢ>.
        elements: Those of ΔWᵢ that samples take, on the CPU.
        factors: Of each change, if it is up · down and nothing else.
    """

    products: Mapping[tuple[int, int], float]
    weights: Mapping[int, float]
    inner: Mapping[tuple[int, int], float]
    elements: Mapping[int, Tensor]
    factors: _PlainFactors


_NOTHING: Final = _Known({}, {}, {}, {}, _PlainFactors())
_KNOWN: ContextVar[_Known] = ContextVar("sigmascope_norms_at_once", default=_NOTHING)


@contextmanager
def norms_at_once(
    changes: Iterable[Sequence[AppliedPatch]], weights: Iterable[Tensor] = (), merged: Merged = ()
) -> Iterator[None]:
    """Let the effects of these changes and weights be found calculated within the block, as those of a block around it are.

    What cannot be calculated here is left to whoever asks, who says why.

    Args:
        changes: Of each weight those whose sum is asked for. They must live as long as the block.
        weights: Likewise.
        merged: Weights with what may be in them.
    """
    outer = _KNOWN.get()
    plain = _PlainFactors(outer.factors)
    inside = [(weight, _each_once(patches)) for weight, patches in merged]
    new = (patches for patches in changes if not _are_known(patches, outer.products))
    products = {**outer.products, **(attempt(lambda: _products(new, plain)).value or {})}
    norms = {**outer.weights, **(attempt(lambda: _weight_norms(weights)).value or {})}
    inner = attempt(lambda: _inner_products(inside, plain)).value or {}
    of_changes = (patch for _, patches in inside for patch in patches)
    elements = attempt(lambda: _elements(of_changes, plain)).value or {}
    token = _KNOWN.set(_Known(products, norms, inner, elements, plain))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def _are_known(patches: Sequence[AppliedPatch], products: Mapping[tuple[int, int], float]) -> bool:
    ids = [id(patch.tensors) for patch in patches]
    return all((one, other) in products for one in ids for other in ids)


def _each_once(patches: Iterable[AppliedPatch]) -> list[AppliedPatch]:
    """Without those that are the same but for their strength."""
    return [*{(id(patch.tensors), patch.offset): patch for patch in patches}.values()]


def known_inner_product(weight: Tensor, patch: AppliedPatch) -> float | None:
    """<W, s·ΔW>; None if it was not calculated."""
    found = _KNOWN.get().inner.get((id(weight), id(patch.tensors)))
    return None if found is None else found * strength_of(patch) * scale_of_patch(patch)


def known_elements(patch: AppliedPatch) -> Tensor | None:
    """The elements of s·ΔW that samples take; None if they were not calculated."""
    found = _KNOWN.get().elements.get(id(patch.tensors)) if patch.offset is None else None
    return None if found is None else found.mul(strength_of(patch) * scale_of_patch(patch))


def known_weight_norm(weight: Tensor) -> float | None:
    """‖W‖; None if it was not calculated."""
    return _KNOWN.get().weights.get(id(weight))


def known_norm_of_sum(patches: Sequence[AppliedPatch]) -> float | None:
    """‖Σ sᵢ·ΔWᵢ‖; None if it was not calculated, or if so little is left of the sum that squares do not tell it."""
    products = _KNOWN.get().products
    if any((id(patch.tensors), id(patch.tensors)) not in products for patch in patches):
        return None
    weights = [strength_of(patch) * scale_of_patch(patch) for patch in patches]
    ids = [id(patch.tensors) for patch in patches]
    if len(patches) == 1:
        return abs(weights[0]) * sqrt(max(products[ids[0], ids[0]], 0.0))
    pairs = [
        (one, other) for one in zip(ids, weights, strict=True) for other in zip(ids, weights, strict=True)
    ]
    if any((first, second) not in products for (first, _), (second, _) in pairs):
        return None
    total = sum(one * other * products[first, second] for (first, one), (second, other) in pairs)
    lengths = sqrt(sum(weight**2 * max(products[i, i], 0.0) for i, weight in zip(ids, weights, strict=True)))
    norm = sqrt(max(total, 0.0))
    return norm if norm > CANCELLATION_SHARE * lengths else None


def _products(
    changes: Iterable[Sequence[AppliedPatch]], plain_factors: _PlainFactors
) -> dict[tuple[int, int], float]:
    names: list[tuple[int, int]] = []
    sums: list[Tensor] = []
    with torch.no_grad():
        for some in _alike(changes, plain_factors):
            sums.append(_sums_of_blocks(some).flatten())
            names += [(one, other) for plain in some for one in plain for other in plain]
    return dict(zip(names, read_numbers(sums), strict=True))


def _alike(
    changes: Iterable[Sequence[AppliedPatch]], plain_factors: _PlainFactors
) -> Iterator[list[dict[int, _Factors]]]:
    """The factors of weights whose plain changes have the same shapes, dtypes and device, some at a time."""
    alike: dict[object, list[dict[int, _Factors]]] = {}
    for patches in changes:
        plain = {id(patch.tensors): factors for patch in patches if (factors := plain_factors(patch))}
        for device in dict.fromkeys(up.device for up, _ in plain.values()):
            own = {name: (up, down) for name, (up, down) in plain.items() if up.device == device}
            alike.setdefault(tuple((*map(_form, factors),) for factors in own.values()), []).append(own)
    for members in alike.values():
        first = members[0].values()
        rank = sum(up.shape[1] for up, _ in first)
        numbers = sum(up.numel() + down.numel() for up, down in first) + 2 * rank * max(rank, SAMPLE_SIZE)
        step = max(1, _MOST_BYTES // (8 * numbers))
        for start in range(0, len(members), step):
            yield members[start : start + step]


def _plain_factors(patch: AppliedPatch) -> _Factors | None:
    """Up (out, r) and down (r, in) of a change that is nothing else and has the shape of its weight."""
    if not is_product(patch) or len(patch.tensors) != 2 or patch.offset is not None:
        return None
    up, down = patch.tensors["up"], patch.tensors["down"]
    if why_unreadable(up) or why_unreadable(down) or up.ndim < 2 or down.ndim < 2:
        return None
    up, down = up.detach().flatten(1), down.detach().flatten(1)
    is_pair = (
        up.shape[1] == down.shape[0]
        and up.device == down.device
        and is_real(up.dtype)
        and is_real(down.dtype)
    )
    return (up, down) if is_pair else None


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _sums_of_blocks(members: Sequence[Mapping[int, _Factors]]) -> Tensor:
    """(weights, n, n): the inner products of the n changes of each weight."""
    of_each = list(zip(*(plain.values() for plain in members), strict=True))
    ups = torch.cat([as_float64(torch.stack([up for up, _ in same])) for same in of_each], dim=2)
    downs = torch.cat([as_float64(torch.stack([down for _, down in same])) for same in of_each], dim=1)
    products = (ups.mT @ ups) * (downs @ downs.mT)
    ranks = [same[0][0].shape[1] for same in of_each]
    ends = [*accumulate(ranks)]
    blocks = [slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True)]
    sums = [products[:, one, other].sum((1, 2)) for one in blocks for other in blocks]
    return torch.stack(sums, dim=1)


def _weight_norms(weights: Iterable[Tensor]) -> dict[int, float]:
    known = {id(weight): weight for weight in weights if is_real(weight.dtype) and not why_unreadable(weight)}
    return dict(zip(known, blocked_norms([*known.values()]), strict=True))


def _inner_products(merged: Merged, plain_factors: _PlainFactors) -> dict[tuple[int, int], float]:
    """In float32, which is eight digits of each product; the sums in float64."""
    alike: dict[object, list[tuple[tuple[int, int], Tensor, Tensor, Tensor]]] = {}
    for weight, patches in merged:
        if not is_real(weight.dtype) or why_unreadable(weight):
            continue
        matrix = weight.detach().flatten(1)
        for patch in patches:
            factors = plain_factors(patch)
            if factors is None or (factors[0].shape[0], factors[1].shape[1]) != matrix.shape:
                continue
            member = (id(weight), id(patch.tensors)), matrix, *factors
            alike.setdefault((*map(_form, member[1:]),), []).append(member)
    names: list[tuple[int, int]] = []
    sums: list[Tensor] = []
    with torch.no_grad():
        for members in alike.values():
            numbers = sum(part.numel() for part in members[0][1:])
            step = max(1, _MOST_BYTES // (4 * numbers or 1))
            for start in range(0, len(members), step):
                own, *parts = zip(*members[start : start + step], strict=True)
                device = parts[0][0].device
                matrices, ups, downs = (torch.stack(part).to(device, torch.float32) for part in parts)
                sums.append(as_float64((ups.mT @ matrices) * downs).sum((1, 2)))
                names += own
    return dict(zip(names, read_numbers(sums), strict=True))


def _elements(patches: Iterable[AppliedPatch], plain_factors: _PlainFactors) -> dict[int, Tensor]:
    found: list[tuple[list[int], Tensor]] = []
    with torch.no_grad():
        for some in _alike(([patch] for patch in patches), plain_factors):
            ups, downs = (
                as_float64(torch.stack([factors[side] for plain in some for factors in plain.values()]))
                for side in (0, 1)
            )
            columns = downs.shape[2]
            where = positions(ups.shape[1] * columns)
            rows, places = (copy_to_device(part, ups.device) for part in (where // columns, where % columns))
            elements = (ups[:, rows] * downs[:, :, places].mT).sum(2)
            found.append(([name for plain in some for name in plain], elements))
        whole = _on_cpu([elements for _, elements in found])
    return {
        name: row
        for (names, _), rows in zip(found, whole, strict=True)
        for name, row in zip(names, rows, strict=True)
    }


def _on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, with one read of each device."""
    copies = list(tensors)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        own = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[index].flatten() for index in own]).cpu()
        for index, part in zip(
            own, torch.split(flat, [tensors[index].numel() for index in own]), strict=True
        ):
            copies[index] = part.view(tensors[index].shape)
    return copies
