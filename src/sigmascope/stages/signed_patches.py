"""The patches of two moments, after minus before: what is left of them, and how much that changes a weight.

A baseline keeps copies of the factors that are there (`keep_patches`), since a LoRA may be gone later. Equal contents
count as one, whatever they are called and however often they are loaded (`contents_of`): 1 → 0.25 leaves −0.75 of a
file, and a file at 1 that becomes the same file twice at 0.5 leaves nothing, exactly. What is left is a list of patches
again, with signed strengths, and has its norm from Gram matrices (`sigmascope.lora.effect`). Kinds that depend on the
weight, such as DoRA, are formed at both moments.

What was fused into a weight is looked for in a thousand elements of it (`explain_contents`). For a change
ΔW = Σ cᵢ·Δᵢ of known Δᵢ the cᵢ are found by least squares, however the fusing came about.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import fsum, isfinite, prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.lora.effect import Effect, delta_of, effect_of, finite, weight_norm
from sigmascope.lora.linalg import as_float64, frobenius_norm
from sigmascope.lora.norms_at_once import known_elements
from sigmascope.lora.patches import (
    factors_of,
    is_product,
    needs_weight,
    norms_of_dora,
    scale_of_patch,
    sort_patches,
    strength_of,
)
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import HostCopy, Pending, copy_to_host
from sigmascope.probes.fingerprints import (
    SAMPLE_SIZE,
    Fingerprint,
    Readings,
    begin_fingerprints,
    positions,
)
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt
from sigmascope.probes.tensors import is_at_hand, places_of
from sigmascope.replaced import replaced

MOST_KEPT_BYTES: Final = 512 << 20
_CANCELLED: Final = 1e-9
"""A sum of strengths below this share of them is rounding: hosts keep products of strength and alpha / rank."""
_BETTER: Final = 25.0
"""Times as much as chance, that another explanation of the elements must be better."""
_MOST_NUMBERS_AT_ONCE: Final = 1 << 22
"""Of elements that are compared at once."""
Content = tuple[str, object, frozenset[tuple[str, Fingerprint]]]
_Key = tuple[int, str, tuple[int, int, int] | None]
Contents = Mapping[_Key, Content]


@dataclass(frozen=True, slots=True, eq=False)
class KeptPatches:
    """The patches of a moment without the host's tensors.

    Attributes:
        patches: With copies on the CPU; those for which there was no room lack their tensors.
        contents: Of those without tensors, by `key_of`.
    """

    patches: tuple[AppliedPatch, ...] = ()
    contents: Contents = field(default_factory=dict)


NOTHING_KEPT: Final = Pending(KeptPatches)


def with_tensors_of(kept: KeptPatches, patches: Iterable[AppliedPatch]) -> KeptPatches:
    """The patches of a moment with the tensors of those that are there now, where these hold the same numbers.

    Most LoRAs are the same before and after, and what is asked of one is then asked once: its content, norm and elements.
    An accelerator is not asked: it would be waited for.
    """
    now = {_place_of(patch): patch for patch in patches}
    shared: list[AppliedPatch] = []
    for patch in kept.patches:
        same = now.get(_place_of(patch))
        is_same = same is not None and _are_equal(patch.tensors, same.tensors)
        shared.append(replaced(patch, tensors=same.tensors) if same is not None and is_same else patch)
    return KeptPatches(tuple(shared), kept.contents)


def _place_of(patch: AppliedPatch) -> tuple[object, ...]:
    return patch.key, patch.source, patch.adapter_type, patch.offset


def _are_equal(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    if not tensors or tensors.keys() != others.keys():
        return False
    try:
        return all(_is_equal(tensor, others[part]) for part, tensor in tensors.items())
    except PROBE_ERRORS:
        return False


def _is_equal(tensor: Tensor, other: Tensor) -> bool:
    if not (is_at_hand(tensor) and is_at_hand(other)) or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor, other)


def keep_patches(
    patches: Iterable[AppliedPatch], unmerged: Collection[str], most_bytes: int
) -> Pending[KeptPatches]:
    """Copy what can act later. Does not wait for an accelerator.

    Args:
        patches: As read; those that cannot be applied are left out.
        unmerged: Weights whose contents are known without what the host merged into them.
        most_bytes: Of all copies together; of further ones only fingerprints are taken.
    """
    copies: dict[object, HostCopy] = {}
    kept: list[AppliedPatch] = []
    left: list[tuple[_Key, AppliedPatch]] = []
    room = most_bytes
    acting = [patch for patch in patches if patch.state != "failed"]
    tensors = [tensor for patch in acting for tensor in patch.tensors.values()]
    found = iter(places_of(tensors))
    for patch in acting:
        places = dict(zip(patch.tensors, found, strict=False))  # as many of them as it has tensors
        if "weight" in patch.stored:
            norm = norms_of_dora(patch) if patch.strength == 0.0 else None
            patch = replaced(patch, stored={} if norm is None else {"norm": norm})
        if patch.state == "merged" and patch.key in unmerged:
            patch = replaced(patch, state="registered")
        new = {place: patch.tensors[part] for part, place in places.items() if place not in copies}
        size = sum(tensor.nbytes for tensor in new.values())
        made = attempt(partial(_copied, new)) if size <= room else None
        if made is None or made.value is None:
            why = made.reason if made else f"the baseline keeps {most_bytes >> 20} MiB of factors, not these"
            unavailable = {**patch.unavailable, "tensors": why or "they could not be copied"}
            kept.append(replaced(patch, tensors={}, unavailable=unavailable))
            left.append((key_of(kept[-1]), patch))
            continue
        room -= size
        copies |= made.value
        kept.append(replaced(patch, tensors={part: copies[place].tensor for part, place in places.items()}))
    prints = begin_fingerprints(_tensors_of(left))
    outlines = [_Outline(key, tuple(patch.tensors)) for key, patch in left]
    whole = tuple(kept)
    return Pending(lambda: KeptPatches(whole, _contents(outlines, prints.result())), copies.values())


def _copied(tensors: Mapping[object, Tensor]) -> dict[object, HostCopy]:
    with torch.no_grad():
        return {
            place: HostCopy(tensor.clone()) if tensor.is_cpu else copy_to_host(tensor)
            for place, tensor in tensors.items()
        }


class _Outline(NamedTuple):
    """What is remembered of a patch while its fingerprints are on their way."""

    key: _Key
    parts: tuple[str, ...]


def key_of(patch: AppliedPatch) -> _Key:
    """What a patch and its copies with other strengths share, as long as one of them lives."""
    return id(patch.tensors), patch.adapter_type, patch.offset


def contents_of(patches: Iterable[AppliedPatch]) -> dict[_Key, Content]:
    """What each change contains, whatever its name and strength; those that cannot be read are left out."""
    return attempt(begin_contents(patches).result).value or {}


def begin_contents(patches: Iterable[AppliedPatch]) -> Pending[dict[_Key, Content]]:
    """The same without waiting for an accelerator."""
    keyed = [(key_of(patch), patch) for patch in patches]
    outlines = [_Outline(key, tuple(patch.tensors)) for key, patch in keyed]
    return begin_fingerprints(_tensors_of(keyed)).then(partial(_contents, outlines))


def _tensors_of(patches: Iterable[tuple[_Key, AppliedPatch]]) -> dict[str, Tensor]:
    return {f"{key} {part}": held for key, patch in patches for part, held in patch.tensors.items()}


def _contents(outlines: Iterable[_Outline], prints: Readings) -> dict[_Key, Content]:
    contents: dict[_Key, Content] = {}
    for key, parts in outlines:
        found = {(part, prints[f"{key} {part}"].value) for part in parts}
        known = frozenset((part, print_) for part, print_ in found if print_ is not None)
        if known and len(known) == len(parts):
            contents[key] = (*key[1:], known)
    return contents


def content_of(patch: AppliedPatch, contents: Contents) -> Hashable:
    """What tells a patch from others: what it contains, or else which one it is."""
    return contents.get(key_of(patch)) or key_of(patch)


@dataclass(frozen=True, slots=True, eq=False)
class SignedPatches:
    """The patches of one weight at two moments. It may hold the host's tensors.

    Attributes:
        now: Those that act.
        before: Those that acted.
        net: Σ now − Σ before with signed strengths, equal contents as one; None if a kind depends on the weight.
        unread: Why what a patch in it does is not understood, where that could matter.
        same_by_name: Likewise of one that is taken to be the same as before by its name and strength.
    """

    now: tuple[AppliedPatch, ...] = ()
    before: tuple[AppliedPatch, ...] = ()
    net: tuple[AppliedPatch, ...] | None = ()
    unread: str | None = None
    same_by_name: str | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether the same acts as before."""
        return self.net == ()


