"""How much of a model's weights a LoRA changes, ‖ΔW‖ / ‖W‖, from files: one weight in memory at a time."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError, SigmascopeError
from sigmascope.lora.effect.key_effect import Effect
from sigmascope.lora.effect.weights import finite, weight_norm
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.norms import root_sum_square
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.lora.verdict.module_verdict import ModuleVerdict
from sigmascope.progress import Progress, no_progress


def relative_strengths(
    lora: str | PathLike[str], verdict: LoraVerdict, model: Checkpoint, *, progress: Progress = no_progress
) -> Mapping[str, Effect]:
    """Measure every module that matches beside the weights that it changes, at LoRA strength 1.

    Args:
        lora: The file.
        verdict: Of this file and model, with values.
        model: The open checkpoint, of which only the weights that the LoRA changes are read.
        progress: Told after each module.

    Returns:
        The effects by the file's module names. A fused module's weight is all that it changes together.
    """
    found: dict[str, Effect] = {}
    with open_any(Path(lora)) as file:
        for module in verdict.matched:
            found[module.name] = _effect(file, module, model)
            progress(len(found), len(verdict.matched), module.name)
    return found


def _effect(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> Effect:
    try:
        whole = root_sum_square([weight_norm(model.tensor(key)) for key in module.layers])
        delta = module.norm if module.norm is not None else _beside_base(lora, module, model)
    except SigmascopeError as error:
        reason = error.message
        return Effect(module.norm, None, None, True, 1, unavailable=_none_of(module.norm, reason))
    if whole == 0.0:
        return Effect(delta, None, whole, True, 1, unavailable={"relative_change": "the weight is all zeros"})
    return Effect(delta, delta / whole, whole, True, 1)


def _beside_base(lora: LoraFile, module: ModuleVerdict, model: Checkpoint) -> float:
    """‖ΔW‖ of a change that depends on the weight."""
    if module.finite is False:
        raise LoraFormatError("the module holds NaN or Inf.")
    if len(module.layers) != 1:
        raise LoraFormatError(f"a {module.kind} change of several weights is not measured.")
    base = model.tensor(module.layers[0]).to(torch.float64)
    return finite(lora.changes[module.name].frobenius_norm(base))


def _none_of(norm: float | None, reason: str) -> dict[str, str]:
    missing = ("weight_norm", "relative_change") if norm is not None else ("delta_norm", "relative_change")
    return dict.fromkeys(missing, reason)
