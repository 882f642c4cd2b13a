"""Whether the modules of a LoRA file are really on a model (`judge_applied`), and how strongly.

A patch on the model is a module of the file if its numbers are the same (`is_same`), in any dtype and scale.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from math import isfinite, nan
from os import PathLike
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.compatibility import (
    Misfit,
    Model,
    Placement,
    error_text,
    is_of_no_bias,
    place,
    shapes_of,
)
from sigmascope.lora.factors import LoraFactors, scale_of_factors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.file_verdict import LoraVerdict
from sigmascope.lora.layer_names import WEIGHT
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.reader import open_lora
from sigmascope.lora.verdict import (
    ABSENCES,
    VERDICTS,
    is_opposed,
    is_unread,
    opposed_finding,
    unreadable,
    verdict_finding,
)
from sigmascope.probes.applied_patch import AppliedPatch, PatchCause, PatchState
from sigmascope.probes.copies import on_host
from sigmascope.probes.reading import attempt
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted, first_few

Change = LoraFactors | WeightChange
_BIAS: Final = ".bias"
_MIN_SAME_COSINE: Final = 0.999
"""Tensors that differ only by scale and by rounding to bfloat16 or float16 have a larger cosine."""
_PROBE_COUNT: Final = 4
_MIN_PROBE_COSINE: Final = 0.9
# The name that patches give a file's tensor, once its adapter prefix is removed.
_PATCH_NAMES: Final = {
    "lora_up.weight": "up",
    "lora_down.weight": "down",
    "lora_mid.weight": "mid",
    "diff_b": "diff",
    "lora_up.bias": "diff",
    "w_norm": "diff",
    "b_norm": "diff",
    "set_weight": "set",
    "oft_blocks": "blocks",
    "oft_diag": "blocks",
    **{f"{factor}.weight": factor for factor in ("a1", "a2", "b1", "b2")},
}
_ADAPTER_KEY_PREFIXES: Final = ("hada_", "lokr_")
_CANCELLED: Final = 1e-6
"""A sum of strengths below this is rounding."""


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """One module of a LoRA file, and where its numbers were found on the model.

    Attributes:
        name: Its name in the file.
        keys: The model's weights on which its numbers were found.
        times: How often it is applied to one weight, where it acts; above 1, more than once.
        states: The states of its patches, each once.
        state_reason: The reason for the first patch's state.
        strength: The factor on the file's ΔW, summed over all patches of one weight; None if the module was not found
            or is not a plain change.
        strengths: Those of the patches of that weight.
        sources: The adapters that hold it, if the host names them.
        detail: Why it was not found; None if it was.
        cause: Why the first patch does nothing, if that is known.
    """

    name: str
    keys: tuple[str, ...] = ()
    times: int = 0
    states: tuple[PatchState, ...] = ()
    state_reason: str = ""
    strength: float | None = None
    strengths: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    detail: str | None = None
    cause: PatchCause | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is on the model, acting or not."""
        return bool(self.keys)

    @property
    def acts(self) -> bool:
        """Whether it changes, or will change, the model's outputs."""
        return bool({"merged", "lazy", "registered"} & set(self.states))

    @property
    def cancels(self) -> bool:
        """Whether it is applied more than once, with strengths that sum to 0."""
        sums_to_0 = self.strength is not None and abs(self.strength) < _CANCELLED
        return self.times > 1 and self.acts and sums_to_0

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("keys", "states", "strengths", "sources")}
        values = {name: getattr(self, name) for name in _MODULE_FIELDS}
        return values | listed | {"is_there": self.is_there, "acts": self.acts}


_MODULE_FIELDS: Final = tuple(one.name for one in fields(AppliedModule))


