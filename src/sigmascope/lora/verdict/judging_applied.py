"""Find the modules of a LoRA file on a model: a loader that returns normally may have loaded nothing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path

from sigmascope.errors import NonFiniteError, SigmascopeError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.models.layer_kinds import WEIGHT
from sigmascope.lora.models.layout import Shapes
from sigmascope.lora.verdict.applied_findings import applied_findings
from sigmascope.lora.verdict.applied_verdict import AppliedModule, AppliedVerdict
from sigmascope.lora.verdict.model_shapes import Model, shapes_of
from sigmascope.lora.verdict.placing import Placing, place
from sigmascope.lora.verdict.same_change import Change, is_same, times_of
from sigmascope.lora.verdict.verdict_findings import unreadable
from sigmascope.probes.adapters.applied import AppliedPatch
from sigmascope.probes.reading import describe

_Patches = Mapping[str, Sequence[AppliedPatch]]


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
        shapes = shapes_of(model) if model is not None else _shapes_of_patches(patches)
        opened = nullcontext(lora) if isinstance(lora, LoraFile) else open_any(Path(lora))
        with opened as file:
            modules = tuple(_judged(file, shapes, _by_key(patches)))
    except SigmascopeError as error:
        return AppliedVerdict(path, error=str(error), findings=(unreadable(error),))
    except Exception as error:  # noqa: BLE001 - the host's objects may raise anything
        return AppliedVerdict(path, error=describe(error), findings=(unreadable(error),))
    return AppliedVerdict(path, modules, findings=applied_findings(modules))


def _shapes_of_patches(patches: Sequence[AppliedPatch]) -> dict[str, tuple[int, ...]]:
    return {patch.key: patch.weight_shape for patch in patches if patch.weight_shape is not None}


def _by_key(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    found: dict[str, list[AppliedPatch]] = {}
    for patch in patches:
        found.setdefault(patch.key, []).append(patch)
    return found


def _judged(lora: LoraFile, shapes: Shapes, patches: _Patches) -> Iterator[AppliedModule]:
    placing = place(lora, shapes)
    for name in lora.names:
        keys = placing.keys.get(name) or tuple(
            misfit.key for misfit in [placing.misfits.get(name)] if misfit is not None
        )
        yield _found(lora, name, keys, placing, patches)


def _found(
    lora: LoraFile, name: str, keys: tuple[str, ...], placing: Placing, patches: _Patches
) -> AppliedModule:
    if not keys:
        return AppliedModule(name, detail="the model has no weight that it is for")
    candidates = [(key, patch) for key in keys for patch in patches.get(key, ())]
    if not candidates:
        return AppliedModule(name, detail=f"nothing is on {keys[0]}")
    try:
        own = _change(lora, name)
        same = [
            (key, patch, change)
            for key, patch in candidates
            for change in [_same(own, placing, key, patch)]
            if change is not None
        ]
    except NonFiniteError:
        return AppliedModule(name, detail="it holds NaN or Inf, by which it cannot be told")
    if not same:
        others = {patch.source for _, patch in candidates if patch.source is not None}
        by = f" of {', '.join(sorted(others))}" if others else ""
        return AppliedModule(name, detail=f"only other changes{by} are on {keys[0]}")
    return _module(name, same)


def _module(name: str, same: Sequence[tuple[str, AppliedPatch, Change]]) -> AppliedModule:
    keys = tuple(dict.fromkeys(key for key, _, _ in same))
    counts = [sum(key == one for one, _, _ in same) for key in keys]
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


def _change(lora: LoraFile, name: str) -> Change:
    return lora.modules[name] if name in lora.modules else lora.changes[name]


def _as_aligned(placing: Placing, key: str) -> Change | None:
    """The file's change of one weight, where a fused matrix is divided or joined for it."""
    lora, layer = placing.lora, key.removesuffix(WEIGHT)
    if lora is None or layer not in lora.modules:
        return None
    return lora.modules[layer]


def _same(own: Change, placing: Placing, key: str, patch: AppliedPatch) -> Change | None:
    """The form of a file's change that a patch is, if any."""
    if is_same(own, patch):
        return own
    aligned = _as_aligned(placing, key)
    return aligned if aligned is not None and is_same(aligned, patch) else None


def _strength(patch: AppliedPatch, change: Change) -> float | None:
    """What ΔW of the file is multiplied with by one patch."""
    if patch.state in {"inactive", "failed"}:
        return 0.0
    if not isinstance(change, LoraFactors) or patch.strength is None or patch.scale is None:
        return None
    times = times_of(change, patch)
    return None if times is None else patch.strength * patch.scale * times
