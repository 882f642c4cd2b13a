"""The denoiser's weights stored in float8 and widened layer by layer as they are used."""

import re
from typing import Any, Final

import torch
from torch import nn

from sigmascope import units
from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.reckoning import main_dtype, nbytes_of
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.probes.set_up import layerwise_casting
from sigmascope.records.arithmetic import MIB

LAYERWISE_CASTING: Final = "layerwise_casting"
_SKIPPED: Final = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
"""What diffusers leaves as it is in any model, beside the patterns of each class."""
_CAST: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear, nn.Embedding,
)  # fmt: skip


def consider_layerwise_casting(found: Circumstances) -> Considered:
    """Where a denoiser does not fit on the device by itself."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _casting_of(found, name, model)


def apply_layerwise_casting(pipeline: Any, choice: Choice) -> None:
    """Cast, and hook each layer to widen and narrow its weights around its call."""
    model: Any = models_of(pipeline)[choice.component]
    compute = main_dtype(
        model
    )  # as it is now: a measurement may have dropped the choice that was to change it
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=compute)


def _casting_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.layerwise_casting
    if asked is False:
        return NotTaken(LAYERWISE_CASTING, name, "switched off")
    if not hasattr(model, "enable_layerwise_casting"):
        return NotTaken(LAYERWISE_CASTING, name, f"{type(model).__name__} does not offer it")
    if layerwise_casting(model):
        return NotTaken(LAYERWISE_CASTING, name, "it is on already")
    if found.has("quantisation"):
        return NotTaken(LAYERWISE_CASTING, name, "the weights are quantised")
    if asked == "auto":
        refusal = found.why_not(LAYERWISE_CASTING, name, "precision") or _casting_not_needed(
            found, name, model
        )
        if refusal is not None:
            return refusal
    return _casting_choice(found, name, model)


def _casting_not_needed(found: Circumstances, name: str, model: nn.Module) -> NotTaken | None:
    nbytes, room = found.weights[name], found.room_bytes
    if room is None:
        return NotTaken(LAYERWISE_CASTING, name, f"how much memory {found.hardware.device} has is not known")
    if nbytes + found.work_bytes <= room:
        words = f"{units.mib(nbytes)} MB of weights and {units.mib(found.work_bytes)} MB at work are in {units.mib(room)} MB"
        return NotTaken(LAYERWISE_CASTING, name, f"it fits by itself: {words}")
    cast = nbytes - saved_bytes(model, _itemsize(found, name))
    if cast + found.work_bytes > room:
        words = f"{units.mib(cast)} MB of weights and {units.mib(found.work_bytes)} MB at work, in {units.mib(room)} MB"
        return NotTaken(LAYERWISE_CASTING, name, f"it would not fit even so: {words}")
    return None


def _casting_choice(found: Circumstances, name: str, model: nn.Module) -> Choice:
    compute = str(found.dtypes.get(name, torch.float32)).removeprefix("torch.")
    before = found.weights[name]
    found.weights[name] = before - saved_bytes(model, _itemsize(found, name))
    return Choice(
        LAYERWISE_CASTING,
        name,
        f"pipe.{name}.enable_layerwise_casting(torch.float8_e4m3fn, torch.{compute})",
        f"{units.mib(before)} MB of weights become about {units.mib(found.weights[name])} MB.",
        "memory; a few per cent of time for widening",
        "memory",
        "precision",
        {},
        {"mb_before": before / MIB, "mb_after": found.weights[name] / MIB},
        necessary=found.config.layerwise_casting == "auto",
        ram_mb=nbytes_of(model) / MIB,
    )


def _itemsize(found: Circumstances, name: str) -> int:
    return found.dtypes.get(name, torch.float32).itemsize


def saved_bytes(model: nn.Module, itemsize: int) -> int:
    """Bytes that a model's layers lose by casting; diffusers leaves embeddings of place and norms as they are.

    Args:
        model: The denoiser.
        itemsize: Bytes of an element before.
    """
    own = getattr(model, "_skip_layerwise_casting_patterns", None) or ()
    skipped = (*_SKIPPED, *own, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    layers = [
        layer
        for path, layer in model.named_modules()
        if isinstance(layer, _CAST)
        and not any(re.search(one, part) for part in _prefixes(path) for one in skipped)
    ]
    return sum(p.numel() * (itemsize - 1) for layer in layers for p in layer.parameters(recurse=False))


def _prefixes(path: str) -> list[str]:
    """A module's path and those of the modules around it."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


LAYERWISE_CASTING_KIND: Final = Kind(
    LAYERWISE_CASTING, consider_layerwise_casting, apply_layerwise_casting, frozenset({"dtype"}), narrows=True
)