@dataclass(frozen=True, slots=True)
class AppliedVerdict:
    """Which modules of a file are on a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        modules: Every module of the file, in its order.
        error: Why the file or the model could not be read; then nothing else is known.
        findings: What is wrong, with advice, the worst first.
    """

    path: str | None
    modules: tuple[AppliedModule, ...] = ()
    error: str | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def there(self) -> tuple[AppliedModule, ...]:
        """Modules that are on the model."""
        return tuple(module for module in self.modules if module.is_there)

    @property
    def missing(self) -> tuple[AppliedModule, ...]:
        """Modules that are not on the model; whether those are that `is_unread` names is unknown."""
        return _not_on_model(self.modules)

    @property
    def twice(self) -> tuple[AppliedModule, ...]:
        """Modules that are applied more than once."""
        return tuple(module for module in self.modules if module.times > 1)

    @property
    def complete(self) -> bool:
        """Whether all modules are on the model and act."""
        return bool(self.modules) and all(module.acts for module in self.modules)

    @property
    def states(self) -> dict[str, int]:
        """How many modules have a patch in each state."""
        return dict(Counter(state for module in self.there for state in module.states))

    @property
    def strengths(self) -> dict[float, int]:
        """How many modules have each strength, the most frequent first."""
        strengths = [round(module.strength, 2) for module in self.there if module.strength is not None]
        return dict(Counter(strengths).most_common())

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON values, totals first."""
        return {
            "path": self.path,
            "complete": self.complete,
            "error": self.error,
            "total_modules": len(self.modules),
            "modules_there": len(self.there),
            "modules_missing": len(self.missing),
            "modules_twice": len(self.twice),
            "states": self.states,
            "strengths": self.strengths,
            "findings": [asdict(finding) for finding in self.findings],
            "modules": [module.as_dict() for module in self.modules],
        }


@torch.no_grad()  # a parameter that was made in inference mode raises where its gradient may be wanted
def judge_applied(
    lora: str | PathLike[str] | LoraFile | Mapping[str, Tensor],
    patches: Sequence[AppliedPatch],
    model: Model | None = None,
    placed: LoraVerdict | None = None,
    keys: Sequence[str] | None = None,
) -> AppliedVerdict:
    """Say for every module of a file whether it is on a model now. Modules are recognised by their numbers.

    Args:
        lora: A file of any format, a LoRA in memory, or a file's tensors in memory, by key.
        patches: All patches on the model, as read from ComfyUI or PEFT; those of other LoRAs are ignored.
        model: The patched model; see `judge_lora`. Without it, a file whose naming differs from the model's is only
            found if the names of the patched weights alone show the model's family.
        placed: What `judge_lora` said of this file and model, so that its modules are not looked for once more.
        keys: What the model calls the weight of each patch, where the patches have other names for them.

    Returns:
        The verdict. Nothing is raised: if the file cannot be read, the verdict has an `error`.
    """
    given = lora.path if isinstance(lora, LoraFile) else lora
    # Of tensors it is None: to write them out takes time, and on a device a wait for each.
    path = None if isinstance(given, Mapping) else str(given or "") or None
    try:
        by_key: defaultdict[str, list[AppliedPatch]] = defaultdict(list)
        for key, patch in zip(keys or [patch.key for patch in patches], _on_host(patches), strict=True):
            by_key[key].append(patch)
        opened = (
            nullcontext(lora)
            if isinstance(lora, LoraFile)
            else open_lora(lora, check_finite=False, allow_broken=True)
        )
        with opened as file:
            find = partial(_placing, file, patches, model)
            known = None if placed is None else _Places.of(placed, file, find)
            if known is None:
                placing = find()
                known = _Places(placing.keys, placing.misfits, lambda: placing)
            equal = attempt(lambda: set(_equal_factors(file, known, by_key))).value or set()
            names = [name for name in file.names if not is_of_no_bias(file, name, known.keys)]
            modules = tuple(_applied_module(file, name, known, by_key, equal) for name in names)
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return AppliedVerdict(path, error=error_text(error), findings=(unreadable(error),))
    return AppliedVerdict(path, modules, findings=applied_findings(modules))


def _placing(lora: LoraFile, patches: Sequence[AppliedPatch], model: Model | None) -> Placement:
    if model is not None:
        return place(lora, shapes_of(model))
    return place(lora, {patch.key: patch.weight_shape for patch in patches if patch.weight_shape is not None})


class _Places:
    """Which weights the modules of a file are for.

    Args:
        keys: Of each module that has some.
        misfits: Modules whose weights have another shape.
        find: Looks for them in the model, where the file's modules are needed under the model's names.
    """

    def __init__(
        self,
        keys: Mapping[str, tuple[str, ...]],
        misfits: Mapping[str, Misfit],
        find: Callable[[], Placement],
    ) -> None:
        self.keys, self.misfits, self._find = keys, misfits, find

    @classmethod
    def of(cls, verdict: LoraVerdict, lora: LoraFile, find: Callable[[], Placement]) -> "_Places | None":
        """Those of a verdict; None if it does not have them all."""
        if tuple(module.name for module in verdict.modules) != lora.names:
            return None
        if any(module.reason is not None and module.model_shape is not None for module in verdict.modules):
            return None  # of a misfit it does not name the weight
        return cls({module.name: module.layers for module in verdict.modules}, {}, find)

    @cached_property
    def lora(self) -> LoraFile | None:
        """The file under the model's names."""
        return self._find().lora


