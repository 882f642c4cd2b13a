"""Make a LoRA from two checkpoints: the truncated SVD of every layer's change.

Both files are read a layer at a time. Finished layers are kept in a journal beside the target until all are done, so
memory holds a few of the largest layers whatever the model's size, and a killed run continues where it stopped.

With ranks or policies for single layers there is one round. A budget for the whole file compares layers, so it may ask
for more singular values of some layers once it has seen those of all. The file is then written from the
journal, one layer at a time in the model's order.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import StreamingWriter, atomic_path, file_sha256
from sigmascope.checkpoints.hub import model_name
from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.files import require_writable
from sigmascope.lora.adapters import DiffChange
from sigmascope.lora.budget import StorageCost, file_weights
from sigmascope.lora.families import ModelLayout, UnetBlocks
from sigmascope.lora.file import as_text, check_target, is_of_diffusers, refuse_files, refuse_inputs
from sigmascope.lora.fingerprint import BASE_FINGERPRINT, TUNED_FINGERPRINT, denoiser_fingerprint
from sigmascope.lora.format_names import FormatName
from sigmascope.lora.formats import LoraFormat, format_named
from sigmascope.lora.journal import Journal
from sigmascope.lora.layer_extraction import (
    DecomposedLayer,
    Extraction,
    ExtractOptions,
    LayerReader,
    LeftOutReason,
    read_factors,
    resolve_device,
)
from sigmascope.lora.layer_names import blocks_of_model, layer_order
from sigmascope.lora.linalg import fast_dtype
from sigmascope.lora.loadable import WrittenLoads
from sigmascope.lora.pairs import CheckpointPair, open_pair, pair_findings, uncovered_changes
from sigmascope.lora.sidecar import refuse_other_yaml, sidecar_path, sidecar_text
from sigmascope.lora.statistics import ModelStatistics, load_statistics_of
from sigmascope.lora.validate import (
    BlockError,
    ModuleError,
    applied_errors,
    mean,
    overall_error,
    summarise_blocks,
)
from sigmascope.lora.writer import LoraWriter, measured_storage
from sigmascope.progress import Progress, no_progress
from sigmascope.records.run import Finding

__all__ = ["ExtractOptions", "ExtractionReport", "extract_lora"]

_CPU: Final = torch.device("cpu")


def extract_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    save_to: str | PathLike[str],
    options: ExtractOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> "ExtractionReport":
    """Extract a LoRA such that base + LoRA ≈ tuned, with a YAML side-car.

    Every Linear and convolution weight of the denoiser is compared. For each one that changed, the best factors of the
    requested rank are stored (Eckart and Young, 1936; found to 0.1 % by block Krylov iteration), with alpha equal to
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
        ConfigError: The target is one of the inputs or a folder, another run is writing it, some other YAML has the
            side-car's name, the device is not there, PyYAML is missing, a pattern matches no layer, or a budget cannot
            be met.
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
    device = resolve_device(options.device)
    with open_pair(base, tuned, options.pairing) as pair, ExitStack() as files:
        refuse_inputs(target, pair.base, pair.tuned)
        if options.statistics is not None:
            refuse_files(target, [Path(options.statistics)])
        options.rank_rules.check(pair.layers)
        if options.budget is not None:
            options.budget.check(pair.layers)
        statistics = None if options.statistics is None else statistics_for(pair, options.statistics)
        vectors = uncovered_changes(pair)
        diffs = vectors if options.biases_and_norms else {}
        lora_format = resolve_format(options, pair, diffs)
        metadata = extraction_metadata(pair, options, statistics)
        journal = files.enter_context(Journal(target, job_identity(pair, options, device, lora_format)))
        extraction = Extraction(pair, options, journal, device, progress, statistics)
        layers = extraction.run(storage_cost(lora_format, pair, options, metadata, diffs, target.name))
        _refuse_nothing(pair, layers, options)
        report = _report(pair, Path(base), Path(tuned), target, lora_format, options, layers, vectors)
        report = replace(report, weighted_error=extraction.weighted_error(layers))
        # Entered first, left last: the description only appears once the LoRA is in place.
        sidecar = files.enter_context(atomic_path(sidecar_path(target)))
        sidecar.write_text(
            sidecar_text(report.sidecar, report.base, report.tuned, _facts(report)), encoding="utf-8"
        )
        loads = write_extracted(target, lora_format, pair, layers, journal, options, metadata, diffs)
    seconds = time.perf_counter() - started
    return replace(report, seconds=seconds, file_bytes=target.stat().st_size, loads=loads)