_NOTHING: Final = SignedPatches()


def signed_patches(
    now: Sequence[AppliedPatch], before: Sequence[AppliedPatch], contents: Contents
) -> SignedPatches:
    """Take the patches of a weight before from those now.

    Args:
        now: In any state.
        before: Likewise.
        contents: See `contents_of`; not needed for one patch alone.
    """
    if not now and not before:
        return _NOTHING
    now, before = sort_patches(now).acting, sort_patches(before).acting
    unread = {id(patch): why for patch in (*now, *before) if (why := _why_unread(patch, contents))}
    same_by_name = None
    if unread:
        names = [{_name(patch) for patch in side if id(patch) in unread} for side in (now, before)]
        same = names[0] & names[1]
        same_by_name = next((unread[id(p)] for p in now if id(p) in unread and _name(p) in same), None)
        now, before = (
            tuple(patch for patch in side if id(patch) not in unread or _name(patch) not in same)
            for side in (now, before)
        )
    why = next((unread[id(patch)] for patch in (*now, *before) if id(patch) in unread), None)
    depends = any(map(needs_weight, (*now, *before)))
    if why is None and [_whole(patch, contents) for patch in now] == [_whole(p, contents) for p in before]:
        return SignedPatches(now, before, (), None, same_by_name)
    if why is None and not depends:
        return SignedPatches(now, before, _net(now, before, contents), None, same_by_name)
    return SignedPatches(now, before, None, why, same_by_name)


