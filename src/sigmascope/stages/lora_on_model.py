"""LoRAs on a model: the file and whether it is for the models, what of it is on them, and every change there is.

Modules may be in the weights while no adapter is left to tell of them: fused, then unloaded (`with_fused`). A
baseline has a thousand elements of each weight. What a plain change makes of just these is known from its
factors, Δᵢⱼ = s · upᵢ · downⱼ, so that the file can be looked for in what became of them.

`patch_analysis` describes all changes: what they are, how far they have come, whether the same LoRA is there twice,
and how every two of them overlap.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from sigmascope.analysis.lora_facts import GIVES_BACK
from sigmascope.checkpoints import open_checkpoint
from sigmascope.files import short_path
from sigmascope.lora.adapters import Adapter, WeightChange
from sigmascope.lora.applied_verdict import AppliedModule, AppliedVerdict, applied_findings, judge_applied
from sigmascope.lora.compatibility import judge_lora, judge_opened, shapes_of
from sigmascope.lora.effect import ChangeBases, LoraOverlap, angles_of, effect_of, overlaps, weight_norm
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, family_in, read_training_facts
from sigmascope.lora.file_verdict import LoraVerdict
from sigmascope.lora.linalg import as_float64, root_sum_square
from sigmascope.lora.module_names import parse_name
from sigmascope.lora.norms_at_once import norms_at_once
from sigmascope.lora.patches import (
    factors_of,
    is_product,
    needs_weight,
    own_shape,
    rank_together,
    scale_of_patch,
    sort_patches,
    strength_of,
)
from sigmascope.lora.reader import lora_in, open_lora
from sigmascope.lora.verdict import ABSENCES, is_opposed
from sigmascope.probes.applied_patch import AdapterType, AppliedPatch
from sigmascope.probes.comfyui_patcher import is_comfyui
from sigmascope.probes.copies import HostCopy, Pending, copy_to_device, copy_to_host
from sigmascope.probes.fingerprints import positions
from sigmascope.probes.module_tree import once_a_look
from sigmascope.probes.peft import UP_BIAS, took_from_weights
from sigmascope.probes.reading import Reading, attempt, attribute, lookup, sequence
from sigmascope.records.memory import mib
from sigmascope.records.run import Finding
from sigmascope.stages.baseline import most_common
from sigmascope.stages.model_snapshot import ModelPatches, module_of, parts_of
from sigmascope.stages.schema import (
    LoraFileFacts,
    OnePatch,
    PatchAnalysis,
    PatchDetails,
    SameTwice,
    SourceFacts,
    ValueChange,
    as_dict,
)
from sigmascope.stages.signed_patches import Content, Contents, contents_of, key_of, signed_patches

NOT_GIVEN = "no file was given"
_LEAST_COSINE_OF_FUSED: Final = 0.5
"""Cosine between what became of the elements and the change; of two unrelated ones it is below 0.1.

Other LoRAs that were fused too, and rounding to bfloat16, keep it below 1.
"""
FUSED: Final = "the change is in the weight, and the adapter is gone"
Samples = Mapping[str, tuple[Tensor, Tensor]]
_STATES_BY_PRIORITY: Final = ("failed", "registered", "lazy", "merged", "inactive")
"""Of several changes on one weight, the state that a reader should know of first."""
_UNREADABLE_PARTS: Final = ("patch", "tensors", "adapter_type")
"""Under which names a change says that it could not be read."""
_MOST_SOURCES: Final = 6
_MOST_KEYS: Final = 10
_MOST_ANGLES: Final = 8
_MOST_OVERLAP_PRODUCTS: Final = 10**11
"""For all pairs: some seconds of one core. Two LoRAs of rank 32 for all layers of SDXL take a tenth."""
_MOST_BYTES_OF_BASES: Final = 1 << 26
_ByKey = Mapping[str, Sequence[AppliedPatch]]


def read_file(path: object, unet: object, clip: object) -> tuple[Reading[LoraVerdict], LoraFileFacts]:
    """`match_file` and `lora_file_facts` with the file opened once. Never raises."""
    named = attempt(lambda: _named_modules(unet, clip)).value
    both = attempt(lambda: _read_once(_source(path), named)).value if path is not None and named else None
    return (match_file(path, unet, clip), lora_file_facts(path)) if both is None else both


def _source(given: object) -> Path | Mapping[str, Tensor]:
    """A LoRA's file, or its tensors where a program gave those in place of a file."""
    return given if isinstance(given, Mapping) else Path(given)  # type: ignore[arg-type]


