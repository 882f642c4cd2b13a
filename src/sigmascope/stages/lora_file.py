"""A LoRA's file: what it says of itself, whether it is for the models, and what of it is on them.

Modules may be in the weights while no adapter is left to tell of them: fused, then unloaded (`with_fused`). A
baseline has a thousand elements of each weight. What a plain change makes of just these is known from its
factors, Δᵢⱼ = s · upᵢ · downⱼ, so that the file can be looked for in what became of them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from sigmascope.files import short_path
from sigmascope.lora.compatibility import judge_lora, shapes_of
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile, family_in, read_training_facts
from sigmascope.lora.linalg import as_float64
from sigmascope.lora.load_check import AppliedModule, AppliedVerdict, applied_findings, judge_applied
from sigmascope.lora.module_names import parse_name
from sigmascope.lora.reader import open_any_kind
from sigmascope.lora.verdict import LoraVerdict
from sigmascope.probes.comfyui_patcher import is_comfyui
from sigmascope.probes.fingerprints import positions
from sigmascope.probes.reading import Reading, read_host
from sigmascope.records.memory import mib
from sigmascope.records.run import Finding
from sigmascope.stages.model_snapshot import Applied, module_of, parts_of
from sigmascope.stages.schema import LoraFileFacts

# What only the contents of the file tell.
_INSIDE = ("format", "rank", "alpha", "modules", "base_hint")
NOT_GIVEN = "no file was given"
_ALIKE: Final = 0.5
"""Cosine between what became of the elements and the change; of two unrelated ones it is below 0.1.