def _why_unread(patch: AppliedPatch, contents: Contents) -> str | None:
    numbers = patch.strength, patch.scale, patch.strength_model
    is_known = bool(patch.tensors) or key_of(patch) in contents
    if is_known and patch.adapter_type != "unknown" and None not in numbers:
        return None
    what, why = next(iter(patch.unavailable.items()), ("change", "cannot be read"))
    kind = {"unknown": "an unknown", "oft": "an OFT", "boft": "a BOFT"}.get(
        patch.adapter_type, f"a {patch.adapter_type}"
    )
    return f"the {what} of {kind} change of {patch.key}: {why}"


def _name(patch: AppliedPatch) -> tuple[Hashable, ...]:
    return patch.source, patch.adapter_type, patch.strength, patch.data_type


def _whole(patch: AppliedPatch, contents: Contents) -> tuple[Hashable, ...]:
    numbers = patch.strength, patch.strength_model, patch.scale
    return content_of(patch, contents), *map(str, numbers)  # NaN is NaN as before


def _net(
    now: Sequence[AppliedPatch], before: Sequence[AppliedPatch], contents: Contents
) -> tuple[AppliedPatch, ...]:
    patches: dict[Hashable, AppliedPatch] = {}
    weights: dict[Hashable, list[float]] = {}
    for sign, side in ((1.0, now), (-1.0, before)):
        for patch in side:
            content = content_of(patch, contents)
            if content not in patches or not patches[content].tensors:
                patches[content] = patch
            weights.setdefault(content, []).append(sign * strength_of(patch) * scale_of_patch(patch))
    left = {content: _sum(parts) for content, parts in weights.items() if not _is_cancelled(parts)}
    return tuple(at_weight(patches[content], weight) for content, weight in left.items())


def _is_cancelled(weights: Sequence[float]) -> bool:
    whole = _sum(weights)
    return isfinite(whole) and abs(whole) <= _CANCELLED * fsum(map(abs, weights))


def _sum(weights: Sequence[float]) -> float:
    """Precise; NaN where infinite ones are in it with both signs."""
    return fsum(weights) if all(map(isfinite, weights)) else sum(weights)