def _read_once(
    path: Path | Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> tuple[Reading[LoraVerdict], LoraFileFacts]:
    with open_checkpoint(path) as checkpoint:
        lora = lora_in(checkpoint, allow_broken=True)
        named = str(path) if isinstance(path, Path) else None
        verdict = judge_opened(lora, tuple(checkpoint.keys()), modules, named)
        return Reading(verdict), lora_file_facts(path, lora)


def lora_file_facts(path: object, opened: LoraFile | None = None) -> LoraFileFacts:
    """Name, size, format, ranks, alphas and base model of a LoRA file. Never raises.

    Args:
        path: The file's.
        opened: What is in it, if it is open already.
    """
    if path is None:
        return _unknown_file(NOT_GIVEN)
    if isinstance(path, Mapping):
        in_memory = attempt(lambda: _facts_of_tensors(path, opened))
        return in_memory.value or _unknown_file(in_memory.reason)
    place = attempt(lambda: Path(path)).value  # type: ignore[arg-type]
    if place is None:
        return _unknown_file(f"{type(path).__name__} is not a path")
    exists = attempt(place.exists)
    if not exists.value:
        reason = exists.reason or f"{short_path(place)} does not exist"
        return _unknown_file(reason, filename=place.name, file_exists=False)
    size = mib(attempt(lambda: _bytes_of(place)).value)
    told = Reading(size, "the system does not report it")
    facts = attempt(
        lambda: _read_inside(place, opened, filename=place.name, file_exists=True, file_size=told)
    )
    return facts.value or _unknown_file(facts.reason, filename=place.name, file_exists=True, file_size=size)


def _unknown_file(reason: str | None, **known: object) -> LoraFileFacts:
    return as_dict(LoraFileFacts, why=reason, ranks={}, alphas={}, **known)


def _facts_of_tensors(tensors: Mapping[str, Tensor], opened: LoraFile | None) -> LoraFileFacts:
    no_file: Reading[Any] = Reading(None, "its tensors were given, and no file")
    return _read_inside(tensors, opened, filename=no_file, file_exists=no_file, file_size=no_file)


def _read_inside(path: Path | Mapping[str, Tensor], opened: LoraFile | None, **of_file: Any) -> LoraFileFacts:
    with open_lora(path, allow_broken=True) if opened is None else nullcontext(opened) as lora:
        ranks = Counter(rank for name in lora.names if (rank := lora.rank_of(name)) is not None)
        read_alphas = (attempt(lambda name=name: lora.alpha_of(name)).value for name in lora.modules)  # type: ignore[misc]
        alphas = Counter(alpha for alpha in read_alphas if alpha is not None)
        training = read_training_facts(lora.metadata).training
        no_rank = "none of its changes has one"
        base_hint = family_in(lora.metadata) or training.get("base model") or training.get("base version")
        return as_dict(
            LoraFileFacts,
            rank=Reading(most_common(ranks), no_rank),
            alpha=Reading(most_common(alphas), no_rank),
            base_hint=Reading(base_hint, "its header names no base model"),
            **of_file,
            format=lora.format,
            ranks=dict(sorted(ranks.items())),
            alphas=dict(sorted(alphas.items())),
            modules=len(lora.names),
        )


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def match_file(path: object, unet: object, clip: object) -> Reading[LoraVerdict]:
    """Match the modules of a LoRA file with the layers of both models. Never raises."""
    if path is None:
        return Reading(None, NOT_GIVEN)
    modules = attempt(lambda: _named_modules(unet, clip))
    if not modules.value:
        return Reading(None, modules.reason or "no model was given")
    named = modules.value
    return attempt(lambda: judge_lora(_source(path), named))


def _named_modules(unet: object, clip: object) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for model, model_type, usual in ((unet, "UNet", "unet"), (clip, "CLIP", "text_encoder")):
        for prefix, part in parts_of(model, model_type).items():
            module = module_of(part)
            if module is not None:
                modules[prefix.rstrip(".") or _name_of(module, usual)] = module
    return modules


def _name_of(module: nn.Module, usual: str) -> str:
    name = type(module).__name__ if usual == "unet" else ""
    if "ControlNet" in name and not name.startswith("UNet"):
        return "controlnet"
    return "transformer" if "Transformer" in name else usual


def match_applied(
    path: object,
    unet: object,
    clip: object,
    on_unet: ModelPatches,
    on_clip: ModelPatches,
    placed: LoraVerdict | None = None,
) -> Reading[AppliedVerdict]:
    """Find the modules of a LoRA file among the changes that are on both models. Never raises.

    Args:
        path: The file; None if it was not given.
        unet: The denoiser; None where the LoRA was not for it, and its modules are left out then.
        clip: The text encoders, likewise.
        on_unet: The changes on the denoiser.
        on_clip: Those on the text encoders.
        placed: What `match_file` said of the file and the same models, so that it is not placed anew.
    """
    if path is None:
        return Reading(None, NOT_GIVEN)
    return attempt(lambda: _judge_applied(_source(path), unet, clip, on_unet, on_clip, placed))


def _judge_applied(
    path: Path | Mapping[str, Tensor],
    unet: object,
    clip: object,
    on_unet: ModelPatches,
    on_clip: ModelPatches,
    placed: LoraVerdict | None,
) -> AppliedVerdict:
    modules = _named_modules(unet, clip)
    names = names_of_all(unet, clip)
    sides = [*enumerate((on_unet, on_clip))]
    patches = [patch for _, applied in sides for patch in applied.patches]
    keys = [names[side](patch.key) for side, applied in sides for patch in applied.patches]
    verdict = judge_applied(path, patches, modules or None, placed if modules else None, keys)
    left_out = [module for module in verdict.missing if (clip if is_for_text(module.name) else unet) is None]
    return _without(verdict, left_out) if modules else verdict


def is_for_text(name: str) -> bool:
    """Whether a module of a file, by its name, is a text encoder's."""
    return any(part.startswith("text_encoder") for part in parse_name(name).parts)


def _without(verdict: AppliedVerdict, left_out: Collection[AppliedModule]) -> AppliedVerdict:
    """The verdict on the other modules, and a word on these."""
    if not left_out:
        return verdict
    modules = tuple(module for module in verdict.modules if module not in left_out)
    of = "text encoders" if any(is_for_text(module.name) for module in left_out) else "denoiser"
    word = Finding(
        "lora_part_left_out",
        "info",
        f"{len(left_out)} of the file's {len(verdict.modules)} modules {'is' if len(left_out) == 1 else 'are'} for the {of}, to which the LoRA was not applied.",
        {"modules": len(verdict.modules), "left_out": len(left_out)},
    )
    return replace(verdict, modules=modules, findings=(*applied_findings(modules), word))


def patches_of_file(
    path: object, verdict: LoraVerdict | None, keys: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[AppliedPatch, ...]]:
    """What a file's modules would change of some weights, as changes of strength 1. Never raises.

    Args:
        path: The file.
        verdict: Which weights its modules are for.
        keys: The shapes of the weights that are looked for, by the name that `verdict` has for them.
    """
    if verdict is None or not keys:
        return {}
    found: dict[str, tuple[AppliedPatch, ...]] = {}
    for key, patch in attempt(lambda: [*_patches_of_file(_source(path), verdict, keys)]).value or ():
        found[key] = (*found.get(key, ()), patch)
    return found


def _patches_of_file(
    path: Path | Mapping[str, Tensor], verdict: LoraVerdict, keys: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, AppliedPatch]]:
    matched = {
        module.name: module.layers for module in verdict.matched if not keys.keys().isdisjoint(module.layers)
    }
    with open_lora(path, check_finite=False, allow_broken=True) as lora:
        for name, layers in matched.items():
            change = lora.modules.get(name) or lora.changes.get(name)
            if change is None or not keys.keys() >= {*layers}:
                continue
            start = 0
            for key in layers:  # of a module that is several of the model's layers, one after the other
                rows = keys[key][0] if len(layers) > 1 else None
                patch = attempt(partial(_patch_of, change, key, keys[key], start, rows)).value
                start += rows or 0
                if patch is not None:
                    yield key, patch