def _on_host(patches: Sequence[AppliedPatch]) -> Iterator[AppliedPatch]:
    """The patches with their tensors on the CPU, so that a device is not waited for once for each."""
    held = on_host(
        {
            (number, name): part
            for number, patch in enumerate(patches)
            for name, part in _numbers(patch).items()
        }
    )
    for number, patch in enumerate(patches):
        if all(held[number, name] is part for name, part in _numbers(patch).items()):
            yield patch
            continue
        tensors, stored = (
            {name: held[number, name] for name in part} for part in (patch.tensors, patch.stored)
        )
        yield replace(patch, tensors=tensors, stored=stored)


def _numbers(patch: AppliedPatch) -> Mapping[str, Tensor]:
    """The tensors by which a patch is recognised."""
    return patch.tensors or patch.stored


_Equal = Set[tuple[str, int]]
"""Names of modules, and `id`s of patches that have their very factors."""


def _equal_factors(
    lora: LoraFile, placing: _Places, patches: Mapping[str, Sequence[AppliedPatch]]
) -> Iterator[tuple[str, int]]:
    """As `_are_the_factors`, of many modules at once; those that it leaves out are looked at one by one."""
    for names, ups, downs in lora.stacks(lora.names):
        alike: dict[object, list[tuple[int, AppliedPatch]]] = {}
        for row, name in enumerate(names):
            for key in placing.keys.get(name, ()):
                for patch in patches.get(key, ()):
                    if patch.tensors.keys() == {"up", "down"}:
                        form = tuple((part.shape, part.dtype) for part in patch.tensors.values())
                        alike.setdefault(form, []).append((row, patch))
        for members in alike.values():
            rows = torch.tensor([row for row, _ in members])
            are_equal = torch.ones(len(members), dtype=torch.bool)
            for own, part in ((ups, "up"), (downs, "down")):
                held = torch.stack([patch.tensors[part].detach() for _, patch in members]).flatten(2)
                if held.shape[1:] != own.shape[1:]:
                    are_equal.fill_(False)
                    break
                narrow = min(own.dtype, held.dtype, key=lambda dtype: dtype.itemsize)
                are_equal &= (own[rows].to(narrow) == held.to(narrow)).flatten(1).all(1)
            for (row, patch), is_equal in zip(members, are_equal.tolist(), strict=True):
                if is_equal:
                    yield names[row], id(patch)


class _Found(NamedTuple):
    """A patch that has a module's numbers.

    Attributes:
        key: The weight that it is on.
        patch: Itself.
        change: The module in the form that the patch has; None if it has its very factors.
        scale: The module's, in that case.
    """

    key: str
    patch: AppliedPatch
    change: Change | None
    scale: float = 1.0

    @property
    def strength(self) -> float | None:
        """The factor that the patch puts on the file's ΔW."""
        patch, times = self.patch, None
        if patch.state in _IDLE:
            return 0.0
        if patch.strength is None or patch.scale is None or not isfinite(patch.scale):
            return None
        if self.change is None:
            times = None if patch.adapter_type != "lora" or self.scale == 0.0 else 1.0 / self.scale
        elif isinstance(self.change, LoraFactors):
            times = times_of(self.change, patch)
        return None if times is None else patch.strength * patch.scale * times