def at_weight(patch: AppliedPatch, weight: float) -> AppliedPatch:
    """A patch that acts with strength · alpha / rank equal to `weight`."""
    if patch.state == "lazy" and patch.strength == weight and patch.scale == 1.0:
        return patch
    return replaced(patch, state="lazy", strength=weight, scale=1.0)


def joined(*sums: Sequence[AppliedPatch], contents: Contents) -> tuple[AppliedPatch, ...]:
    """The sum of several `net`s as one."""
    whole = [patch for patches in sums for patch in patches]
    return _net(whole, (), contents)


def signed_effect(signed: SignedPatches, weight: Tensor | None) -> Effect:
    """How much the patches now change a weight more than those before. Nothing is raised.

    Args:
        signed: What acts on it.
        weight: As it is without them, the same at both moments.
    """
    if signed.unread is not None:
        return _unknown(signed.unread, weight)
    if signed.net is not None or not signed.before:
        return net_effect(signed.now if signed.net is None else signed.net, weight)
    if not signed.now:
        return net_effect(signed.before, weight)
    both = (*signed.now, *signed.before)
    bare = _without_factors(both)
    if bare is not None:
        return _unknown(bare, weight)
    delta = attempt(
        lambda: finite(frobenius_norm(delta_of(signed.now, weight) - delta_of(signed.before, weight)))
    )
    if delta.value is None:
        return _unknown(delta.reason or "it cannot be calculated", weight)
    whole = attempt(lambda: weight_norm(weight)).value
    why = {} if whole else dict.fromkeys(("relative_change", "weight_norm"), "the weight's norm is not known")
    return Effect(delta.value, delta.value / whole if whole else None, whole, unavailable=why)


def net_effect(net: Sequence[AppliedPatch], weight: Tensor | None) -> Effect:
    """`effect_of`, or why not, where factors were not kept."""
    bare = _without_factors(net)
    if bare is not None:
        return _unknown(bare, weight)
    in_order = [p if p.index == index else replaced(p, index=index) for index, p in enumerate(net)]
    return effect_of(in_order, weight)


def _without_factors(patches: Iterable[AppliedPatch]) -> str | None:
    reasons = (patch.unavailable.get("tensors", "they are gone") for patch in patches if not patch.tensors)
    return next(reasons, None)


def _unknown(reason: str, weight: Tensor | None) -> Effect:
    whole = attempt(lambda: weight_norm(weight)).value
    why = dict.fromkeys(("delta_norm", "relative_change"), reason)
    return Effect(None, None, whole, unavailable=why if whole is not None else {**why, "weight_norm": reason})


class SampledContent(NamedTuple):
    """A weight whose content is another, by its elements.

    Attributes:
        samples: The same elements of it before and now.
        expected: What the host says was merged in between.
        known: All patches of both moments, each content once; those that depend on the weight are left out.
        shape: Of the weight.
        rounding: ‖ΔW‖/‖W‖ of rounding.
    """

    samples: tuple[Tensor, Tensor]
    expected: Sequence[AppliedPatch]
    known: Sequence[AppliedPatch]
    shape: tuple[int, ...]
    rounding: float


Explained = tuple[AppliedPatch, ...] | None