def _patch_of(
    change: LoraFactors | WeightChange, key: str, shape: tuple[int, ...], start: int, rows: int | None
) -> AppliedPatch | None:
    if isinstance(change, LoraFactors):
        up = change.up if rows is None else change.up[start : start + rows]
        tensors = {"up": up, "down": change.down.reshape(-1, *shape[1:])}
        kind: AdapterType = "lora"
    elif isinstance(change, Adapter) and change.kind in ("loha", "lokr", "diff") and rows is None:
        kind = change.kind  # type: ignore[assignment]
        tensors = {name.partition("_")[2] or name: part for name, part in change.parts.items()}
    else:
        return None
    return AppliedPatch(
        key, kind, "unknown", "", "registered", scale=change.scale, tensors=tensors, weight_shape=shape
    )


def with_fused(
    path: object,
    verdict: LoraVerdict | None,
    on_model: AppliedVerdict,
    samples: Samples,
    rounded: Collection[str] = (),
    had_changes: Collection[str] = (),
) -> AppliedVerdict:
    """The verdict on what is on the models, with the modules that are found in the weights. Never raises.

    Args:
        path: The file.
        verdict: Which weights its modules are for.
        on_model: Which of them the adapters on the models account for.
        samples: The same elements of each weight before and now, by the name that `verdict` has for it.
        rounded: The weights that changed by rounding alone though no adapter was on them.
        had_changes: Those that had changes before: taking these out of a weight puts nothing into it.
    """
    if verdict is None or not (samples or rounded):
        return on_model
    left = {name: sample for name, sample in samples.items() if name not in rounded}
    fused = (
        attempt(lambda: dict(_fused_modules(_source(path), verdict, on_model, left, had_changes))).value or {}
    )
    of_rounded = (
        module for module in verdict.matched if module.layers and rounded and {*module.layers} <= {*rounded}
    )
    fused |= {
        module.name: AppliedModule(module.name, detail=ABSENCES["rounding"].format(key="its weight"))
        for module in of_rounded
    }
    if not fused:
        return on_model
    modules = tuple(fused.get(module.name, module) for module in on_model.modules)
    return replace(on_model, modules=modules, findings=applied_findings(modules))


def _fused_modules(
    path: Path | Mapping[str, Tensor],
    verdict: LoraVerdict,
    on_model: AppliedVerdict,
    samples: Samples,
    had_changes: Collection[str],
) -> Iterator[tuple[str, AppliedModule]]:
    layers = {module.name: module.layers for module in verdict.matched}
    with open_lora(path, check_finite=False, allow_broken=True) as lora:
        missing = {module.name for module in on_model.missing}
        for module in on_model.modules:
            key, *others = layers.get(module.name) or ("",)
            is_beside = module.states == ("lazy",) and module.strength is not None and key not in had_changes
            if others or key not in samples or not (is_beside or module.name in missing):
                continue
            strength = _fused_strength(lora, module.name, *samples[key])
            if strength is None:
                continue
            if is_beside:
                yield module.name, _in_weight_too(module, strength)
            else:
                yield module.name, AppliedModule(module.name, (key,), 1, ("merged",), FUSED, strength)


def _in_weight_too(module: AppliedModule, strength: float) -> AppliedModule:
    """A module that acts beside its weight, and is in it with a strength."""
    near = round(strength, _DIGITS_OF_FUSED)  # as far as the elements tell
    return replace(
        module,
        times=module.times + 1,
        states=(*module.states, "merged"),
        strength=(module.strength or 0.0) + near,
        strengths=(*module.strengths, near),
    )


