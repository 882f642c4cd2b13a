"""Prove a LoRA: measure how far base + LoRA is from the tuned model, on the factors as stored."""

import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import torch

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.change_findings import counted, pair_findings, uncovered_changes
from sigmascope.lora.decompose import reconstruction_error
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats import load_lora
from sigmascope.lora.layer_names import layer_order, write_layer_names
from sigmascope.lora.module_errors import ModuleError
from sigmascope.lora.pairs import CheckpointPair, open_pair
from sigmascope.lora.provenance import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.validation_report import ValidationReport
from sigmascope.progress import Progress, no_progress
from sigmascope.records.finding import Finding

__all__ = ["ModuleError", "ValidationReport", "validate_lora", "write_layer_names"]

_CPU = torch.device("cpu")


def validate_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    lora: str | PathLike[str],
    *,
    progress: Progress = no_progress,
) -> ValidationReport:
    """Compare base + LoRA with the tuned model in every Linear and Conv2d layer of the denoiser.

    The error of a layer is ‖ΔW − s·BA‖ / ‖ΔW‖ with ΔW = tuned − base, sums in float64. It does not come
    from the LoRA's metadata, so it holds for LoRAs of any origin (SPEC section 7).

    Args:
        base: Checkpoint that the LoRA is put on.
        tuned: Checkpoint that it should reproduce.
        lora: LoRA file of any format that `load_lora` reads.
        progress: Told after each layer.

    Returns:
        The errors, the success rate, and what does not fit.

    Raises:
        ModelMismatchError: The checkpoints do not belong together, or nothing differs between them.
        CheckpointError: A file cannot be read.
        LoraFormatError: The LoRA's keys or shapes are not understood.
        NonFiniteError: NaN or Inf in one of the three.
    """
    started = time.perf_counter()
    file = load_lora(Path(lora))
    with open_pair(base, tuned) as pair:
        measured = _measure_layers(pair, file, progress)
        if all(module.delta_norm == 0 for module in measured):
            raise ModelMismatchError(
                f"{base} and {tuned} hold the same weights in all {len(pair.layers)} Linear and Conv2d layers: "
                "there is no change to compare the LoRA with.",
                hint="Give the fine-tuned checkpoint as --tuned_model_path.",
            )
        strangers = _unmatched(pair, file)
        modules = sorted([*measured, *strangers], key=lambda module: layer_order(module.name))
        norms = [module.delta_norm for module in measured]
        findings = [*_lora_findings(pair, file), *pair_findings(pair, uncovered_changes(pair), norms)]
        unchanged = len(pair.layers) - len(measured)
    return ValidationReport(
        base=Path(base),
        tuned=Path(tuned),
        lora=Path(lora),
        modules=tuple(modules),
        unchanged_layers=unchanged,
        findings=tuple(findings),
        seconds=time.perf_counter() - started,
    )


def _measure_layers(pair: CheckpointPair, lora: LoraFile, progress: Progress) -> list[ModuleError]:
    measured = []
    for done, layer in enumerate(pair.layers, start=1):
        module = _measure(pair, layer, lora.modules.get(layer))
        if module is not None:
            measured.append(module)
        progress(done, len(pair.layers), layer)
    return measured


def _measure(pair: CheckpointPair, layer: str, factors: LoraFactors | None) -> ModuleError | None:
    """Measure one layer; None when it did not change and the LoRA leaves it alone."""
    change = pair.layer_change(layer, _CPU)
    shape, norm = pair.shape(layer), change.delta_norm
    if factors is None:
        return ModuleError(layer, shape, "missing", None, norm, norm) if norm > 0 else None
    if factors.weight_shape != shape:
        detail = f"the weight is {shape}, the LoRA's module is for {factors.weight_shape}"
        return ModuleError(layer, shape, "wrong_shape", factors.rank, norm, norm, detail)
    error = reconstruction_error(change.delta, factors)
    return ModuleError(layer, shape, "applied", factors.rank, norm, error)


def _unmatched(pair: CheckpointPair, lora: LoraFile) -> Sequence[ModuleError]:
    """The LoRA's modules for which the model has no layer. They reach nothing, so their error is 0."""
    layers = frozenset(pair.layers)
    return [
        ModuleError(
            name, factors.weight_shape, "unmatched", factors.rank, 0.0, 0.0, "the model has no such layer"
        )
        for name, factors in lora.modules.items()
        if name not in layers
    ]


def _lora_findings(pair: CheckpointPair, lora: LoraFile) -> list[Finding]:
    return [*_other_base(pair, lora), *_unused_keys(lora)]


def _other_base(pair: CheckpointPair, lora: LoraFile) -> list[Finding]:
    made_from = lora.metadata.get(BASE_FINGERPRINT)
    if made_from is None or made_from == denoiser_fingerprint(pair.base):
        return []
    name = lora.metadata.get("sigmascope_base", "another file")
    return [
        Finding(
            id="lora.other_base",
            severity="warning",
            message=f"The LoRA was made from another base ({name}) than {pair.base.path}.",
            evidence={"made_from": name, "base": str(pair.base.path)},
            advice="Validate and use it with the base that it was made from.",
        )
    ]


def _unused_keys(lora: LoraFile) -> list[Finding]:
    if not lora.unused_keys:
        return []
    first = lora.unused_keys[0]
    return [
        Finding(
            id="lora.unused_keys",
            severity="warning",
            message=f"The LoRA file holds {counted(len(lora.unused_keys), 'tensor')} of no module, first {first}.",
            evidence={"tensors": len(lora.unused_keys), "key": first},
        )
    ]
