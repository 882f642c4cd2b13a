"""Prove a LoRA: measure how far base + LoRA is from the tuned model, on the factors as stored.

Models and LoRA are read a layer at a time, several layers at once, and nothing is kept of any of them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.extraction.provenance import BASE_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.opening import open_lora
from sigmascope.lora.models.layer_kinds import WEIGHT
from sigmascope.lora.models.layer_names import write_layer_names
from sigmascope.lora.models.pair_options import PARTS
from sigmascope.lora.models.pairs import CheckpointPair, PairOptions, open_pair
from sigmascope.lora.names.changed_keys import ChangedKeys, changed_keys
from sigmascope.lora.validation.change_findings import counted, pair_findings
from sigmascope.lora.validation.module_errors import ModuleError
from sigmascope.lora.validation.validate_layers import measure_layers
from sigmascope.lora.validation.validation_report import ValidationReport
from sigmascope.progress import Progress, no_progress
from sigmascope.records.finding import Finding

__all__ = ["ModuleError", "ValidationReport", "validate_lora", "write_layer_names"]


def validate_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    lora: str | PathLike[str],
    options: PairOptions | None = None,
    *,
    workers: int | None = None,
    progress: Progress = no_progress,
) -> ValidationReport:
    """Compare base + LoRA with the tuned model in every layer, and in whatever else the LoRA changes.

    The error of a layer is ‖ΔW − s·BA‖ / ‖ΔW‖ with ΔW = tuned − base, sums in float64. It does not come
    from the LoRA's metadata, so it holds for LoRAs of any origin (SPEC section 7).

    Args:
        base: Checkpoint that the LoRA is put on.
        tuned: Checkpoint that it should reproduce.
        lora: LoRA file of any format that `open_lora` reads.
        options: What is compared and what may be left out of it; the defaults compare the denoisers. Parts that
            the LoRA changes and both models have are compared in any case.
        workers: Threads; as many as cores when left out.
        progress: Told after each tensor.

    Returns:
        The errors, the success rate, and what does not fit.

    Raises:
        ModelMismatchError: The checkpoints do not belong together, or nothing differs between them.
        CheckpointError: A file cannot be read.
        LoraFormatError: The LoRA's keys or shapes are not understood.
        NonFiniteError: NaN or Inf in one of the three.
    """
    started = time.perf_counter()
    with open_lora(Path(lora)) as file, _opened(base, tuned, file, options or PairOptions()) as pair:
        targets = changed_keys(file, pair.base, pair.layout)
        measured = measure_layers(pair, targets, workers=workers, progress=progress)
        if all(module.delta_norm == 0 for module in measured.modules):
            raise _no_change(pair)
        norms = [module.delta_norm for module in measured.modules]
        findings = [*_lora_findings(pair, file), *pair_findings(pair, dict(measured.uncovered), norms)]
        modules = [*measured.modules, *_unmatched(pair, file, targets)]
    return ValidationReport(
        base=Path(base),
        tuned=Path(tuned),
        lora=Path(lora),
        modules=tuple(sorted(modules, key=lambda module: module.order)),
        unchanged_layers=measured.unchanged_layers,
        findings=tuple(findings),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _opened(
    base: str | PathLike[str], tuned: str | PathLike[str], lora: LoraFile, options: PairOptions
) -> Iterator[CheckpointPair]:
    """The pair of the parts asked for, and of those that the LoRA changes beside them."""
    with open_pair(base, tuned, options) as pair:
        outside = {key: pair.layout.split(key)[0] for key in pair.outside}
        changed = changed_keys(lora, pair.base, pair.layout).names if outside else {}
        wanted = {*options.parts, *(outside[key] for key in changed if key in outside)}
        if wanted == {*options.parts}:
            yield pair
            return
    more = replace(options, parts=tuple(part for part in PARTS if part in wanted))
    with open_pair(base, tuned, more) as pair:
        yield pair


def _no_change(pair: CheckpointPair) -> ModelMismatchError:
    return ModelMismatchError(
        f"{pair.base.path} and {pair.tuned.path} hold the same weights in all {len(pair.layers)} Linear and "
        "convolution layers: there is no change to compare the LoRA with.",
        hint="Give the fine-tuned checkpoint as --tuned_model_path.",
    )


def _unmatched(pair: CheckpointPair, lora: LoraFile, targets: ChangedKeys) -> list[ModuleError]:
    """The LoRA's modules for which there is no layer to compare. They reach nothing, so their error is 0."""
    lost = [_lost(lora, name, "the model has no such layer") for name in targets.unmatched]
    compared = {*(layer + WEIGHT for layer in pair.layers), *pair.others}
    for key, name in targets.names.items():
        if key not in compared:
            reason = pair.skipped.get(key, "its part of the models is not")
            lost.append(_lost(targets.lora, name, f"it is not compared: {reason}"))
    return lost


def _lost(lora: LoraFile, name: str, detail: str) -> ModuleError:
    shape, rank, kind = lora.shape_of(name), lora.rank_of(name), lora.kind_of(name)
    return ModuleError(name, shape, "unmatched", rank, 0.0, 0.0, detail, kind)


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