def _fused_strength(lora: LoraFile, name: str, before: Tensor, after: Tensor) -> float | None:
    """How many times the change is in what became of the elements; None if it is not."""
    change = lora.modules.get(name)
    if change is None or before.shape != after.shape or len(before) == 0:
        return None
    expected = elements_of_change(change)
    change_seen = as_float64(after) - as_float64(before)
    lengths = float(torch.linalg.vector_norm(expected)) * float(torch.linalg.vector_norm(change_seen))
    if len(expected) != len(change_seen) or not lengths > 0.0:
        return None
    inner = float(expected @ change_seen)
    return inner / float(expected @ expected) if abs(inner) > _LEAST_COSINE_OF_FUSED * lengths else None


_DIGITS_OF_FUSED: Final = 3


def elements_of_change(change: LoraFactors) -> Tensor:
    """The elements of ΔW where `samples` looks."""
    columns = change.down.shape[1]
    where = positions(change.up.shape[0] * columns)
    rows, places = where // columns, where % columns
    products = as_float64(change.up)[rows] * as_float64(change.down)[:, places].mT
    return products.sum(1).mul(change.scale)


def host_of(*models: object) -> str:
    """`comfyui` if one of the models is its, else `diffusers`."""
    any_comfyui = any(attempt(lambda m=model: is_comfyui(m)).value for model in models)  # type: ignore[misc]
    return "comfyui" if any_comfyui else "diffusers"


def has_hooks(result: object) -> bool:
    """Whether a node gave ComfyUI's hooks, or conditioning with hooks: ((tensor, options), …), alone or among others."""
    outputs = result if isinstance(result, tuple) else (result,)
    return bool(attempt(lambda: any(_is_hooked(output) for output in outputs)).value)


def _is_hooked(output: object) -> bool:
    if isinstance(attribute(output, "hooks"), list):
        return True
    entries = sequence(output)
    return any(len(pair) > 1 and lookup(pair[1], "hooks") is not None for pair in map(sequence, entries))


def names_of_all(unet: object, clip: object) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The names that weights of the denoiser, and of the text encoders, have among those of all models together."""
    modules = _named_modules(unet, clip)
    names = shapes_of(modules) if modules else {}
    starts = [f"{name}." for name in modules]

    def named(key: str, own: list[str]) -> str:
        candidates = (key, *(start + key for start in (*own, "text_encoders.")))
        return next((name for name in candidates if name in names), key)

    return partial(named, own=starts[:1]), partial(named, own=starts[-1:])


def patch_analysis(applied: ModelPatches) -> PatchAnalysis:
    """Describe every change on a model; see `PatchAnalysis`.

    Args:
        applied: As read. Its tensors are looked at for NaN, Inf and likeness; an accelerator is waited for.
    """
    finite = _are_finite(applied.patches)
    by_key, by_source = applied.by_key(), applied.by_source()
    of_each = [patches for source in by_source.values() for patches in _by_key_of(source).values()]
    with norms_at_once(map(_acting, of_each), ()):
        loras = {name: _source_facts(patches, finite) for name, patches in by_source.items()}
    details = {key: _patch_details(patches, finite) for key, patches in by_key.items()}
    broken = [key for key, patches in by_key.items() if any(finite[id(p)].value is False for p in patches)]
    unknown = dict(applied.unavailable)
    return {
        "total_patched_keys": None if unknown and not by_key else len(by_key),
        "patch_details": details,
        "states": dict(Counter(patch.state for patch in applied.patches)),
        "adapter_types": dict(Counter(patch.adapter_type for patch in applied.patches)),
        "loras": loras,
        "failed": {
            p.key: p.state_reason or "no reason is known" for p in applied.patches if p.state == "failed"
        },
        "not_finite": broken,
        "applied_twice": applied_twice(by_key),
        "overlaps": overlaps_of(by_source),
        "unavailable": {"total_patched_keys": "; ".join(unknown.values())} if unknown else {},
    }


def _by_key_of(patches: Sequence[AppliedPatch]) -> dict[str, list[AppliedPatch]]:
    """The changes of each weight."""
    return ModelPatches(tuple(patches)).by_key()


def _acting(patches: Sequence[AppliedPatch]) -> tuple[AppliedPatch, ...]:
    return sort_patches(patches).acting


def _patch_details(patches: Sequence[AppliedPatch], finite: dict[int, Reading[bool]]) -> PatchDetails:
    first = patches[0]
    states = [patch.state for patch in patches]
    return {
        "strength_patch": first.strength,
        "patch_type": first.patch_type,
        "patch_data_shape": first.data_type,
        "patch_count": len({patch.index for patch in patches} | {None}) - 1,
        "adapter_type": first.adapter_type,
        "state": next((state for state in _STATES_BY_PRIORITY if state in states), first.state),
        "patches": [_one_patch(patch, finite[id(patch)]) for patch in patches],
    }


def _one_patch(patch: AppliedPatch, finite: Reading[bool]) -> OnePatch:
    """With the reasons about parts of the change that the dict does not hold, such as its offset."""
    facts = as_dict(OnePatch, patch, finite=finite)
    return {**facts, "unavailable": {**patch.unavailable, **facts["unavailable"]}}


def _source_facts(patches: Sequence[AppliedPatch], finite: dict[int, Reading[bool]]) -> SourceFacts:
    by_key = _by_key_of(patches)
    # The strength of such a bias has the factors' alpha / rank in it.
    without_biases = [patch for patch in patches if patch.host_names.get("diff") != UP_BIAS]
    effects = [effect_of(changes, None) for changes in by_key.values()]
    norms = [effect.delta_norm for effect in effects if effect.delta_norm is not None]
    why = next((effect.unavailable["delta_norm"] for effect in effects if effect.delta_norm is None), None)
    why = GIVES_BACK if any(map(took_from_weights, _acting(patches))) else why
    return as_dict(
        SourceFacts,
        keys=len(by_key),
        states=dict(Counter(patch.state for patch in patches)),
        adapter_types=dict(Counter(patch.adapter_type for patch in patches)),
        ranks=dict(sorted(Counter(patch.rank for patch in patches if patch.rank is not None).items())),
        strengths=sorted({one.strength for one in without_biases if one.strength is not None}),
        delta_norm=Reading(root_sum_square(norms) if why is None else None, why),
        relative_change=Reading(None, "the weights were not compared"),
        not_finite=[patch.key for patch in patches if finite[id(patch)].value is False],
    )


def with_relative_changes(
    loras: Mapping[str, SourceFacts],
    applied: ModelPatches,
    changes: Mapping[str, ValueChange],
    held: Mapping[str, Tensor],
    merged_before: Collection[str] = (),
) -> dict[str, SourceFacts]:
    """The facts of each LoRA with what it adds beside the weights that it is on, where all their norms are known.

    Args:
        loras: As `patch_analysis` gives them.
        applied: Of which they are.
        changes: Of the weights, by name.
        held: The weights as they are now, of which those that did not change are read, as far as that is no work.
        merged_before: Names of those that held merged changes at the baseline: their norm then is not that of the weight.
    """
    by_source = applied.by_source()
    merged = {patch.key for patch in applied.patches if patch.state not in ("lazy", "inactive")}
    found = dict(loras)
    for name, facts in loras.items():
        keys = {patch.key for patch in by_source.get(name, ())}
        to_read = keys - changes.keys() | (keys & {*merged_before} - merged)
        norms = {key: changes[key]["weight_norm"] for key in keys - to_read}
        if facts["delta_norm"] and to_read and to_read <= held.keys() - merged:
            norms |= _norms_of({key: held[key] for key in to_read})
        known = [norm for norm in norms.values() if norm is not None]
        below = root_sum_square(known)
        if facts["delta_norm"] is not None and len(known) == len(keys) and below > 0.0:
            why = {one: reason for one, reason in facts["unavailable"].items() if one != "relative_change"}
            found[name] = {**facts, "relative_change": facts["delta_norm"] / below, "unavailable": why}
    return found


def _norms_of(weights: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Norms of weights; none of what an accelerator would be waited for, and none of many."""
    few = sum(weight.nbytes for weight in weights.values()) <= _MOST_BYTES_READ
    if not few or any(weight.device.type != "cpu" for weight in weights.values()):
        return {}
    with norms_at_once((), weights.values()):
        return {key: attempt(partial(weight_norm, weight)).value for key, weight in weights.items()}


