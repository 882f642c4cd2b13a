"""The weights that layers really use, beside what the changes on a model say: the strongest layers, at most eight.

What a host keeps of patches and adapters may be right while something else wrote into a weight, or a function around it
does something else. So the host's own functions give the weight that a layer computes with now
(`sigmascope.probes.used_weight`), and it is compared with the weight before and the predicted change:

    change = used − base − before        predicted = now − before

`base` is what is stored, without what ComfyUI merged; `before` and `now` are the sums of the changes on it at both moments.
Where the stored weight is another than at the baseline (fused), a thousand elements of the old one are compared.

All is summed up where the weight is, and five numbers a layer come to the host in one copy of each device, which nobody
waits for until `Pending.result`. Where a weight contradicts, the verdict follows the weight (`follow_weights`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod, sqrt
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from sigmascope.lora.effect import Effect, delta_of
from sigmascope.lora.patches import factors_of, fits, is_product, needs_weight, sort_patches
from sigmascope.probes.accelerators import has_float64
from sigmascope.probes.applied_patch import AppliedPatch
from sigmascope.probes.copies import HostCopy, Pending, copy_to_device, copy_to_host
from sigmascope.probes.fingerprints import SAMPLE_SIZE, positions
from sigmascope.probes.peft import NO_VALUES
from sigmascope.probes.reading import Reading, attempt
from sigmascope.probes.used_weight import UsedWeight, UsedWeights, is_quantised
from sigmascope.stages.model_snapshot import parts_of
from sigmascope.stages.schema import ValueChange, WeightCheck, as_dict
from sigmascope.stages.weight_changes import (
    BeforeAndAfter,
    Verdicts,
    beside_content,
    by_key,
    changes_of_content,
    in_content,
)
from sigmascope.stages.weight_verdict import WeightVerdict, rounding, with_norm

MOST_LAYERS: Final = 8
MOST_BYTES: Final = 64 << 20
_CHUNK: Final = 1 << 20
_WITHIN: Final = 0.02
"""How far the change that is found may be from the predicted one, as a fraction."""
_HALF_PRECISION: Final = 0.005
"""What hosts lose of a change when they form it in bfloat16."""
_ROUNDING_OF_CODES: Final = 0.25
"""‖ΔW‖/‖W‖ of storing a weight in 8 or 4 bits again."""
_LEAST_SHARE: Final = 0.5
"""Of a change below the rounding, so much must have arrived."""
_PART_OF_IT: Final = "of the weight in use a thousand elements were looked at, and only their sum was kept"
_NOT_PREDICTED: Final = "what the change does is not known without the weight"
_NAMES: Final = ("change", "predicted", "difference", "weight", "now")

Checks = Mapping[str, WeightCheck]


class _Coarse(NamedTuple):
    """What the sum of weight and change is rounded to, and ‖ΔW‖/‖W‖ of that."""

    dtype: str
    rounding: float

    @classmethod
    def of(cls, stored: Tensor, used: Tensor, is_merged: bool) -> "_Coarse":
        """How a weight is stored counts only where something was merged into it."""
        if is_merged and is_quantised(stored):
            return cls("its codes", _ROUNDING_OF_CODES)
        dtype = (stored if is_merged else used).dtype
        return cls(str(dtype).removeprefix("torch."), rounding(dtype))


class _Compared(NamedTuple):
    """A layer while its numbers are on their way: how many elements of how many are compared, and with what, if anything."""

    stored: _Coarse
    elements: int
    of: int
    is_predicted: bool = True


def begin_checks(looks: BeforeAndAfter, verdicts: Verdicts) -> Pending[Checks]:
    """Compare the strongest layers with the weights that they use. Never raises, and waits for nothing.

    Args:
        looks: Both moments of a model.
        verdicts: What the changes on it say.
    """
    with torch.no_grad():
        begun = attempt(lambda: dict(_begin(looks, verdicts))).value or {}
        return attempt(lambda: _gathered(begun)).value or Pending(dict)


_Begun = Mapping[str, Reading[tuple[_Compared, Tensor]]]


def _gathered(begun: _Begun) -> Pending[Checks]:
    """All numbers of each device as one copy."""
    unavailable = {key: one.reason or "unknown" for key, one in begun.items() if one.value is None}
    found = {key: one.value for key, one in begun.items() if one.value is not None}
    by_device: dict[torch.device, list[str]] = {}
    for key, (_, numbers) in found.items():
        by_device.setdefault(numbers.device, []).append(key)
    copies = [
        (keys, copy_to_host(torch.stack([found[key][1] for key in keys]))) for keys in by_device.values()
    ]
    order, facts = [*begun], {key: compared for key, (compared, _) in found.items()}
    return Pending(lambda: _told(order, facts, unavailable, copies), [copy for _, copy in copies])


def _begin(
    looks: BeforeAndAfter, verdicts: Verdicts
) -> Iterator[tuple[str, Reading[tuple[_Compared, Tensor]]]]:
    parts = parts_of(looks.model, looks.after.model_type)
    weights = {prefix: UsedWeights(part) for prefix, part in parts.items()}
    now, before = by_key(looks.applied.patches), by_key(looks.kept.value.patches if looks.kept.value else ())
    is_changed = changes_of_content(looks.before, looks.after)
    for key in _strongest(looks, verdicts, {**before, **now}):
        prefix = max((start for start in weights if key.startswith(start)), key=len)
        layer = _Layer(
            looks,
            verdicts.get(key),
            key,
            weights[prefix],
            key.removeprefix(prefix),
            now.get(key, ()),
            before.get(key, ()),
            is_changed,
        )
        found = attempt(layer.compared)
        yield key, found.value or Reading(None, found.reason)


def _strongest(looks: BeforeAndAfter, verdicts: Verdicts, changed: Collection[str]) -> Iterator[str]:
    """The weights with the strongest predicted changes that fit the limits; those without an effect, then vectors."""
    held = looks.held.base
    norms = {key: verdict.effect.delta_norm or 0.0 for key, verdict in verdicts.items() if key in changed}
    falling = (*sorted(norms, key=lambda key: -norms[key]), *(key for key in changed if key not in norms))
    left, bytes_left = MOST_LAYERS, MOST_BYTES
    for are_vectors in (False, True):
        for key in falling:
            if not left:
                return
            if key not in held or (held[key].ndim < 2) is not are_vectors:
                continue
            nbytes = prod(held[key].shape) * max(2, held[key].dtype.itemsize)
            if nbytes <= bytes_left:
                left, bytes_left = left - 1, bytes_left - nbytes
                yield key


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One weight and the changes on it at both moments."""

    looks: BeforeAndAfter
    verdict: WeightVerdict | None
    key: str
    weights: UsedWeights
    own_key: str
    now: Sequence[AppliedPatch]
    before: Sequence[AppliedPatch]
    is_changed: Callable[[str], bool | None]

    def compared(self) -> Reading[tuple[_Compared, Tensor]]:
        """The numbers of the comparison, where the weight is."""
        detour = self.looks.detour_of(self.key)
        if detour is not None:
            return Reading(None, detour)
        kept = self.looks.held.kept.get(self.key)
        acting = sort_patches(self.now).acting
        unused = (
            p
            for p in self.now
            if p.cause == "bypassed"
            or p.state_reason == NO_VALUES
            or (p in acting and p.state == "registered")
        )
        waiting = next(unused, None)
        if waiting is not None:
            return Reading(None, waiting.state_reason)
        if kept is not None and not kept.is_own:
            return Reading(None, "the model holds the changes of another patcher")
        found = self.weights.of(self.own_key)
        if found.value is None:
            return Reading(None, found.reason)
        weight = found.value
        if any(patch.state == "lazy" for patch in acting) and not weight.is_changed:
            return Reading(None, "how the host applies its changes in a forward pass is not known")
        original = (
            Reading(weight.stored) if kept is None else self.weights.original(self.own_key, kept.weight)
        )
        if original.value is None:
            return Reading(None, original.reason)
        return self._numbers(weight, original.value, kept is not None)

    def _numbers(
        self, weight: UsedWeight, original: Tensor, unmerged: bool
    ) -> Reading[tuple[_Compared, Tensor]]:
        samples, changed = self.looks.before.samples, self.is_changed(self.key)
        if changed is None and not unmerged and in_content((*self.now, *self.before)):
            return Reading(None, "a change was merged into a weight that was not looked at before")
        inside = self.verdict.inside if changed and self.verdict is not None else ()
        if inside is None:
            return Reading(
                None, "no change explains what became of what is stored: something else wrote into it"
            )
        beside = [side if unmerged else beside_content(side) for side in (self.now, self.before)]
        acting, acted = (sort_patches(patches).acting for patches in beside)
        unread = [patch for patch in (*acting, *acted) if not patch.tensors]
        is_predicted = not unread
        if unread and (set(map(id, unread)) & set(map(id, acted)) or changed or unmerged):
            return Reading(None, next(iter(unread[0].unavailable.values()), "a change of it is not read"))
        if unread:  # only the weight tells what they do
            acting, inside = (), ()
        used = weight.used.detach()
        shape, device = tuple(used.shape), used.device
        coarse = _Coarse.of(self.looks.held.base[self.key], used, bool(unmerged or inside))
        whole = None if changed else copy_to_device(original, device)
        sums = [_Sum(patches, shape, device, whole) for patches in ((*inside, *acting), acted)]
        if whole is not None:
            compared = _Compared(coarse, used.numel(), used.numel(), is_predicted)
            return Reading((compared, _of_whole(used, whole, *sums)))
        if not samples.dtype(self.key).is_floating_point:
            return Reading(None, "the weight before is gone, and its samples are codes")
        numbers = _of_elements(used, samples[self.key], *sums)
        return Reading((_Compared(coarse, len(samples[self.key]), used.numel()), numbers))