def explain_contents(weights: Mapping[str, SampledContent]) -> dict[str, Reading[Explained]]:
    """The patches that make the difference of two contents of each weight, with the strengths that they have in it.

    Returns:
        By name, `expected` where that explains the elements as well as anything; None if nothing does, and with a
        reason if that cannot be calculated.
    """
    found: dict[str, Reading[Explained]] = {}
    alike: dict[tuple[int, int], dict[str, _Elements]] = {}
    for name, weight in weights.items():
        elements = attempt(lambda one=weight: _elements(one))  # type: ignore[misc]
        if elements.value is None:
            found[name] = Reading(None, elements.reason)
        else:
            form = len(elements.value.before), len(elements.value.units)
            alike.setdefault(form, {})[name] = elements.value
    for (length, count), members in alike.items():
        names, step = [*members], max(1, _MOST_NUMBERS_AT_ONCE // (length * (2 * count + 5) or 1))
        for some in (names[start : start + step] for start in range(0, len(names), step)):
            explained = _explained([weights[name] for name in some], [members[name] for name in some])
            found.update((name, Reading(patches)) for name, patches in zip(some, explained, strict=True))
    return found


class _Elements(NamedTuple):
    """The elements of one weight, of what is expected in it, and of each patch at strength 1; in float64 on the CPU."""

    before: Tensor
    after: Tensor
    expected: Tensor
    units: list[AppliedPatch]
    of_units: list[Tensor]


def _elements(weight: SampledContent) -> _Elements:
    before, after = (as_float64(sample).cpu() for sample in weight.samples)
    units = [at_weight(patch, 1.0) for patch in weight.known if not needs_weight(patch) and patch.tensors]
    added = [elements_of(patch, weight.shape) for patch in weight.expected]
    expected = sum(added[1:], added[0]) if added else torch.zeros_like(before)
    return _Elements(before, after, expected, units, [elements_of(unit, weight.shape) for unit in units])


def _explained(weights: Sequence[SampledContent], elements: Sequence[_Elements]) -> list[Explained]:
    """Of weights that have as many elements and as many patches as each other."""
    before, after, expected = (
        torch.stack(same)
        for same in zip(*((one.before, one.after, one.expected) for one in elements), strict=True)
    )
    seen = after - before
    sizes = torch.maximum(torch.linalg.vector_norm(before, dim=1), torch.linalg.vector_norm(after, dim=1))
    allowed = [weight.rounding * size for weight, size in zip(weights, sizes.tolist(), strict=True)]
    rests = torch.linalg.vector_norm(seen - expected, dim=1).tolist()
    length, count = seen.shape[1], len(elements[0].units)
    if not 0 < count < length:
        return [
            tuple(weight.expected) if rest <= most else None
            for weight, rest, most in zip(weights, rests, allowed, strict=True)
        ]
    basis = torch.stack([torch.stack(one.of_units, dim=1) for one in elements])
    lengths = torch.linalg.vector_norm(basis, dim=1)
    scaled = basis / torch.where(lengths > 0, lengths, 1.0).unsqueeze(1)
    is_finite = (seen + expected).sum(1).isfinite() & lengths.sum(1).isfinite()
    seen, scaled = (
        torch.where(is_finite.view(-1, *[1] * (part.ndim - 1)), part, 0.0) for part in (seen, scaled)
    )
    if count == 1:
        fitted: Tensor = scaled.mT @ seen.unsqueeze(2)
    else:
        fitted = torch.linalg.lstsq(scaled, seen.unsqueeze(2), driver="gelsd").solution
    rests_of_fit = torch.linalg.vector_norm(seen - (scaled @ fitted).squeeze(2), dim=1).tolist()
    strengths = zip(fitted.squeeze(2).tolist(), lengths.tolist(), strict=True)
    explained: list[Explained] = []
    told = zip(weights, elements, rests, rests_of_fit, allowed, strengths, is_finite.tolist(), strict=True)
    for weight, one, rest, rest_of_fit, most, (values, sizes_of_units), finite_too in told:
        by_chance = rest_of_fit**2 * (1.0 + _BETTER * count / (length - count))
        if rest <= most and rest**2 <= by_chance + (_CANCELLED * most) ** 2:
            explained.append(tuple(weight.expected))
        elif not (finite_too and rest_of_fit <= most):
            explained.append(None)
        else:
            fits = zip(one.units, values, sizes_of_units, strict=True)
            explained.append(
                tuple(at_weight(unit, value / size) for unit, value, size in fits if size > 0 and value)
            )
    return explained


def elements_of(patch: AppliedPatch, shape: tuple[int, ...]) -> Tensor:
    """What a patch adds to the elements of a weight that `samples` takes, in float64.

    Raises:
        SigmascopeError: It cannot be calculated.
    """
    rows, columns = shape[0], prod(shape[1:])
    known = known_elements(patch)
    if known is not None and len(known) == min(SAMPLE_SIZE, rows * columns):
        return known
    where = positions(rows * columns)
    if not is_product(patch):
        return delta_of([patch], None).flatten()[where.to(next(iter(patch.tensors.values())).device)].cpu()
    factors = factors_of(patch, shape)
    up, down = factors.up.cpu(), factors.down.cpu()
    found: Tensor = (up[where // columns] * down[:, where % columns].mT).sum(1) * factors.weight
    return found