def _applied_module(
    lora: LoraFile,
    name: str,
    placing: _Places,
    patches: Mapping[str, Sequence[AppliedPatch]],
    equal: _Equal,
) -> AppliedModule:
    misfit = placing.misfits.get(name)
    keys = placing.keys.get(name) or (() if misfit is None else (misfit.key,))
    if not keys and name.endswith(_BIAS):  # PEFT puts it on layers without a bias too
        beside = (key.removesuffix(WEIGHT) + _BIAS for key in placing.keys.get(name.removesuffix(_BIAS), ()))
        keys = tuple(key for key in beside if key in patches)
    if not keys:
        return AppliedModule(name, detail=ABSENCES["no_weight"])
    candidates = [(key, patch) for key in keys for patch in patches.get(_patched(lora, name, key), ())]
    if not candidates:
        return AppliedModule(name, detail=ABSENCES["no_change"].format(key=keys[0]))
    candidates = [
        (key, patch)
        for key, patch in candidates
        if not any(held.is_meta for held in _numbers(patch).values())
    ]
    if not candidates:
        return AppliedModule(name, detail=ABSENCES["no_values"].format(key=keys[0]))
    own: Change | None = None
    same: list[_Found] = []
    try:
        for key, patch in candidates:
            if (name, id(patch)) in equal:
                same.append(_Found(key, patch, None, _scale_of(lora, name)))
                continue
            own = own or _without_nan(lora.change(name))
            change = _matching_form(own, placing, key, _patch_without_nan(patch))
            if change is not None:
                same.append(_Found(key, patch, change))
    except NonFiniteError:  # of a kind that is read whole
        return AppliedModule(name, detail=ABSENCES["not_finite"])
    if not same and not any(_numbers(patch) for _, patch in candidates):
        return AppliedModule(name, detail=ABSENCES["unread"].format(key=keys[0]))
    if not same:
        others = {patch.source for _, patch in candidates if patch.source is not None}
        sources = f" of {', '.join(sorted(others))}" if others else ""
        return AppliedModule(name, detail=ABSENCES["others"].format(key=keys[0], sources=sources))
    return _there(name, same)


def _patched(lora: LoraFile, name: str, key: str) -> str:
    """The weight that has the change; of (IA)³ on a bias its layer's, since PEFT scales a layer's outputs with both."""
    return key.removesuffix(_BIAS) + WEIGHT if key.endswith(_BIAS) and lora.kind_of(name) == "ia3" else key


def _scale_of(lora: LoraFile, name: str) -> float:
    """The scale of a module's factors; NaN if its alpha is NaN or Inf."""
    try:
        return scale_of_factors(lora.alpha_of(name), lora.rank_of(name) or 1, lora.shape_of(name))
    except NonFiniteError:
        return nan


def _without_nan(change: Change) -> Change:
    """Zeros for NaN and Inf, so that the other numbers can be recognised."""
    if isinstance(change, LoraFactors) and not (_is_finite(change.up) and _is_finite(change.down)):
        return replace(
            change, up=torch.nan_to_num(change.up, 0, 0, 0), down=torch.nan_to_num(change.down, 0, 0, 0)
        )
    return change


def _patch_without_nan(patch: AppliedPatch) -> AppliedPatch:
    if all(map(_is_finite, patch.tensors.values())):
        return patch
    return replace(
        patch, tensors={name: torch.nan_to_num(tensor, 0, 0, 0) for name, tensor in patch.tensors.items()}
    )


def _is_finite(tensor: Tensor) -> bool:
    return tensor.dtype.itemsize == 1 or bool(torch.isfinite(tensor).all())


def _matching_form(own: Change, placing: _Places, key: str, patch: AppliedPatch) -> Change | None:
    """The file's change if the patch is that; or its divided or joined form, for a fused matrix; or None."""
    if is_same(own, patch):
        return own
    lora, layer = placing.lora, key.removesuffix(WEIGHT)
    if lora is None or layer not in lora.modules:
        return None
    aligned = lora.modules[layer]
    return aligned if is_same(aligned, patch) else None


_IDLE: Final = frozenset({"inactive", "failed"})


