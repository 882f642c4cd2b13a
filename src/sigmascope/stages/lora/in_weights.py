"""Modules of a LoRA file that are in the weights while no adapter is left to tell of them: fused, then unloaded.

A baseline has a thousand elements of each weight. What a plain change makes of just these is known from its factors,
Δᵢⱼ = s · upᵢ · downⱼ, so that the file can be looked for in what became of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.precision import in_double
from sigmascope.lora.verdict.applied_findings import applied_findings
from sigmascope.lora.verdict.applied_verdict import AppliedModule, AppliedVerdict
from sigmascope.lora.verdict.lora_verdict import LoraVerdict
from sigmascope.probes.samples import positions
from sigmascope.stages.host_reading import read_host

_ALIKE: Final = 0.5
"""Cosine between what became of the elements and the change; of two unrelated ones it is below 0.1.

Other LoRAs that were fused too, and rounding to bfloat16, keep it below 1.
"""
FUSED: Final = "the weight has changed by it, and no adapter is left"

Samples = Mapping[str, tuple[Tensor, Tensor]]


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
    found = read_host(lambda: dict(_found(Path(path), verdict, on_model, samples))).value  # type: ignore[arg-type]
    if not found:
        return on_model
    modules = tuple(found.get(module.name, module) for module in on_model.modules)
    return replace(on_model, modules=modules, findings=applied_findings(modules))


def fused_keys(on_model: AppliedVerdict | None) -> frozenset[str]:
    """Names of the weights that modules were found in."""
    modules = () if on_model is None else on_model.there
    return frozenset(key for module in modules if module.state_reason == FUSED for key in module.keys)


def _found(
    path: Path, verdict: LoraVerdict, on_model: AppliedVerdict, samples: Samples
) -> Iterator[tuple[str, AppliedModule]]:
    layers = {module.name: module.layers for module in verdict.matched}
    with open_any(path, check_finite=False) as lora:
        for module in on_model.missing:
            key, *others = layers.get(module.name) or ("",)
            strength = None if others or key not in samples else _strength(lora, module.name, *samples[key])
            if strength is not None:
                yield module.name, AppliedModule(module.name, (key,), 1, ("merged",), FUSED, strength)


def _strength(lora: LoraFile, name: str, before: Tensor, after: Tensor) -> float | None:
    """How many times the change is in what became of the elements; None if it is not."""
    change = lora.modules.get(name)
    if change is None or before.shape != after.shape or len(before) == 0:
        return None
    expected = _elements(change)
    found = in_double(after) - in_double(before)
    lengths = float(torch.linalg.vector_norm(expected)) * float(torch.linalg.vector_norm(found))
    if len(expected) != len(found) or not lengths > 0.0:
        return None
    inner = float(expected @ found)
    return inner / float(expected @ expected) if abs(inner) > _ALIKE * lengths else None


def _elements(change: LoraFactors) -> Tensor:
    """The elements of ΔW where `samples` looks."""
    columns = change.down.shape[1]
    where = positions(change.up.shape[0] * columns)
    rows, places = where // columns, where % columns
    products = in_double(change.up)[rows] * in_double(change.down)[:, places].mT
    return products.sum(1).mul(change.scale)
