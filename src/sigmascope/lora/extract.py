"""Make a LoRA from two checkpoints: the truncated SVD of every layer's change.

Both files are read a layer at a time and the LoRA is written while it is made, so that memory holds a
few copies of one layer whatever the model's size.
"""

import time
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch

from sigmascope.checkpoints import StreamingWriter, atomic_path
from sigmascope.errors import ConfigError, ModelMismatchError, SigmascopeError
from sigmascope.lora.change_findings import pair_findings, uncovered_changes
from sigmascope.lora.decompose import StoredChange, decompose
from sigmascope.lora.extraction_report import ExtractedModule, ExtractionReport, LeftOutLayer, LeftOutReason
from sigmascope.lora.formats.native import module_tensors
from sigmascope.lora.layer_names import in_coverage, layer_order
from sigmascope.lora.options import ExtractOptions, check_target, refuse_inputs, resolve_device
from sigmascope.lora.pairs import CheckpointPair, LayerChange, open_pair
from sigmascope.lora.paths import as_text
from sigmascope.lora.provenance import extraction_metadata
from sigmascope.lora.ranks import FixedRank
from sigmascope.lora.sidecar import refuse_other_yaml, require_yaml, sidecar_path, sidecar_text
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
    """Extract a LoRA such that base + LoRA ≈ tuned, in native naming, with a YAML side-car.

    Every Linear and Conv2d weight of the denoiser is compared; by shape: 2-D and 4-D tensors named
    `denoiser.*.weight`. For each one that changed, the best factors of the asked rank are stored
    (Eckart and Young, 1936), with alpha = the stored rank. An existing LoRA at `save_to` is replaced once
    the new one is complete; the inputs are never written to.

    Args:
        base: Checkpoint to put the LoRA on: safetensors (sharded too) or `.ckpt`.
        tuned: The fine-tuned checkpoint of the same architecture.
        save_to: The `.safetensors` file to write; `<name>_config.yaml` appears beside it.
        options: Ranks, precision, coverage; the defaults when left out.
        progress: Told after each layer.

    Returns:
        Every layer's rank, change and true error, measured on the factors as stored.

    Raises:
        ConfigError: The target is one of the inputs or a folder, a YAML that is no description of an extraction
            has the side-car's name, the device is not there, or PyYAML is missing.
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
    with open_pair(base, tuned) as pair, ExitStack() as files:
        refuse_inputs(target, pair.base, pair.tuned)
        metadata = extraction_metadata(pair, options) | {"modelspec.title": as_text(target.stem)}
        # Entered first, left last: the description only appears once the LoRA is in place.
        sidecar = files.enter_context(atomic_path(sidecar_path(target)))
        writer = files.enter_context(StreamingWriter(target, metadata, expected=_expected(pair, options)))
        modules, left_out = _extract_layers(pair, options, device, writer, progress)
        _refuse_nothing(pair, modules, left_out, options)
        uncovered = uncovered_changes(pair)
        norms = [module.delta_norm for module in modules] + [layer.delta_norm for layer in left_out]
        report = ExtractionReport(
            base=Path(base),
            tuned=Path(tuned),
            lora=target,
            sidecar=sidecar_path(target),
            options=options,
            modules=tuple(sorted(modules, key=lambda module: layer_order(module.name))),
            left_out=tuple(sorted(left_out, key=lambda layer: layer_order(layer.name))),
            uncovered=uncovered,
            findings=tuple(pair_findings(pair, uncovered, norms)),
            seconds=0.0,
            file_bytes=0,
        )
        sidecar.write_text(sidecar_text(report), encoding="utf-8")
    return replace(report, seconds=time.perf_counter() - started, file_bytes=target.stat().st_size)


def _expected(pair: CheckpointPair, options: ExtractOptions) -> list[str]:
    """Names that may be written, for the writer to reserve room in the header."""
    covered = [layer for layer in pair.layers if in_coverage(layer, options.target_coverage)]
    return [
        f"{layer}.{part}" for layer in covered for part in ("lora_up.weight", "lora_down.weight", "alpha")
    ]


def _extract_layers(
    pair: CheckpointPair,
    options: ExtractOptions,
    device: torch.device,
    writer: StreamingWriter,
    progress: Progress,
) -> tuple[list[ExtractedModule], list[LeftOutLayer]]:
    policy = FixedRank(options.rank, options.conv_rank)
    modules: list[ExtractedModule] = []
    left_out: list[LeftOutLayer] = []
    for done, layer in enumerate(pair.layers, start=1):
        change = pair.layer_change(layer, device)
        largest = float(change.delta.abs().max())
        reason = _reason_to_leave_out(layer, largest, options)
        if reason is not None:
            left_out.append(LeftOutLayer(layer, pair.shape(layer), reason, change.delta_norm, largest))
        else:
            stored = _decompose(layer, change, policy.rank_for(pair.shape(layer)), options.storage_dtype)
            for name, tensor in module_tensors(layer, stored.factors).items():
                writer.write(name, tensor)
            modules.append(_module(layer, change, stored))
        progress(done, len(pair.layers), layer)
    return modules, left_out


def _reason_to_leave_out(layer: str, largest: float, options: ExtractOptions) -> LeftOutReason | None:
    if largest == 0:
        return "unchanged"
    if not in_coverage(layer, options.target_coverage):
        return "outside_coverage"
    return "below_min_diff" if largest < options.min_diff else None


def _decompose(layer: str, change: LayerChange, rank: int, dtype: torch.dtype) -> StoredChange:
    try:
        return decompose(change.delta, rank, dtype)
    except SigmascopeError as error:
        raise type(error)(f"{layer}: {error.message}", hint=error.hint) from error


def _module(layer: str, change: LayerChange, stored: StoredChange) -> ExtractedModule:
    return ExtractedModule(
        name=layer,
        shape=stored.factors.weight_shape,
        rank=stored.factors.rank,
        delta_norm=change.delta_norm,
        relative_change=change.delta_norm / change.base_norm if change.base_norm > 0 else None,
        error_norm=stored.error_norm,
        relative_error=stored.error_norm / change.delta_norm,
        kept_energy=stored.kept_energy,
    )


def _refuse_nothing(
    pair: CheckpointPair,
    modules: list[ExtractedModule],
    left_out: list[LeftOutLayer],
    options: ExtractOptions,
) -> None:
    """Refuse to write a LoRA without modules, saying why none is left."""
    if modules:
        return
    changed = [layer for layer in left_out if layer.reason != "unchanged"]
    if not changed:
        raise ModelMismatchError(
            f"{pair.base.path} and {pair.tuned.path} hold the same weights in all {len(left_out)} Linear and "
            "Conv2d layers: there is nothing to extract.",
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    largest = max(layer.largest_change for layer in changed)
    raise ConfigError(
        f"--min_diff {options.min_diff:g} and --target_coverage {options.target_coverage} leave out all "
        f"{len(changed)} changed layers; the largest change is {largest:.3g}.",
        hint="Lower --min_diff or use --target_coverage full.",
    )
