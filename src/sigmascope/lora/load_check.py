"""Whether a file's modules are really on a model (judge_applied): a loader that returns may have loaded nothing.

A patch on the model is a module of the file if its numbers say so (`is_same`), in whatever dtype and scale the host
keeps them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.adapters import Adapter, DoraChange, WeightChange
from sigmascope.lora.compatibility import Model, Placement, place, shapes_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import Shapes
from sigmascope.lora.file import LoraFile
from sigmascope.lora.layer_names import WEIGHT
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.reader import OpaqueChange, open_any_kind
from sigmascope.lora.verdict import unreadable
from sigmascope.probes.applied_patch import AppliedPatch, PatchState
from sigmascope.probes.reading import describe
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import first_few

_Patches = Mapping[str, Sequence[AppliedPatch]]
Change = LoraFactors | WeightChange

_SAME: Final = 0.999
"""Cosine of what is the same but for the rounding of a conversion to bfloat16 or float16, and for its scale."""
_CORNER: Final = 16  # rows and columns that are compared first
_SAME_CORNER: Final = 0.9
"""The same of a few rows and columns, whose share of the rounding may be larger."""
# What patches call a file's tensors, once these starts are cut off.
_PATCH_NAMES: Final = {
    "lora_up.weight": "up",
    "lora_down.weight": "down",
    "lora_mid.weight": "mid",
    "diff_b": "diff",
    "w_norm": "diff",
    "b_norm": "diff",
    "set_weight": "set",
}
_STARTS: Final = ("hada_", "lokr_")


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """One module of a LoRA file, and what of it is on the model.

    Attributes:
        name: As the file has it.
        keys: The model's weights that its numbers were found on.
        times: How often: above 1 it is applied more than once to the same weight.
        states: How far each of them has come, each state once.
        state_reason: Of the first.
        strength: What the file's ΔW is multiplied with on the model, all times together; None where it was not
            found or is no plain change.
        sources: The adapters that hold it, where the host names them.
        detail: Why it was not found; None where it was.
    """

    name: str
    keys: tuple[str, ...] = ()
    times: int = 0
    states: tuple[PatchState, ...] = ()
    state_reason: str = ""
    strength: float | None = None
    sources: tuple[str, ...] = ()
    detail: str | None = None

    @property
    def is_there(self) -> bool:
        """Whether it is on the model, acting or not."""
        return bool(self.keys)

    @property
    def acts(self) -> bool:
        """Whether it is or will be in the model's outputs."""
        return bool({"merged", "lazy", "registered"} & set(self.states))

    def as_dict(self) -> dict[str, Any]:
        """The module as JSON values."""
        listed = {name: list(getattr(self, name)) for name in ("keys", "states", "sources")}
        return asdict(self) | listed | {"is_there": self.is_there, "acts": self.acts}


@dataclass(frozen=True, slots=True)
class AppliedVerdict:
    """What of a file is on a model.

    Attributes:
        path: The file; None for a LoRA in memory.
        modules: Every module of the file, in its order.
        error: Why the file, or the model, could not be read; then nothing else is known.
        findings: What is wrong, with what to do, the worst first.
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
        """Modules that are not."""
        return tuple(module for module in self.modules if not module.is_there)

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
        """How many modules have come how far."""
        return dict(Counter(state for module in self.there for state in module.states))

    @property
    def strengths(self) -> dict[float, int]:
        """How many modules are there at each strength, the most frequent first."""
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


def judge_applied(
    lora: str | PathLike[str] | LoraFile, patches: Sequence[AppliedPatch], model: Model | None = None
) -> AppliedVerdict:
    """Say of every module of a file whether it is on a model now, told by its numbers.

    Args:
        lora: A file of any format, or a LoRA in memory.
        patches: All that is on the model, as the readers of ComfyUI and PEFT give it; other LoRAs among them are
            told apart.
        model: What the patches are on; see `judge_lora`. Without it, a file in another naming than the model's is
            only found where the names of the patched weights alone show the model's family.

    Returns:
        The verdict. Nothing is raised: a file that cannot be read is a verdict with an `error`.
    """
    path = str(lora.path or "") or None if isinstance(lora, LoraFile) else str(lora)
    try:
        if model is not None:
            shapes = shapes_of(model)
        else:
            shapes = {patch.key: patch.weight_shape for patch in patches if patch.weight_shape is not None}
        opened = nullcontext(lora) if isinstance(lora, LoraFile) else open_any_kind(Path(lora))
        with opened as file:
            modules = tuple(_applied_modules(file, shapes, _by_key(patches)))
    except SigmascopeError as error:
        return AppliedVerdict(path, error=str(error), findings=(unreadable(error),))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return AppliedVerdict(path, error=describe(error), findings=(unreadable(error),))
    return AppliedVerdict(path, modules, findings=applied_findings(modules))


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    patches_by_key: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        patches_by_key.setdefault(patch.key, []).append(patch)
    return patches_by_key


def _applied_modules(lora: LoraFile, shapes: Shapes, patches: _Patches) -> Iterator[AppliedModule]:
    placing = place(lora, shapes)
    for name in lora.names:
        keys = placing.keys.get(name) or tuple(
            misfit.key for misfit in [placing.misfits.get(name)] if misfit is not None
        )
        yield _applied_module(lora, name, keys, placing, patches)


def _applied_module(
    lora: LoraFile, name: str, keys: tuple[str, ...], placing: Placement, patches: _Patches
) -> AppliedModule:
    if not keys:
        return AppliedModule(name, detail="the model has no weight that it is for")
    candidates = [(key, patch) for key in keys for patch in patches.get(key, ())]
    if not candidates:
        return AppliedModule(name, detail=f"nothing is on {keys[0]}")
    try:
        own = lora.change(name)
        same = [
            (key, patch, change)
            for key, patch in candidates
            for change in [_matching_form(own, placing, key, patch)]
            if change is not None
        ]
    except NonFiniteError:
        return AppliedModule(name, detail="it holds NaN or Inf, by which it cannot be told")
    if not same:
        others = {patch.source for _, patch in candidates if patch.source is not None}
        by = f" of {', '.join(sorted(others))}" if others else ""
        return AppliedModule(name, detail=f"only other changes{by} are on {keys[0]}")
    return _there(name, same)


def _matching_form(own: Change, placing: Placement, key: str, patch: AppliedPatch) -> Change | None:
    """The form of a file's change that a patch is, if any."""
    if is_same(own, patch):
        return own
    # The same of one weight, where a fused matrix is divided or joined for it.
    lora, layer = placing.lora, key.removesuffix(WEIGHT)
    if lora is None or layer not in lora.modules:
        return None
    aligned = lora.modules[layer]
    return aligned if is_same(aligned, patch) else None