_MOST_BYTES_READ: Final = 2**28
"""Reading so much takes a tenth of a second."""


def _are_finite(patches: Sequence[AppliedPatch]) -> dict[int, Reading[bool]]:
    """By `id` whether strength, scale and tensors of each are finite, or why that is not known; one read of each device."""
    factors = {id(patch): (patch.strength or 0.0, patch.scale or 0.0) for patch in patches}
    return {
        patch: Reading(None, found.reason)
        if found.value is None
        else Reading(all(map(isfinite, [*factors[patch], *found.value])))
        for patch, found in read_extremes(patches).items()
    }


def read_extremes(patches: Sequence[AppliedPatch]) -> dict[int, Reading[list[float]]]:
    """By `id` the least and the largest number of each tensor of a patch: not finite if any number is not.

    Tensors that are alike are looked at together, and each device is read once.
    """
    told = attempt(begin_extremes(patches).result)
    return told.value or {id(patch): Reading(None, told.reason) for patch in patches}


def begin_extremes(patches: Sequence[AppliedPatch]) -> Pending[dict[int, Reading[list[float]]]]:
    """The same without waiting for an accelerator; the patches must live until it is there."""
    return once_a_look("extremes", patches, lambda: _begin_extremes(patches))


def _begin_extremes(patches: Sequence[AppliedPatch]) -> Pending[dict[int, Reading[list[float]]]]:
    told: dict[int, Reading[list[float]]] = {}
    floating: dict[int, list[Tensor]] = {}
    for patch in patches:
        why = _why_no_values(patch)
        if why is None:
            floating[id(patch)] = [t for t in patch.tensors.values() if has_extremes(t)]
        else:
            told[id(patch)] = Reading(None, why)
    alike: dict[object, dict[int, Tensor]] = {}
    for tensors in floating.values():
        for tensor in tensors:
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), {})[id(tensor)] = tensor
    ends: dict[int, Tensor] = {}
    reasons: dict[int, str | None] = {}
    for members in alike.values():
        found = attempt(lambda same=members: [*_ends([*same.values()])])  # type: ignore[misc]
        reasons |= dict.fromkeys(members, found.reason)
        ends |= zip(members, found.value or (), strict=found.value is not None)
    names = {patch: [id(tensor) for tensor in tensors] for patch, tensors in floating.items()}
    copied = attempt(lambda: _ends_by_device(ends))
    copies = copied.value or []

    def finished() -> dict[int, Reading[list[float]]]:
        pairs: dict[int, list[float]] = {}
        for own, copy in copies:
            pairs |= zip(own, copy.tensor.tolist(), strict=True)
        for patch, tensors in names.items():
            unread = next((reasons[tensor] for tensor in tensors if reasons[tensor]), copied.reason)
            known = [number for tensor in tensors for number in pairs.get(tensor, ())]
            told[patch] = Reading(None, unread) if unread else Reading(known)
        return told

    return Pending(finished, [copy for _, copy in copies])