def _there(name: str, same: Sequence[_Found]) -> AppliedModule:
    keys = tuple(dict.fromkeys(found.key for found in same))
    acting = [found.key for found in same if found.patch.state not in _IDLE]
    strengths = [found.strength for found in same if found.key == keys[0]]
    known = [strength for strength in strengths if strength is not None]
    sources = dict.fromkeys(found.patch.source for found in same)
    return AppliedModule(
        name=name,
        keys=keys,
        times=max(acting.count(key) for key in keys),
        states=tuple(dict.fromkeys(found.patch.state for found in same)),
        state_reason=same[0].patch.state_reason,
        strength=sum(known) if len(known) == len(strengths) else None,
        strengths=tuple(known) if len(known) == len(strengths) else (),
        sources=tuple(source for source in sources if source is not None),
        cause=same[0].patch.cause,
    )


def is_same(change: Change, patch: AppliedPatch) -> bool:
    """Whether a patch is a change from a file, in any dtype and scale."""
    if isinstance(change, LoraFactors) and {"up", "down"} <= patch.tensors.keys():
        if "mid" in patch.tensors:
            return False
        return _same_product(change, patch)
    own, held = tensors_of(change), _numbers(patch)
    shared = own.keys() & held.keys()
    return bool(shared) and all(_same_numbers(own[name], held[name]) for name in shared)


def tensors_of(change: Change) -> Mapping[str, Tensor]:
    """A change's tensors, named as in `AppliedPatch.tensors`."""
    if isinstance(change, LoraFactors):
        return {"up": change.up, "down": change.down}
    if isinstance(change, DoraChange):
        return {**tensors_of(change.direction), "dora_scale": change.magnitude}
    if isinstance(change, Adapter):
        return {_patch_name(name): tensor for name, tensor in change.parts.items()}
    return {}


def times_of(change: LoraFactors, patch: AppliedPatch) -> float | None:
    """The factor between a plain patch, at strength and scale 1, and the file's ΔW; None for other kinds and for ΔW = 0."""
    if patch.adapter_type != "lora" or not {"up", "down"} <= patch.tensors.keys() or change.scale == 0.0:
        return None
    if _are_the_factors(change, patch):
        return 1.0 / change.scale
    own = change.frobenius_norm()
    return _patch_factors(patch).frobenius_norm() / own if own > 0.0 else None


def _same_product(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Compare ΔW, so that the host may scale and re-factor it; zero changes are compared by their factors."""
    if _are_the_factors(change, patch):
        return True
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    if (up.shape[0], down.shape[1]) != (change.up.shape[0], change.down.shape[1]):
        return False
    if _clearly_differ(change, up, down):
        return False
    factors = _patch_factors(patch)
    plain = LoraFactors(
        as_float64(change.up).cpu(), as_float64(change.down).cpu(), change.alpha, factors.weight_shape
    )
    lengths = plain.frobenius_norm() * factors.frobenius_norm()
    if lengths > 0.0:
        return plain.inner(factors) > _MIN_SAME_COSINE * lengths
    own, held = _directions(plain), _directions(factors)
    return all(_same_numbers(*both) for both in zip(own, held, strict=True))


def _directions(factors: LoraFactors) -> tuple[Tensor, Tensor]:
    """Up and down without the ranks of which both are zero: hosts fill factors up to a common rank with them."""
    kept = factors.up.any(0) | factors.down.any(1)
    return factors.up[:, kept], factors.down[kept]


def _clearly_differ(change: LoraFactors, up: Tensor, down: Tensor) -> bool:
    """Whether a few random inputs already show that two ΔW are not multiples of each other."""
    probe = torch.randn(down.shape[1], _PROBE_COUNT, generator=torch.Generator().manual_seed(0))
    from_file, from_patch = (
        (up_factor.detach().cpu().float() @ (down_factor.detach().cpu().float() @ probe)).flatten()
        for up_factor, down_factor in ((change.up, change.down), (up, down))
    )
    lengths = float(torch.linalg.vector_norm(from_file)) * float(torch.linalg.vector_norm(from_patch))
    return lengths > 0.0 and float(from_file @ from_patch) < _MIN_PROBE_COSINE * lengths


def _are_the_factors(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Whether the factors are equal after rounding to the narrower of the two dtypes."""
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    return _are_equal(change.up, up) and _are_equal(change.down, down)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.detach().to(second.device, narrow), second.detach().to(narrow))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    first, second = as_float64(a).cpu().flatten(), as_float64(b).cpu().flatten()
    if len(first) != len(second):
        return False
    lengths = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if 0.0 in lengths:
        return lengths == (0.0, 0.0)
    return float(first @ second) > _MIN_SAME_COSINE * lengths[0] * lengths[1]