def _there(name: str, same: Sequence[tuple[str, AppliedPatch, Change]]) -> AppliedModule:
    keys = tuple(dict.fromkeys(key for key, _, _ in same))
    counts = [sum(key == other for other, _, _ in same) for key in keys]
    on_first = [(patch, change) for key, patch, change in same if key == keys[0]]
    strengths = [_strength(patch, change) for patch, change in on_first]
    known = [strength for strength in strengths if strength is not None]
    return AppliedModule(
        name=name,
        keys=keys,
        times=max(counts),
        states=tuple(dict.fromkeys(patch.state for _, patch, _ in same)),
        state_reason=same[0][1].state_reason,
        strength=sum(known) if len(known) == len(strengths) else None,
        sources=tuple(dict.fromkeys(patch.source for _, patch, _ in same if patch.source is not None)),
    )


def _strength(patch: AppliedPatch, change: Change) -> float | None:
    """What ΔW of the file is multiplied with by one patch."""
    if patch.state in {"inactive", "failed"}:
        return 0.0
    if not isinstance(change, LoraFactors) or patch.strength is None or patch.scale is None:
        return None
    times = times_of(change, patch)
    return None if times is None else patch.strength * patch.scale * times


def is_same(change: Change, patch: AppliedPatch) -> bool:
    """Whether a patch is a change of a file, in whatever dtype and scale the host keeps it."""
    if isinstance(change, LoraFactors) and {"up", "down"} <= patch.tensors.keys():
        if "mid" in patch.tensors:
            return False
        return _same_product(change, patch)
    own = tensors_of(change)
    shared = own.keys() & patch.tensors.keys()
    return bool(shared) and all(_same_numbers(own[name], patch.tensors[name]) for name in shared)


def tensors_of(change: Change) -> Mapping[str, Tensor]:
    """A change's tensors by the names that `AppliedPatch.tensors` has for them."""
    if isinstance(change, LoraFactors):
        return {"up": change.up, "down": change.down}
    if isinstance(change, DoraChange):
        return {**tensors_of(change.direction), "dora_scale": change.magnitude}
    if isinstance(change, OpaqueChange):
        return change.parts
    if isinstance(change, Adapter):
        return {_patch_name(name): tensor for name, tensor in change.parts.items()}
    return {}


def times_of(change: LoraFactors, patch: AppliedPatch) -> float | None:
    """How many times the file's ΔW a plain patch is, at strength and scale 1; None for other kinds and no change."""
    if patch.adapter_type != "lora" or not {"up", "down"} <= patch.tensors.keys() or change.scale == 0.0:
        return None
    if _are_the_factors(change, patch):
        return 1.0 / change.scale
    own = change.frobenius_norm()
    return _patch_factors(patch).frobenius_norm() / own if own > 0.0 else None


def _same_product(change: LoraFactors, patch: AppliedPatch) -> bool:
    """By ΔW, so that a host may divide, scale and re-factor as it likes; zero changes by their factors."""
    if _are_the_factors(change, patch):
        return True
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    if (up.shape[0], down.shape[1]) != (change.up.shape[0], change.down.shape[1]):
        return False
    if _differ_in_a_corner(change, up, down):
        return False
    factors = _patch_factors(patch)
    plain = LoraFactors(
        as_float64(change.up).cpu(), as_float64(change.down).cpu(), change.alpha, factors.weight_shape
    )
    lengths = plain.frobenius_norm() * factors.frobenius_norm()
    if lengths > 0.0:
        return plain.inner(factors) > _SAME * lengths
    return _same_numbers(change.up, patch.tensors["up"]) and _same_numbers(change.down, patch.tensors["down"])