def check_extraction(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    save_to: str | PathLike[str],
    options: ExtractOptions,
) -> None:
    """Refuse, before statistics are made, what `extract_lora` would refuse afterwards. No weight is read.

    Args:
        base: As in `extract_lora`.
        tuned: The fine-tuned checkpoint.
        save_to: The file to write.
        options: The statistics that they name need not exist yet.

    Raises:
        SigmascopeError: As of `extract_lora`.
    """
    target = Path(save_to)
    check_target(target)
    require_writable(target)
    refuse_other_yaml(sidecar_path(target))
    resolve_device(options.device)
    with open_pair(base, tuned, options.pairing) as pair:
        refuse_inputs(target, pair.base, pair.tuned)
        options.rank_rules.check(pair.layers)
        if options.budget is not None:
            options.budget.check(pair.layers)
        resolve_format(options, pair)


def _facts(report: "ExtractionReport") -> dict[str, Any]:
    """What the side-car says beside the models' names. Its keys and their order are always the same."""
    fixed = report.options.fixed_rank
    return {
        "extraction_method": "svd",
        "rank": report.options.asked_rank if fixed is None else fixed.rank,
        "conv_rank": report.options.asked_rank if fixed is None else fixed.conv_rank,
        "architecture": report.architecture,
        "native_naming": report.format == "native",
        "total_analyzed_layers": report.total_analyzed_layers,
        "total_lora_modules": report.total_lora_modules,
        "change_threshold": report.options.min_diff,
        "coverage_percentage": round(report.coverage_percentage, 2),
    }


def resolve_format(options: ExtractOptions, pair: CheckpointPair, diffs: Iterable[str] = ()) -> FormatName:
    """The requested format, or for `auto` the one that tools for such a checkpoint read.

    Args:
        options: With the format, or `auto`.
        pair: The checkpoints.
        diffs: Keys of biases, norms and embeddings that it has to hold.

    Raises:
        ConfigError: It cannot hold what was asked for.
        LoraFormatError: There is no such format, or it has no name for a layer.
    """
    chosen = _usual_format(pair) if options.format == "auto" else options.format
    lora_format = format_named(chosen)
    if options.biases_and_norms and not lora_format.keys.holds_changes:
        raise ConfigError(
            f"--biases_and_norms: {lora_format.name} files hold up and down factors only.",
            hint="Use --format native, kohya or comfyui.",
        )
    if "denoiser_2" in options.pairing.parts and lora_format.name != "native":
        raise ConfigError(
            f"--parts: {lora_format.name} files are for one denoiser, and say nothing of a second one.",
            hint="Make a file of the second denoisers alone, and give their folders as the models: BASE/transformer_2 and TUNED/transformer_2.",
        )
    blocks = blocks_of_model(pair.layers, pair.layout)
    for layer in pair.layers:
        placed = lora_format.placement(layer, pair.layout, blocks=blocks)
        lora_format.named(layer, placed if isinstance(placed, str) else placed.original, pair.layout)
    for key in diffs:
        _require_name(lora_format, key, pair.layout, blocks)
    return lora_format.name


def _usual_format(pair: CheckpointPair) -> FormatName:
    """What loads a LoRA of such a model: diffusers beside a folder, ComfyUI beside a single file, our tools beside an LBM.

    It goes by the file where the family is not known: then no host's names are known, and the result is unverified.
    """
    naming = pair.layout.naming
    if naming == "lbm":
        return "native"
    if naming == "unknown":
        return "peft" if pair.base.path.is_dir() or is_of_diffusers(pair.base.path) else "comfyui"
    return "peft" if naming == "diffusers" else "comfyui"


def _require_name(lora_format: LoraFormat, key: str, layout: ModelLayout, blocks: UnetBlocks) -> None:
    """Refuse a bias or norm that the format cannot name before hours of work and not after."""
    try:
        lora_format.name_for(key.removesuffix(".weight").removesuffix(".bias"), layout, blocks=blocks)
    except LoraFormatError as error:
        raise ConfigError(
            f"--biases_and_norms: {error.message}",
            hint="Use --format native, which keeps the model's own names.",
        ) from error