class _Sum:
    """Σ of changes of one weight, as a matrix of which rows or elements are formed.

    Args:
        patches: That act, with their strengths.
        shape: Of the weight.
        device: Where to form it.
        base: The weight, for changes that depend on it.
    """

    def __init__(
        self,
        patches: Sequence[AppliedPatch],
        shape: tuple[int, ...],
        device: torch.device,
        base: Tensor | None,
    ) -> None:
        self._columns = prod(shape[1:])
        self._device = device
        self._dense: Tensor | None = None
        self._factors: list[tuple[Tensor, Tensor]] = []
        if all(is_product(p) and p.strength_model == 1.0 and fits(p, shape) for p in patches):
            for patch in patches:
                factors = factors_of(patch, shape)
                up, down = (copy_to_device(f.to(torch.float32), device) for f in (factors.up, factors.down))
                self._factors.append((up * factors.weight, down))
            return
        if base is None and any(map(needs_weight, patches)):
            raise LookupError("the weight before is gone, and a change depends on it")
        formed = delta_of(patches, base).to(torch.float32)
        if tuple(formed.shape) != shape:
            raise LookupError("a change enlarges the weight")
        self._dense = copy_to_device(formed.flatten(1) if formed.ndim > 1 else formed.unsqueeze(1), device)

    def rows(self, some: slice) -> Tensor | float:
        """Some of its rows."""
        if self._dense is not None:
            return self._dense[some]
        return sum((up[some] @ down for up, down in self._factors), 0.0)

    def elements(self, where: Tensor) -> Tensor | float:
        """Its elements at flat places, which lie on the device."""
        if self._dense is not None:
            return self._dense.reshape(-1)[where]
        rows, columns = where // self._columns, where % self._columns
        return sum(((up[rows] * down[:, columns].mT).sum(1) for up, down in self._factors), 0.0)