def _differ_in_a_corner(change: LoraFactors, up: Tensor, down: Tensor) -> bool:
    """Whether the file's largest rows and columns already show that two ΔW are no multiples of each other."""
    rows, columns = _largest(change.up, 1), _largest(change.down, 0)
    one, two = (
        (as_float64(first.detach().cpu()[rows]) @ as_float64(second.detach().cpu()[:, columns])).flatten()
        for first, second in ((change.up, change.down), (up, down))
    )
    lengths = float(torch.linalg.vector_norm(one)) * float(torch.linalg.vector_norm(two))
    return lengths > 0.0 and float(one @ two) < _SAME_CORNER * lengths


def _largest(factor: Tensor, along: int) -> Tensor:
    lengths = torch.linalg.vector_norm(factor.detach().cpu().to(torch.float32), dim=along)
    places: Tensor = lengths.topk(min(_CORNER, len(lengths))).indices
    return places


def _are_the_factors(change: LoraFactors, patch: AppliedPatch) -> bool:
    """Whether they are the very numbers, but for the rounding to the narrower of the two dtypes."""
    up, down = patch.tensors["up"].flatten(1), patch.tensors["down"].flatten(1)
    return _are_equal(change.up, up) and _are_equal(change.down, down)


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.detach().to(second.device, narrow), second.detach().to(narrow))


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    first, second = as_float64(one).cpu().flatten(), as_float64(other).cpu().flatten()
    if len(first) != len(second):
        return False
    lengths = float(torch.linalg.vector_norm(first)), float(torch.linalg.vector_norm(second))
    if 0.0 in lengths:
        return lengths == (0.0, 0.0)
    return float(first @ second) > _SAME * lengths[0] * lengths[1]


def _patch_factors(patch: AppliedPatch) -> LoraFactors:
    up, down = (as_float64(patch.tensors[name]).cpu().flatten(1) for name in ("up", "down"))
    return LoraFactors(up, down, float(up.shape[1]), (up.shape[0], down.shape[1]))


def _patch_name(part: str) -> str:
    for start in _STARTS:
        part = part.removeprefix(start)
    return _PATCH_NAMES.get(part, part)


def applied_findings(modules: Sequence[AppliedModule]) -> tuple[Finding, ...]:
    """Findings for the modules of one file, the worst first."""
    return (*_missing(modules), *_idle(modules), *_twice(modules))


def _missing(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    missing = [module for module in modules if not module.is_there]
    if not missing:
        return
    why, _ = Counter(_without_weight(module.detail or "") for module in missing).most_common(1)[0]
    evidence: dict[str, JsonScalar] = {
        "modules": len(modules),
        "missing": len(missing),
        "first": missing[0].name,
        "detail": missing[0].detail,
    }
    advice = (
        "Judge the file by the model (sigmascope lora inspect FILE --model MODEL): it says why, name by name."
    )
    if len(missing) == len(modules):
        message = (
            f"None of the file's {len(modules)} modules is on the model, although it was to be loaded: {why}."
        )
        yield Finding("lora_not_loaded", "critical", message, evidence, advice)
    else:
        message = f"{len(missing)} of the file's {len(modules)} modules are not on the model: {_first_names(missing)}."
        yield Finding("lora_partly_loaded", "error", message, evidence, advice)


def _idle(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    idle = [module for module in modules if module.is_there and not module.acts]
    if not idle:
        return
    failed = [module for module in idle if "failed" in module.states]
    reason = idle[0].state_reason or "switched off"
    yield Finding(
        "lora_not_applicable" if failed else "lora_not_acting",
        "error" if failed else "warning",
        f"{len(idle)} of the file's {len(modules)} modules are on the model and change nothing ({reason}): {_first_names(idle)}.",
        {"modules": len(modules), "idle": len(idle), "failed": len(failed), "reason": reason},
        "Use a LoRA whose shapes fit the model."
        if failed
        else "Set its strength, or make the adapter active.",
    )


def _twice(modules: Sequence[AppliedModule]) -> Iterator[Finding]:
    twice = [module for module in modules if module.times > 1]
    if twice:
        yield Finding(
            "lora_applied_twice",
            "warning",
            f"{len(twice)} of the file's {len(modules)} modules are applied more than once: {_first_names(twice)}.",
            {
                "modules": len(twice),
                "times": max(module.times for module in twice),
                "strength": twice[0].strength,
            },
            "Remove one, unless the doubled strength is meant.",
        )


def _without_weight(detail: str) -> str:
    """The reason without the weight's name."""
    return "nothing is on the weights that it is for" if detail.startswith("nothing is on") else detail


def _first_names(modules: Sequence[AppliedModule]) -> str:
    return first_few([module.name for module in modules], most=3)