def statistics_for(pair: CheckpointPair, path: str | PathLike[str]) -> ModelStatistics:
    """As of `load_statistics_of`, made with either of the two models."""
    places = [pair.layout.split(layer) for layer in pair.layers]
    return load_statistics_of(
        path,
        {denoiser_fingerprint(side) for side in (pair.base, pair.tuned)},
        [inner if part == "denoiser" else None for part, inner in places],
    )


def extraction_metadata(
    pair: CheckpointPair, options: ExtractOptions, statistics: ModelStatistics | None = None
) -> dict[str, str]:
    """Where an extracted LoRA comes from, for its header.

    No time of day is in it, so that the same inputs give the same file, byte for byte.
    """
    return {
        "sigmascope_version": __version__,
        "sigmascope_base": as_text(model_name(pair.base.path)),
        "sigmascope_tuned": as_text(model_name(pair.tuned.path)),
        BASE_FINGERPRINT: denoiser_fingerprint(pair.base),
        TUNED_FINGERPRINT: denoiser_fingerprint(pair.tuned),
        "sigmascope_rank": options.header_text,
        "sigmascope_target_coverage": options.target_coverage,
        "sigmascope_min_diff": repr(options.min_diff),
    } | (
        {}
        if statistics is None
        else {"sigmascope_statistics": json.dumps({**statistics.facts, "ridge": options.ridge})}
    )


def job_identity(
    pair: CheckpointPair, options: ExtractOptions, device: torch.device, lora_format: FormatName
) -> str:
    """Text that is equal for equal inputs, options, software and kind of device.

    Files are identified by path, size and modification time, because reading them would take as long as the job. The
    file's other content matters only under a budget: it determines how much is left for the layers.
    """
    # The instructions that decide how it rounds.
    processor = f"cpu {torch.backends.cpu.get_cpu_capability()} {fast_dtype(torch.device('cpu'))}"
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "inputs": [
            [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in side.files]
            for side in (pair.base, pair.tuned)
        ],
        "layers": pair.layers,
        "ranks": options.asked_rank,
        "precision": options.save_precision,
        "min_diff": options.min_diff,
        "coverage": options.target_coverage,
        "beside": [lora_format, options.biases_and_norms] if options.budget is not None else None,
        "metric": None
        if options.statistics is None
        else [file_sha256(Path(options.statistics)), options.ridge],
        "budget_weights": [options.budget_weights, file_weights(options.budget_weights, pair.layers)]
        if options.budget is not None
        else None,
    }
    return json.dumps(facts)


def storage_cost(
    format: FormatName,
    pair: CheckpointPair,
    options: ExtractOptions,
    metadata: Mapping[str, str],
    diffs: Iterable[str] = (),
    name: str = "lora.safetensors",
    layers: Sequence[str] | None = None,
) -> StorageCost:
    """What factors take in the file; it measures while the checkpoints are open.

    Args:
        format: Of the file.
        pair: The checkpoints.
        options: Precision, and whether there is a budget.
        metadata: Texts for the header.
        diffs: Keys of tensors whose change is stored whole.
        name: Of the file.
        layers: That may be in it; all of the pair's when left out.
    """
    expected = pair.layers if layers is None else layers
    shapes = {layer: pair.shape(layer) for layer in expected}
    blank = {key: torch.zeros(()).expand(pair.base.info(key).shape) for key in diffs}
    carried = {key.removesuffix(".weight"): DiffChange({"diff": zeros}) for key, zeros in blank.items()}
    new_writer = partial(_writer, Path(name), format, pair, expected, options, metadata)
    return measured_storage(new_writer, options.storage_dtype, shapes, carried)


def write_extracted(
    target: Path,
    format: FormatName,
    pair: CheckpointPair,
    layers: Mapping[str, DecomposedLayer],
    journal: Journal,
    options: ExtractOptions,
    metadata: Mapping[str, str],
    diffs: Iterable[str],
) -> WrittenLoads | None:
    """Write the LoRA, whole or not at all.

    Args:
        target: The file.
        format: Its format.
        pair: The checkpoints, for layers kept whole and for `diffs`.
        layers: What was decided, in the model's order.
        journal: Where the factors are.
        options: Precision.
        metadata: Texts for the header beside those of the format.
        diffs: Keys of biases, norms and embeddings whose change is stored as it is.

    Returns:
        What the file loads into.

    Raises:
        WriteError: The target cannot be written.
        NonFiniteError: A change does not fit the storage precision.
    """
    reader, dtype = LayerReader(pair, _CPU), options.storage_dtype
    kept = [layer for layer, decomposed in layers.items() if decomposed.rank > 0]
    with _writer(target, format, pair, kept, options, metadata) as writer:
        for layer in kept:
            writer.write(layer, read_factors(journal, reader, layer, layers[layer], dtype))
        for key in diffs:
            writer.write_diff(key, pair.change(key, _CPU).delta)
    return writer.loads