def has_extremes(tensor: Tensor) -> bool:
    """Whether a tensor of a patch is among those that are looked at."""
    return tensor.numel() > 0 and tensor.is_floating_point()


def _ends_by_device(ends: Mapping[int, Tensor]) -> list[tuple[list[int], HostCopy]]:
    """The (2,) of each as one copy of (n, 2) from each device and dtype."""
    groups: dict[object, list[int]] = {}
    for name, pair in ends.items():
        groups.setdefault((pair.device, pair.dtype), []).append(name)
    return [(own, copy_to_host(torch.stack([ends[name] for name in own]))) for own in groups.values()]


def _why_no_values(patch: AppliedPatch) -> str | None:
    unread = next((patch.unavailable[name] for name in _UNREADABLE_PARTS if name in patch.unavailable), None)
    if unread is not None and not patch.tensors:
        return unread
    if any(tensor.is_meta for tensor in patch.tensors.values() if tensor.is_floating_point()):
        return "its tensors have no values: they are on the meta device"
    return None


def _ends(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """(2,) of each of tensors that are alike."""
    first = tensors[0]
    step = max(1, _MOST_BYTES_AT_ONCE // first.nbytes)
    with torch.no_grad():
        for start in range(0, len(tensors), step):
            some = tensors[start : start + step]
            values = (first.unsqueeze(0) if len(tensors) == 1 else torch.stack([*some])).flatten(1)
            values = values.to(torch.float32) if values.dtype.itemsize == 1 else values
            ends = torch.stack(torch.aminmax(values, dim=1), dim=1)
            yield from ends if ends.dtype == torch.float64 else ends.to(torch.float32)


_MOST_BYTES_AT_ONCE: Final = 1 << 24


def applied_twice(by_key: Mapping[str, Sequence[AppliedPatch]]) -> list[SameTwice]:
    """Changes of the same content that act more than once on one weight, whatever their strengths and names."""
    several = _several(by_key)
    found: dict[tuple[tuple[str, ...], str | None, bool], list[tuple[str, list[float]]]] = {}
    contents = contents_of(patch for patches in several.values() for patch in patches)
    for key, patches, left, why_nothing in alike(several, contents, begin_sums(several).result()):
        names = tuple(patch.source or "" for patch in patches)
        strengths = attempt(lambda same=left: _strengths(same)).value or []  # type: ignore[misc]
        found.setdefault((names, why_nothing, is_opposed(strengths)), []).append((key, strengths))
    return [
        {
            "sources": list(names),
            "keys": len(same),
            "example": same[0][0],
            "cancelled": why_nothing is not None,
            "why_nothing": why_nothing,
            "strengths": same[0][1],
        }
        for (names, why_nothing, _), same in found.items()
    ]


def _several(by_key: Mapping[str, Sequence[AppliedPatch]]) -> dict[str, Sequence[AppliedPatch]]:
    """Of each weight that has several changes, those that act; a merge's parts are one."""
    return {
        key: acting
        for key, patches in by_key.items()
        if len({patch.index for patch in patches} | {patch.source for patch in patches}) > 1
        and len(acting := sort_patches(patches).acting) > 1
    }


def cancelled_changes(applied: ModelPatches) -> Iterator[tuple[AppliedPatch, str]]:
    """The changes on a model that act and cancel each other, each with the verdict on them."""
    several = _several(applied.by_key())
    contents = contents_of(patch for patches in several.values() for patch in patches)
    for found in alike(several, contents, begin_sums(several).result()):
        if found.why_nothing is not None:
            yield from ((patch, found.why_nothing) for patch in found.patches)


def _strengths(same: Sequence[AppliedPatch]) -> list[float]:
    """Of each, at the scale of the first."""
    scale = scale_of_patch(same[0]) or 1.0
    return [strength_of(patch) * scale_of_patch(patch) / scale for patch in same]


class Alike(NamedTuple):
    """Changes of a weight that have the same contents (by `key_of`), or that sum to nothing.

    Attributes:
        key: The weight.
        patches: The changes.
        left: The same with the strengths that later changes leave of them.
        why_nothing: The verdict, if they sum to nothing.
    """

    key: str
    patches: Sequence[AppliedPatch]
    left: Sequence[AppliedPatch]
    why_nothing: str | None


def alike(acting: _ByKey, contents: Contents, nothing: Collection[str] = ()) -> Iterator[Alike]:
    """What is alike among the changes of each weight that act.

    Args:
        acting: By weight.
        contents: Of the changes.
        nothing: The weights on an accelerator whose changes sum to nothing, as `begin_sums` gives them.
    """
    several: dict[str, tuple[Sequence[AppliedPatch], Sequence[AppliedPatch]]] = {}
    for key, patches in acting.items():
        left, why_not = _left_by_later_ones(patches)
        by_content: dict[Content, list[int]] = {}
        for place, patch in enumerate(patches):
            content = contents.get(key_of(patch))
            if content is not None:
                by_content.setdefault(content, []).append(place)
        for places in by_content.values():
            if len(places) > 1:
                same = [left[place] for place in places]
                is_nothing = why_not is None and signed_patches(same, (), contents).is_nothing
                why_nothing = SAME_CANCELLED if is_nothing else None
                yield Alike(key, [patches[place] for place in places], same, why_nothing)
        if len(by_content) > 1 and why_not is None:
            several[key] = patches, left
    yield from _opposite(several, nothing)


def _left_by_later_ones(patches: Sequence[AppliedPatch]) -> tuple[list[AppliedPatch], str | None]:
    """The changes of a weight with what later ones leave of their strengths; or as they are, and why that is not known.

    A merge multiplies what was there before it, and has one index for all its parts.
    """
    left: list[AppliedPatch] = []
    times, after, index = 1.0, 1.0, None
    for patch in reversed(patches):
        if (
            patch.strength is None
            or patch.strength_model is None
            or needs_weight(replace(patch, strength_model=1.0))
        ):
            return [*patches], f"a {patch.adapter_type} change depends on the weight that is there"
        if patch.index != index:
            times, index = after, patch.index
        after *= patch.strength_model
        left.append(replace(patch, strength=patch.strength * times, strength_model=1.0))
    return left[::-1], None


SAME_CANCELLED: Final = "lora_cancelled"
OPPOSITE: Final = "lora_opposite"
"""The verdict on changes of which none is like another and whose sum is 0, such as a file's and its negation's."""


def _opposite(
    acting: Mapping[str, tuple[Sequence[AppliedPatch], Sequence[AppliedPatch]]], nothing: Collection[str]
) -> Iterator[Alike]:
    """Of each weight the changes that sum to nothing; none where those of the first weights all leave something."""
    found = 0
    for number, (key, (patches, left)) in enumerate(acting.items()):
        if number == _FIRST_SUMS and not found:
            return
        if key in nothing or attempt(lambda held=left: _sum_to_nothing(held)).value:  # type: ignore[misc]
            found += 1
            yield Alike(key, patches, left, OPPOSITE)


_FIRST_SUMS: Final = 8
_CANCELLED: Final = 1e-9


def _sum_to_nothing(patches: Sequence[AppliedPatch]) -> bool:
    """Whether products on the CPU cancel, by what their sum makes of one vector."""
    tensors = [tensor for patch in patches for tensor in patch.tensors.values()]
    if not all(map(is_product, patches)) or any(tensor.device.type != "cpu" for tensor in tensors):
        return False
    shape = own_shape(patches[0])
    vector = _vector(prod(shape[1:]))
    with torch.no_grad():
        factors = [factors_of(patch, shape) for patch in patches]
        terms = [one.weight * (one.up @ (one.down @ vector)) for one in factors]
    size = sum(float(term.norm()) for term in terms)
    return _is_nothing(float(torch.stack(terms).sum(0).norm()), size)


def _vector(length: int) -> Tensor:
    return torch.cos(torch.arange(1, length + 1, dtype=torch.float64))


def begin_sums(acting: _ByKey) -> Pending[frozenset[str]]:
    """The weights whose changes are products on an accelerator that cancel, as on the CPU. Does not wait.

    Weights of the same form are looked at together. A device without float64 tells nothing: its rounding is no 0.
    """
    forms: dict[object, dict[str, Sequence[AppliedPatch]]] = {}
    for key, patches in acting.items():
        left, why_not = _left_by_later_ones(patches)
        if why_not is None and (form := _form_on_device(left)) is not None:
            forms.setdefault(form, {})[key] = left
    sums = [(key, found) for alike in forms.values() for key, found in _sums_of(alike)]
    by_device: dict[torch.device, list[tuple[list[str], Tensor]]] = {}
    for keys, found in sums:
        by_device.setdefault(found.device, []).append((keys, found))
    copies = [
        ([key for keys, _ in some for key in keys], copy_to_host(torch.cat([found for _, found in some])))
        for some in by_device.values()
    ]

    def finished() -> frozenset[str]:
        told = [zip(keys, copy.tensor.tolist(), strict=True) for keys, copy in copies]
        return frozenset(key for pairs in told for key, (whole, size) in pairs if _is_nothing(whole, size))

    return Pending(finished, [copy for _, copy in copies])


def _is_nothing(whole: float, size: float) -> bool:
    return 0 < size < inf and whole <= _CANCELLED * size


def _form_on_device(patches: Sequence[AppliedPatch]) -> object | None:
    """What several products on one accelerator share with those of other weights; None of what is no such thing."""
    parts = [patch.tensors.get(name) for patch in patches for name in ("up", "down")]
    known = [part for part in parts if part is not None]
    are_products = all(
        is_product(patch) and patch.offset is None and patch.tensors.keys() == {"up", "down"}
        for patch in patches
    )
    devices = {part.device for part in known}
    if not are_products or len(devices) != 1 or next(iter(devices)).type in ("cpu", "meta"):
        return None
    return tuple((part.shape, part.dtype, part.device) for part in known)


def _sums_of(alike: Mapping[str, Sequence[AppliedPatch]]) -> Iterator[tuple[list[str], Tensor]]:
    """(n, 2) of some weights of one form: the size of what their sum makes of a vector, and of what its terms do."""
    first = next(iter(alike.values()))
    nbytes = 8 * sum(part.numel() for patch in first for part in patch.tensors.values())
    names, step = [*alike], max(1, _MOST_BYTES_AT_ONCE // max(nbytes, 1))
    for start in range(0, len(names), step):
        some = names[start : start + step]
        found = attempt(lambda keys=some: _sums([alike[key] for key in keys])).value  # type: ignore[misc]
        if found is not None:
            yield some, found


def _sums(weights: Sequence[Sequence[AppliedPatch]]) -> Tensor:
    device = weights[0][0].tensors["up"].device
    terms: list[Tensor] = []
    with torch.no_grad():
        for place in range(len(weights[0])):
            patches = [patches[place] for patches in weights]
            ups, downs = (
                torch.stack([patch.tensors[name].detach() for patch in patches]).flatten(2).double()
                for name in ("up", "down")
            )
            vector = copy_to_device(_vector(downs.shape[2]), device)
            scales = [strength_of(patch) * scale_of_patch(patch) for patch in patches]
            by = copy_to_device(torch.tensor(scales, dtype=torch.float64), device)
            terms.append(by.unsqueeze(1) * (ups @ (downs @ vector).unsqueeze(2)).squeeze(2))
        norms = torch.stack([term.norm(dim=1) for term in terms]).sum(0)
        return torch.stack([torch.stack(terms).sum(0).norm(dim=1), norms], dim=1)


def overlaps_of(by_source: Mapping[str, Sequence[AppliedPatch]]) -> list[dict[str, Any]]:
    """The overlap of every two LoRAs (of the first six), with the ten weights where it is largest and their angles.

    Two usual LoRAs are compared on every weight that both change. Where that would take too long, every second,
    third … weight stands for all; `unavailable["keys"]` says so.
    """
    acting = {
        name: ModelPatches(tuple(sort_patches(patches).acting)).by_key()
        for name, patches in by_source.items()
    }
    names = [name for name, patches in acting.items() if patches][:_MOST_SOURCES]
    pairs = [_Pair(a, b, acting[a], acting[b]) for a, b in combinations(names, 2)]
    compared = [_to_compare(pair, _MOST_OVERLAP_PRODUCTS // len(pairs)) for pair in pairs]
    bases: dict[tuple[int, ...], ChangeBases] = {}
    return [
        _overlap_of_two(pair, step, both, bases)
        for pair, (step, *_), both in zip(
            pairs, compared, overlaps([(a, b) for _, a, b in compared]), strict=True
        )
    ]


class _Pair(NamedTuple):
    """Two LoRAs: their names, and the changes of each weight that act."""

    a: str
    b: str
    of_a: _ByKey
    of_b: _ByKey


def _to_compare(pair: _Pair, most_products: int) -> tuple[int, list[AppliedPatch], list[AppliedPatch]]:
    """Every how manieth weight is compared, and the changes of these."""
    keys = list(dict.fromkeys((*pair.of_a, *pair.of_b)))
    step = max(1, -(-sum(_products(pair.of_a, pair.of_b, key) for key in keys) // most_products))
    a, b = ([patch for key in keys[::step] for patch in side.get(key, ())] for side in (pair.of_a, pair.of_b))
    return step, a, b


def _overlap_of_two(
    pair: _Pair, step: int, both: LoraOverlap, bases: dict[tuple[int, ...], ChangeBases]
) -> dict[str, Any]:
    a, b, of_a, of_b = pair
    if sum(known.columns.nbytes + known.rows.nbytes for known in bases.values()) > _MOST_BYTES_OF_BASES:
        bases.clear()
    count = len(of_a.keys() | of_b.keys())
    figures = {name: getattr(both, name) for name in ("overall", "columns", "rows", "chance", "cosine")}
    nothing = both.unavailable.get("overall", "it could not be calculated")
    unavailable = {name: nothing for name, value in figures.items() if value is None}
    unread = [why for name, why in both.unavailable.items() if name not in figures]
    if unread:
        unavailable["keys"] = f"{len(unread)} of {count} weights could not be compared: {unread[0]}"
    elif step > 1:
        unavailable["keys"] = (
            f"1 in {step} of {count} weights was compared: comparing all would take too long"
        )
    largest = []
    for weight in sorted(both.keys, key=lambda weight: -weight.overall)[:_MOST_KEYS]:
        columns, rows = angles_of(of_a[weight.key], of_b[weight.key], bases)
        largest.append(
            {
                "key": weight.key,
                "overall": weight.overall,
                "cosine": weight.cosine,
                "column_angles": list(columns)[:_MOST_ANGLES],
                "row_angles": list(rows)[:_MOST_ANGLES],
            }
        )
    return {
        "a": a,
        "b": b,
        **figures,
        "shared_keys": len(of_a.keys() & of_b.keys()),
        "compared_keys": len(both.keys),
        "only_a": len(of_a.keys() - of_b.keys()),
        "only_b": len(of_b.keys() - of_a.keys()),
        "largest": largest,
        "unavailable": unavailable,
    }


def _products(of_a: _ByKey, of_b: _ByKey, key: str) -> int:
    """About how many multiplications the comparison of a weight takes: (rank + rank)² · (out + in)."""
    if key not in of_a or key not in of_b:
        return 0
    both = [*of_a[key], *of_b[key]]
    shape = next((patch.weight_shape for patch in both if patch.weight_shape), (0,))
    return rank_together(both) ** 2 * (shape[0] + prod(shape[1:]))