Other LoRAs that were fused too, and rounding to bfloat16, keep it below 1.
"""
FUSED: Final = "the weight has changed by it, and no adapter is left"
Samples = Mapping[str, tuple[Tensor, Tensor]]


def lora_file_facts(path: object) -> LoraFileFacts:
    """Name, size, format, ranks, alphas and base model of a LoRA file. Never raises.

    Args:
        path: A file, a folder that holds one, or None.
    """
    facts = _no_facts()
    if path is None:
        facts["unavailable"] = dict.fromkeys(("filename", "file_exists", "file_size", *_INSIDE), NOT_GIVEN)
        return facts
    place = read_host(lambda: Path(path))  # type: ignore[arg-type]
    if place.value is None:
        reason = f"{type(path).__name__} is no path"
        facts["unavailable"] = dict.fromkeys(("filename", "file_exists", "file_size", *_INSIDE), reason)
        return facts
    facts["filename"] = place.value.name
    exists = read_host(place.value.exists)
    facts["file_exists"] = bool(exists.value)
    if not exists.value:
        reason = exists.reason or f"{short_path(place.value)} does not exist"
        facts["unavailable"] = dict.fromkeys(("file_size", *_INSIDE), reason)
        return facts
    found = place.value
    inside = read_host(lambda: _read_inside(found, facts))
    facts["file_size"] = mib(read_host(lambda: _bytes_of(found)).value)
    if inside.reason is not None:
        facts["unavailable"] |= dict.fromkeys(_INSIDE, inside.reason)
    return facts


def _no_facts() -> LoraFileFacts:
    return {
        "filename": None,
        "file_exists": None,
        "file_size": None,
        "format": None,
        "rank": None,
        "ranks": {},
        "alpha": None,
        "alphas": {},
        "modules": None,
        "base_hint": None,
        "unavailable": {},
    }


def _read_inside(path: Path, facts: LoraFileFacts) -> None:
    with open_any_kind(path, check_finite=False) as lora:
        ranks = Counter(rank for name in lora.names if (rank := lora.rank_of(name)) is not None)
        alphas = Counter(alpha for name in lora.modules if (alpha := _alpha(lora, name)) is not None)
        facts["format"] = lora.format
        facts["modules"] = len(lora.names)
        facts["ranks"], facts["alphas"] = dict(sorted(ranks.items())), dict(sorted(alphas.items()))
        facts["rank"] = next((rank for rank, _ in ranks.most_common(1)), None)
        facts["alpha"] = next((alpha for alpha, _ in alphas.most_common(1)), None)
        facts["base_hint"] = _base_hint(lora.metadata)
    reasons = {
        "rank": "none of its changes has one",
        "alpha": "none of its changes has one",
        "base_hint": "its header names no base model",
    }
    facts["unavailable"] |= {name: why for name, why in reasons.items() if facts[name] is None}  # type: ignore[literal-required]


def _alpha(lora: LoraFile, name: str) -> float | None:
    return read_host(lambda: lora.modules[name].alpha).value


def _base_hint(metadata: Mapping[str, str]) -> str | None:
    said = read_training_facts(metadata).training
    return family_in(metadata) or said.get("base model") or said.get("base version")


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def judged(path: object, unet: object, clip: object) -> Reading[LoraVerdict]:
    """Match the modules of a LoRA file with the layers of both models. Never raises.

    Args:
        path: The file; None if it was not given.
        unet: The denoiser, in any form that `parts_of` knows.
        clip: The text encoders.
    """
    if path is None:
        return Reading(None, "no file was given")
    modules = read_host(lambda: _named_modules(unet, clip))
    if not modules.value:
        return Reading(None, modules.reason or "no model was given")
    found = modules.value
    return read_host(lambda: judge_lora(Path(path), found))  # type: ignore[arg-type]


def _named_modules(unet: object, clip: object) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for model, model_type, usual in ((unet, "UNet", "unet"), (clip, "CLIP", "text_encoder")):
        for prefix, part in parts_of(model, model_type).items():
            module = module_of(part)
            if module is not None:
                found[prefix.rstrip(".") or _name_of(module, usual)] = module
    return found


def _name_of(module: nn.Module, usual: str) -> str:
    is_transformer = usual == "unet" and "Transformer" in type(module).__name__
    return "transformer" if is_transformer else usual


def judged_applied(
    path: object, unet: object, clip: object, on_unet: Applied, on_clip: Applied
) -> Reading[AppliedVerdict]:
    """Find the modules of a LoRA file among the changes that are on both models. Never raises.

    Args:
        path: The file; None if it was not given.
        unet: The denoiser; None where the LoRA was not for it, and its modules are left out then.
        clip: The text encoders, likewise.
        on_unet: The changes on the denoiser.
        on_clip: Those on the text encoders.
    """
    if path is None:
        return Reading(None, "no file was given")
    return read_host(lambda: _judge_applied(Path(path), unet, clip, on_unet, on_clip))  # type: ignore[arg-type]


def _judge_applied(
    path: Path, unet: object, clip: object, on_unet: Applied, on_clip: Applied
) -> AppliedVerdict:
    modules = _named_modules(unet, clip)
    names = names_of_all(unet, clip)
    patches = [
        patch if names[side](patch.key) == patch.key else replace(patch, key=names[side](patch.key))
        for side, applied in enumerate((on_unet, on_clip))
        for patch in applied.patches
    ]
    found = judge_applied(path, patches, modules or None)
    left_out = [module for module in found.missing if (clip if _is_for_text(module.name) else unet) is None]
    return _without(found, left_out) if modules else found


def _is_for_text(name: str) -> bool:
    return any(part.startswith("text_encoder") for part in parse_name(name).parts)


def _without(found: AppliedVerdict, left_out: Collection[AppliedModule]) -> AppliedVerdict:
    """The verdict on the other modules, and a word on these."""
    if not left_out:
        return found
    modules = tuple(module for module in found.modules if module not in left_out)
    of = "text encoders" if any(_is_for_text(module.name) for module in left_out) else "denoiser"
    told = Finding(
        "lora_part_left_out",
        "info",
        f"{len(left_out)} of the file's {len(found.modules)} modules are for the {of}, which the LoRA was not applied to.",
        {"modules": len(found.modules), "left_out": len(left_out)},
    )
    return replace(found, modules=modules, findings=(*applied_findings(modules), told))


def with_fused(
    path: object, verdict: LoraVerdict | None, on_model: AppliedVerdict | None, samples: Samples
) -> AppliedVerdict | None:
    """The verdict on what is on the models, with the modules that are found in the weights. Never raises.

    Args:
        path: The file.
        verdict: Which weights its modules are for.
        on_model: Which of them the adapters on the models account for.
        samples: The same elements of each weight before and now, by the name that `verdict` has for it.
    """
    if verdict is None or on_model is None or not on_model.missing:
        return on_model
    found = read_host(lambda: dict(_fused_modules(Path(path), verdict, on_model, samples))).value  # type: ignore[arg-type]
    if not found:
        return on_model
    modules = tuple(found.get(module.name, module) for module in on_model.modules)
    return replace(on_model, modules=modules, findings=applied_findings(modules))


def _fused_modules(
    path: Path, verdict: LoraVerdict, on_model: AppliedVerdict, samples: Samples
) -> Iterator[tuple[str, AppliedModule]]:
    layers = {module.name: module.layers for module in verdict.matched}
    with open_any_kind(path, check_finite=False) as lora:
        for module in on_model.missing:
            key, *others = layers.get(module.name) or ("",)
            strength = (
                None if others or key not in samples else _fused_strength(lora, module.name, *samples[key])
            )
            if strength is not None:
                yield module.name, AppliedModule(module.name, (key,), 1, ("merged",), FUSED, strength)


def _fused_strength(lora: LoraFile, name: str, before: Tensor, after: Tensor) -> float | None:
    """How many times the change is in what became of the elements; None if it is not."""
    change = lora.modules.get(name)
    if change is None or before.shape != after.shape or len(before) == 0:
        return None
    expected = _elements_of_change(change)
    found = as_float64(after) - as_float64(before)
    lengths = float(torch.linalg.vector_norm(expected)) * float(torch.linalg.vector_norm(found))
    if len(expected) != len(found) or not lengths > 0.0:
        return None
    inner = float(expected @ found)
    return inner / float(expected @ expected) if abs(inner) > _ALIKE * lengths else None


def _elements_of_change(change: LoraFactors) -> Tensor:
    """The elements of ΔW where `samples` looks."""
    columns = change.down.shape[1]
    where = positions(change.up.shape[0] * columns)
    rows, places = where // columns, where % columns
    products = as_float64(change.up)[rows] * as_float64(change.down)[:, places].mT
    return products.sum(1).mul(change.scale)


def fused_keys(on_model: AppliedVerdict | None) -> frozenset[str]:
    """Names of the weights that modules were found in."""
    modules = () if on_model is None else on_model.there
    return frozenset(key for module in modules if module.state_reason == FUSED for key in module.keys)


def touched_keys(verdict: LoraVerdict | None) -> frozenset[str]:
    """Names of the weights that the matched modules change, as the verdict's models name them."""
    return frozenset(name for module in verdict.matched for name in module.layers) if verdict else frozenset()


def host_of(*models: object) -> str:
    """`comfyui` if one of the models is its, else `diffusers`."""
    found = any(read_host(lambda m=model: is_comfyui(m)).value for model in models)  # type: ignore[misc]
    return "comfyui" if found else "diffusers"


def names_of_all(unet: object, clip: object) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """The names that weights of the denoiser, and of the text encoders, have among those of all models together."""
    modules = _named_modules(unet, clip)
    names = shapes_of(modules) if modules else {}
    starts = [f"{name}." for name in modules]

    def named(key: str, own: list[str]) -> str:
        candidates = (key, *(start + key for start in (*own, "text_encoders.")))
        return next((name for name in candidates if name in names), key)

    return partial(named, own=starts[:1]), partial(named, own=starts[-1:])