def _writer(
    target: Path,
    format: FormatName,
    pair: CheckpointPair,
    layers: Sequence[str],
    options: ExtractOptions,
    metadata: Mapping[str, str],
    writes: type[StreamingWriter] = StreamingWriter,
) -> LoraWriter:
    return LoraWriter(
        target,
        format=format,
        layout=pair.layout,
        metadata=metadata,
        expected=layers,
        model_layers=pair.layers,
        dtype=options.storage_dtype,
        compact=options.budget is not None,
        writes=writes,
    )


def _refuse_nothing(
    pair: CheckpointPair, layers: Mapping[str, DecomposedLayer], options: ExtractOptions
) -> None:
    """Refuse to write a LoRA without modules, saying why none is left."""
    if any(decomposed.rank > 0 for decomposed in layers.values()):
        return
    changed = [decomposed.record for decomposed in layers.values() if decomposed.reason != "unchanged"]
    if not changed:
        raise ModelMismatchError(
            f"{pair.base.path} and {pair.tuned.path} hold the same weights in all {len(layers)} Linear and "
            "convolution layers: there is nothing to extract."
            + (" Biases and norms alone do not make a LoRA." if options.biases_and_norms else ""),
            hint="Give the fine-tuned checkpoint as --tuned_model_path.",
        )
    reasons = ", ".join(
        sorted({str(decomposed.reason) for decomposed in layers.values() if decomposed.reason != "unchanged"})
    )
    largest = max(record.largest for record in changed)
    raise ConfigError(
        f"--min_diff {options.min_diff:g}, --target_coverage {options.target_coverage} and the choice of ranks "
        f"leave out all {len(changed)} changed layers ({reasons}); the largest change is {largest:.3g}.",
        hint="Lower --min_diff, use --target_coverage full, or allow more rank.",
    )


def _report(
    pair: CheckpointPair,
    base: Path,
    tuned: Path,
    target: Path,
    lora_format: FormatName,
    options: ExtractOptions,
    layers: Mapping[str, DecomposedLayer],
    vectors: dict[str, float],
) -> "ExtractionReport":
    modules, left_out = [], []
    for name in sorted(layers, key=layer_order):
        reason, record = layers[name].reason, layers[name].record
        if reason is None:
            modules.append(_extracted_module(name, layers[name]))
        else:
            left_out.append(LeftOutLayer(name, record.shape, reason, record.delta_norm, record.largest))
    uncovered = {} if options.biases_and_norms else vectors
    norms = [decomposed.record.delta_norm for decomposed in layers.values()]
    return ExtractionReport(
        base=base,
        tuned=tuned,
        lora=target,
        sidecar=sidecar_path(target),
        format=lora_format,
        architecture=pair.layout.family,
        options=options,
        modules=tuple(modules),
        left_out=tuple(left_out),
        diffs={} if uncovered else vectors,
        uncovered=uncovered,
        findings=tuple(pair_findings(pair, uncovered, norms)),
        seconds=0.0,
        file_bytes=0,
    )