def _of_whole(used: Tensor, base: Tensor, now: _Sum, before: _Sum) -> Tensor:
    used, base = (w.flatten(1) if w.ndim > 1 else w.reshape(-1, 1) for w in (used, base))
    step = max(1, _CHUNK // used.shape[1])
    chunks = [slice(start, start + step) for start in range(0, len(used), step)]
    return torch.stack(
        [_energies(used[some], base[some], now.rows(some), before.rows(some)) for some in chunks]
    ).sum(0)


def _of_elements(used: Tensor, sample: Tensor, now: _Sum, before: _Sum) -> Tensor:
    where, base = (
        copy_to_device(part, used.device) for part in (positions(used.numel(), SAMPLE_SIZE), sample)
    )
    return _energies(used.reshape(-1)[where], base, now.elements(where), before.elements(where))


def _energies(used: Tensor, base: Tensor, now: Tensor | float, before: Tensor | float) -> Tensor:
    """(5,): the squares of `_NAMES`, summed in float64 where the device has it."""
    base = base.to(torch.float32)
    change = used.to(torch.float32) - base
    nothing = torch.zeros_like(base)
    parts = (change - before, nothing + now - before, change - now, base, nothing + now)
    wide = torch.float64 if has_float64(base.device) else torch.float32
    return torch.stack([part.square().sum(dtype=wide) for part in parts])


def _told(
    order: Sequence[str],
    facts: Mapping[str, _Compared],
    unavailable: Mapping[str, str],
    copies: Sequence[tuple[list[str], HostCopy]],
) -> Checks:
    numbers = {key: row for keys, copy in copies for key, row in zip(keys, copy.tensor.tolist(), strict=True)}
    return {
        key: _check(facts[key], numbers[key])
        if key in facts
        else as_dict(WeightCheck, why=unavailable[key], result="unavailable")
        for key in order
    }


def _check(compared: _Compared, squares: Sequence[float]) -> WeightCheck:
    share = compared.of / compared.elements
    norms = {
        name: sqrt(square * share) if square >= 0 else square
        for name, square in zip(_NAMES, squares, strict=True)
    }
    result, why = _result(compared.stored, norms, compared.is_predicted)
    is_compared = why is None and compared.is_predicted
    weight = norms["weight"] if isfinite(norms["weight"]) else None
    return as_dict(
        WeightCheck,
        why=why or _NOT_PREDICTED,
        result=result,
        predicted_norm=norms["predicted"] if is_compared else None,
        used_norm=norms["change"] if why is None else None,
        difference_norm=norms["difference"] if is_compared else None,
        weight_norm=weight,
        rounding_norm=None if weight is None else compared.stored.rounding * weight,
        spread=Reading(0.0) if compared.elements == compared.of else Reading(None, why or _PART_OF_IT),
        elements=compared.elements,
    )


def _result(stored: _Coarse, norms: Mapping[str, float], is_predicted: bool) -> tuple[str, str | None]:
    change, predicted, difference, weight, now = (norms[name] for name in _NAMES)
    if not all(map(isfinite, norms.values())):
        return "unavailable", "it holds NaN or Inf"
    if not is_predicted:
        return "measured", None
    rounded = stored.rounding * weight
    allowed = _WITHIN * max(predicted, change) + _HALF_PRECISION * now + rounded
    if difference > allowed:
        return "contradicted", None
    if predicted == 0.0 or predicted > 2 * rounded:
        return "confirmed", None
    arrived = (change**2 + predicted**2 - difference**2) / (2 * predicted**2)
    if arrived >= _LEAST_SHARE:
        return "confirmed", None
    return "unavailable", f"rounding to {stored.dtype} is larger than the change"


def follow_weights(verdicts: Verdicts, checks: Checks) -> dict[str, WeightVerdict]:
    """The verdicts, by what the layers use where that contradicts them.

    Where the strongest layers use nothing of what they should, nothing is known of the others.
    """
    followed = dict(verdicts)
    for key, check in checks.items():
        verdict = followed.get(key)
        is_told = verdict is not None and verdict.effect.delta_norm is not None
        is_against = check["result"] == "contradicted" and not _is_measured(verdict)
        is_answer = check["result"] in ("confirmed", "measured")
        if is_against or (is_answer and verdict is not None and not is_told):
            followed[key] = _by_use(verdict, check)
        elif verdict is not None and verdict.effect.weight_norm is None and check["weight_norm"]:
            followed[key] = _with_effect(verdict, with_norm(verdict.effect, check["weight_norm"]))
    silent = [key for key, check in checks.items() if check["result"] == "contradicted" and not _acts(check)]
    if silent and not any(_acts(check) for check in checks.values()):
        why = f"{len(silent)} of the strongest weights are used without the changes on them, such as {silent[0]}"
        for key, verdict in verdicts.items():
            if key not in silent and verdict.is_effective:
                followed[key] = replace(verdict, is_effective=None, unread=why)
    return followed


def _is_measured(verdict: WeightVerdict | None) -> bool:
    """Whether it is from both contents, and so from the weights already."""
    return verdict is not None and verdict.change["measured_from"] == "contents"


def _acts(check: WeightCheck) -> bool:
    used, predicted = check["used_norm"] or 0.0, check["predicted_norm"] or 0.0
    return used > (_WITHIN * predicted if check["result"] == "confirmed" else check["rounding_norm"] or 0.0)


def _by_use(verdict: WeightVerdict | None, check: WeightCheck) -> WeightVerdict:
    """The verdict by the weight in use alone."""
    effect = with_norm(Effect(check["used_norm"], None, None, False), check["weight_norm"])
    change = as_dict(
        ValueChange,
        {} if verdict is None else verdict.change,
        content_changed=None if verdict is None else verdict.change["content_changed"],
        measured_from="used",
        spread=Reading(check["spread"], check["unavailable"].get("spread")),
        predicted_delta_norm=check["predicted_norm"],
        predicted=False,
    )
    known = verdict or WeightVerdict(change, effect, None, False, False, None, None)
    return _with_effect(replace(known, change=change, is_effective=_acts(check), unread=None), effect)


def _with_effect(verdict: WeightVerdict, effect: Effect) -> WeightVerdict:
    figures = {name: getattr(effect, name) for name in ("delta_norm", "relative_change", "weight_norm")}
    others = {name: why for name, why in verdict.change["unavailable"].items() if name not in figures}
    unavailable = {**others, **effect.unavailable}
    change = cast(ValueChange, {**verdict.change, **figures, "unavailable": unavailable})
    return replace(verdict, effect=effect, change=change)