def _patch_factors(patch: AppliedPatch) -> LoraFactors:
    up, down = (as_float64(patch.tensors[name]).cpu().flatten(1) for name in ("up", "down"))
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _patch_name(part: str) -> str:
    for start in _ADAPTER_KEY_PREFIXES:
        part = part.removeprefix(start)
    return _PATCH_NAMES.get(part, part)


def applied_findings(modules: Sequence[AppliedModule]) -> tuple[Finding, ...]:
    """The findings for one file's modules, the worst first."""
    return (*_missing(modules), *_idle(modules), *_twice(modules))


def _not_on_model(modules: Sequence[AppliedModule]) -> tuple[AppliedModule, ...]:
    return tuple(module for module in modules if not module.is_there and not is_unread(module.detail))


def _missing(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    missing = _not_on_model(modules)
    if not missing:
        return
    details = (module.detail or "" for module in missing)
    no_change = ABSENCES["no_change"]
    start = no_change.partition("{key}")[0]
    without_weight = (
        no_change.format(key="its weights") if detail.startswith(start) else detail for detail in details
    )
    why, _ = Counter(without_weight).most_common(1)[0]
    evidence: dict[str, JsonScalar] = {
        "modules": len(modules),
        "missing": len(missing),
        "first": missing[0].name,
        "detail": missing[0].detail,
    }
    total = counted(len(modules), "module")
    if len(missing) == len(modules):
        yield verdict_finding("lora_not_loaded", evidence, modules=total, why=why)
    else:
        yield verdict_finding(
            "lora_partly_loaded",
            evidence,
            missing=len(missing),
            modules=total,
            are=_are(missing),
            why=why,
            first=_named(missing),
        )


def _are(modules: Sequence[AppliedModule]) -> str:
    return "is" if len(modules) == 1 else "are"


def _idle(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    idle = [module for module in modules if module.is_there and not module.acts]
    if not idle:
        return
    failed = [module for module in idle if "failed" in module.states]
    reason = idle[0].state_reason or "switched off"
    finding = verdict_finding(
        "lora_not_applicable" if failed else "lora_not_acting",
        {"modules": len(modules), "idle": len(idle), "failed": len(failed), "reason": reason},
        idle=len(idle),
        modules=counted(len(modules), "module"),
        are=_are(idle),
        reason=reason,
        first=_named(idle),
    )
    by_cause = None if failed else VERDICTS.get(f"lora_{idle[0].cause}")
    yield finding if by_cause is None else replace(finding, advice=by_cause.advice)


def _twice(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    several = [module for module in modules if module.times > 1]
    cancelled = [module for module in several if module.cancels]
    opposed = [module for module in several if not module.cancels and is_opposed(module.strengths)]
    twice = [module for module in several if module not in cancelled and module not in opposed]
    if cancelled:
        yield verdict_finding(
            "lora_cancelled",
            {"modules": len(cancelled), "strength": 0.0},
            holders=f"{len(cancelled)} of the file's {counted(len(modules), 'module')}",
            weights=_named(cancelled),
        )
    if opposed:
        yield opposed_finding(
            opposed[0].strengths,
            {"modules": len(opposed)},
            f"{len(opposed)} of the file's {counted(len(modules), 'module')}",
            _named(opposed),
        )
    if twice:
        yield Finding(
            "lora_applied_twice",
            "warning",
            f"{len(twice)} of the file's {counted(len(modules), 'module')} {_are(twice)} applied more than once: {_named(twice)}.",
            {
                "modules": len(twice),
                "times": max(module.times for module in twice),
                "strength": twice[0].strength,
            },
            "Remove one, unless the doubled strength is intended.",
        )


def _named(modules: Sequence[AppliedModule]) -> str:
    return first_few([module.name for module in modules], most=3)