def _extracted_module(name: str, decomposed: DecomposedLayer) -> "ExtractedModule":
    record = decomposed.record
    error = record.error_at(decomposed.rank)
    return ExtractedModule(
        name=name,
        shape=record.shape,
        rank=decomposed.rank,
        delta_norm=record.delta_norm,
        relative_change=record.delta_norm / record.base_norm if record.base_norm > 0 else None,
        error_norm=error,
        relative_error=error / record.delta_norm,
        kept_energy=record.kept_energy(decomposed.rank),
    )


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    """One layer of the LoRA.

    Attributes:
        name: Path of the layer, such as `denoiser.mid_block.attentions.0.proj_in`.
        shape: Shape of its weight.
        rank: Rank really stored.
        delta_norm: ‖ΔW‖.
        relative_change: ‖ΔW‖ / ‖W‖ of the base; None when the base's weight is all zero.
        error_norm: ‖ΔW − up·down‖ of the stored, rounded factors.
        relative_error: `error_norm` / `delta_norm`.
        kept_energy: Share of ‖ΔW‖² in the singular values that were kept, 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    delta_norm: float
    relative_change: float | None
    error_norm: float
    relative_error: float
    kept_energy: float


@dataclass(frozen=True, slots=True)
class LeftOutLayer:
    """One layer that is not in the LoRA, and why. An unchanged one needs no factors."""

    name: str
    shape: tuple[int, ...]
    reason: LeftOutReason
    delta_norm: float
    largest_change: float


@dataclass(frozen=True, slots=True)
class ExtractionReport:
    """The result of one extraction.

    Attributes:
        base, tuned: The models, as given.
        lora: The LoRA file that was written.
        sidecar: The YAML beside it.
        format: Of the LoRA file.
        architecture: Family of the model: `lbm`, `sdxl`, …
        options: What was asked for.
        modules: The LoRA's layers, in the model's order.
        left_out: The compared layers that it does not hold.
        diffs: ‖Δ‖ of changed biases, norms and embeddings that are stored whole, by key.
        uncovered: ‖Δ‖ of those that are not, by key; a LoRA of layers does not hold them.
        findings: What to know before using the LoRA.
        seconds: Time of the whole extraction.
        file_bytes: Size of the LoRA file.
        weighted_error: The overall error as the statistics or the budget weigh it, which is what `max_error`
            limits; None where all errors count the same.
        loads: What hosts make of the new file; see `loadable.loads_of_written`.
    """

    base: Path
    tuned: Path
    lora: Path
    sidecar: Path
    format: FormatName
    architecture: str
    options: ExtractOptions
    modules: tuple[ExtractedModule, ...]
    left_out: tuple[LeftOutLayer, ...]
    diffs: dict[str, float]
    uncovered: dict[str, float]
    findings: tuple[Finding, ...]
    seconds: float
    file_bytes: int
    weighted_error: float | None = None
    loads: WrittenLoads | None = None

    @property
    def total_lora_modules(self) -> int:
        """Number of layers in the LoRA."""
        return len(self.modules)

    @property
    def total_analyzed_layers(self) -> int:
        """Number of Linear and convolution layers compared."""
        return len(self.modules) + len(self.left_out)

    @property
    def coverage_percentage(self) -> float:
        """Share of the compared layers that the LoRA holds, 0 to 100."""
        return 100.0 * self.total_lora_modules / self.total_analyzed_layers

    @property
    def errors(self) -> tuple[ModuleError, ...]:
        """The error of every layer that changed, as a validation of this LoRA would find it."""
        kept = [
            ModuleError(
                module.name, module.shape, "applied", module.rank, module.delta_norm, module.error_norm
            )
            for module in self.modules
        ]
        lost = [
            ModuleError(
                layer.name, layer.shape, "missing", None, layer.delta_norm, layer.delta_norm, layer.reason
            )
            for layer in self.left_out
            if layer.reason != "unchanged"
        ]
        return tuple(sorted(kept + lost, key=lambda error: layer_order(error.name)))

    @property
    def blocks(self) -> tuple[BlockError, ...]:
        """One summary a block, in the model's order."""
        return summarise_blocks(self.errors)

    @property
    def relative_error(self) -> float | None:
        """‖ΔW − up·down‖ / ‖ΔW‖ over all compared layers together; a layer left out counts as lost."""
        return overall_error(self.errors)

    @property
    def average_error(self) -> float | None:
        """Mean of the modules' relative errors."""
        return mean(applied_errors(self.errors))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        totals = {
            "total_analyzed_layers": self.total_analyzed_layers,
            "total_lora_modules": self.total_lora_modules,
            "coverage_percentage": self.coverage_percentage,
            "relative_error": self.relative_error,
            "average_error": self.average_error,
            "weighted_error": self.weighted_error,
        }
        loads = None if self.loads is None else self.loads.as_dict()
        fields = asdict(replace(self, loads=None)) | {"options": self.options.as_dict(), "loads": loads}
        fields.pop("weighted_error")
        paths = {name: str(fields.pop(name)) for name in ("base", "tuned", "lora", "sidecar")}
        return paths | totals | fields
