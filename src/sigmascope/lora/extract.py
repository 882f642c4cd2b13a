"""Make a LoRA from two checkpoints: the truncated SVD of every layer's change.

Both files are read a layer at a time. Finished layers are kept beside the target until all are there, so memory
holds a few of the largest layers whatever the model's size, and a run that was killed goes on where it was.
"""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path

from sigmascope.checkpoints import atomic_path
from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.extraction.decomposed import DecomposedLayer
from sigmascope.lora.extraction.extraction_output import resolve_format, storage_cost, write_extracted
from sigmascope.lora.extraction.extraction_report import (
    ExtractedModule,
    ExtractionReport,
    LeftOutLayer,
)
from sigmascope.lora.extraction.extraction_rounds import Rounds
from sigmascope.lora.extraction.job_identity import extraction_metadata, job_identity
from sigmascope.lora.extraction.journal import Journal
from sigmascope.lora.extraction.options import ExtractOptions, resolve_device
from sigmascope.lora.extraction.sidecar import refuse_other_yaml, require_yaml, sidecar_path, sidecar_text
from sigmascope.lora.formats.base import FormatName
from sigmascope.lora.models.layer_names import layer_order
from sigmascope.lora.models.pairs import CheckpointPair, open_pair
from sigmascope.lora.paths import check_target, refuse_inputs
from sigmascope.lora.validation.change_findings import pair_findings, uncovered_changes
from sigmascope.progress import Progress, no_progress

__all__ = ["ExtractOptions", "ExtractionReport", "extract_lora"]


def extract_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    save_to: str | PathLike[str],
    options: ExtractOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> ExtractionReport:
    """Extract a LoRA such that base + LoRA ≈ tuned, with a YAML side-car.

    Every Linear and convolution weight of the denoiser is compared. For each one that changed, the best factors
    of the asked rank are stored (Eckart and Young, 1936; found to 0.1 % by block Krylov iteration), with alpha =
    the stored rank. An existing LoRA at `save_to` is replaced once the new one is complete; the inputs are never
    written to.

    A run that was killed is resumed by the same call, and gives the same bytes as one that was not.

    Args:
        base: Checkpoint to put the LoRA on: safetensors (sharded too), `.ckpt`, or a diffusers folder.
        tuned: The fine-tuned checkpoint of the same architecture.
        save_to: The `.safetensors` file to write; `<name>_config.yaml` appears beside it.
        options: Ranks, precision, coverage; the defaults when left out.
        progress: Told after each layer.

    Returns:
        Every layer's rank, change and true error, measured on the factors as stored.

    Raises:
        ConfigError: The target is one of the inputs or a folder, another run is writing it, a YAML that is no
            description of an extraction has the side-car's name, the device is not there, PyYAML is missing, a
            pattern matches no layer, or a budget cannot be met.
        ModelMismatchError: The checkpoints do not belong together, or nothing to extract differs.
        CheckpointError: An input cannot be read.
        NonFiniteError: NaN or Inf in an input, or factors too large for the storage dtype.
        WriteError: The target cannot be written; it is as it was.
    """
    started = time.perf_counter()
    options = options or ExtractOptions()
    target = Path(save_to)
    check_target(target)
    refuse_other_yaml(sidecar_path(target))
    require_yaml()
    device = resolve_device(options.device)
    with open_pair(base, tuned, options.pairing) as pair, ExitStack() as files:
        refuse_inputs(target, pair.base, pair.tuned)
        options.rank_rules.check(pair.layers)
        if options.budget is not None:
            options.budget.check(pair.layers)
        vectors = uncovered_changes(pair)
        diffs = vectors if options.biases_and_norms else {}
        lora_format = resolve_format(options, pair, diffs)
        metadata = extraction_metadata(pair, options)
        journal = files.enter_context(Journal(target, job_identity(pair, options, device, lora_format)))
        storage = storage_cost(lora_format, pair, options, metadata, diffs)
        layers = Rounds(pair, options, journal, device, progress).run(storage)
        _refuse_nothing(pair, layers, options)
        report = _report(pair, Path(base), Path(tuned), target, lora_format, options, layers, vectors)
        # Entered first, left last: the description only appears once the LoRA is in place.
        sidecar = files.enter_context(atomic_path(sidecar_path(target)))
        sidecar.write_text(sidecar_text(report), encoding="utf-8")
        write_extracted(target, lora_format, pair, layers, journal, options, metadata, diffs)
    seconds = time.perf_counter() - started
    return replace(report, seconds=seconds, file_bytes=target.stat().st_size)


def _report(
    pair: CheckpointPair,
    base: Path,
    tuned: Path,
    target: Path,
    lora_format: FormatName,
    options: ExtractOptions,
    layers: Mapping[str, DecomposedLayer],
    vectors: dict[str, float],
) -> ExtractionReport:
    ordered = sorted(layers.items(), key=lambda item: layer_order(item[0]))
    uncovered = {} if options.biases_and_norms else vectors
    norms = [one.record.delta_norm for one in layers.values()]
    return ExtractionReport(
        base=base,
        tuned=tuned,
        lora=target,
        sidecar=sidecar_path(target),
        format=lora_format,
        architecture=pair.layout.family,
        options=options,
        modules=tuple(_module(name, one) for name, one in ordered if one.reason is None),
        left_out=tuple(_left_out(name, one) for name, one in ordered if one.reason is not None),
        diffs={} if uncovered else vectors,
        uncovered=uncovered,
        findings=tuple(pair_findings(pair, uncovered, norms)),
        seconds=0.0,
        file_bytes=0,
    )


def _module(name: str, one: DecomposedLayer) -> ExtractedModule:
    record = one.record
    error = record.error_at(one.rank)
    return ExtractedModule(
        name=name,
        shape=record.shape,
        rank=one.rank,
        delta_norm=record.delta_norm,
        relative_change=record.delta_norm / record.base_norm if record.base_norm > 0 else None,
        error_norm=error,
        relative_error=error / record.delta_norm,
        kept_energy=record.kept_energy(one.rank),
    )


def _left_out(name: str, one: DecomposedLayer) -> LeftOutLayer:
    assert one.reason is not None
    return LeftOutLayer(name, one.record.shape, one.reason, one.record.delta_norm, one.record.largest)


def _refuse_nothing(
    pair: CheckpointPair, layers: Mapping[str, DecomposedLayer], options: ExtractOptions
) -> None:
    """Refuse to write a LoRA without modules, saying why none is left."""
    if any(one.rank > 0 for one in layers.values()):
        return
    changed = [one.record for one in layers.values() if one.reason != "unchanged"]
    if not changed:
        raise ModelMismatchError(
            f"{pair.base.path} and {pair.tuned.path} hold the same weights in all {len(layers)} Linear and "
            "convolution layers: there is nothing to extract."
            + (" Biases and norms alone make no LoRA." if options.biases_and_norms else ""),
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    reasons = ", ".join(sorted({str(one.reason) for one in layers.values() if one.reason != "unchanged"}))
    largest = max(record.largest for record in changed)
    raise ConfigError(
        f"--min_diff {options.min_diff:g}, --target_coverage {options.target_coverage} and the choice of ranks "
        f"leave out all {len(changed)} changed layers ({reasons}); the largest change is {largest:.3g}.",
        hint="Lower --min_diff, use --target_coverage full, or allow more rank.",
    )
