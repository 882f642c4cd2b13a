"""Make a LoRA from two checkpoints: the truncated SVD of every layer's change.

Both files are read a layer at a time. Finished layers are kept beside the target until all are there, so memory
holds a few of the largest layers whatever the model's size, and a run that was killed goes on where it was.

With ranks or policies for single layers there is one round. A budget for the whole file compares layers, so it
may ask for more singular values of some of them once it has seen those of all. The file is then written from the
journal, one layer at a time in the model's order.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from typing import Final

import torch

from sigmascope.__about__ import __version__
from sigmascope.checkpoints import atomic_path, file_sha256
from sigmascope.errors import ConfigError, LoraFormatError, ModelMismatchError
from sigmascope.lora.alignment import joined_sizes
from sigmascope.lora.budget import Budget, StorageCost, Weights, refuse_storage, weight_of
from sigmascope.lora.decompose import at_full_rank
from sigmascope.lora.extraction_report import (
    ExtractedModule,
    ExtractionReport,
    ExtractOptions,
    LeftOutLayer,
    refuse_other_yaml,
    require_yaml,
    resolve_device,
    sidecar_path,
    sidecar_text,
)
from sigmascope.lora.families import (
    BASE_FINGERPRINT,
    TUNED_FINGERPRINT,
    ModelLayout,
    denoiser_fingerprint,
)
from sigmascope.lora.file import as_text, check_target, refuse_files, refuse_inputs
from sigmascope.lora.formats import FormatName, LoraFormat, format_named
from sigmascope.lora.journal import Journal
from sigmascope.lora.layer_extraction import (
    LayerReader,
    LayerRecord,
    LeftOutReason,
    extract_layer,
    read_factors,
    read_record,
    write_record,
)
from sigmascope.lora.layer_names import Row, UnetBlocks, blocks_of_model, in_coverage, layer_order
from sigmascope.lora.linalg import Spectrum, fast_dtype, matrix_shape
from sigmascope.lora.pairs import CheckpointPair, open_pair, pair_findings, uncovered_changes
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.ranks import RankPolicy
from sigmascope.lora.statistics import LayerMetric, ModelStatistics, load_statistics_of
from sigmascope.lora.writer import LoraWriter
from sigmascope.progress import Progress, no_progress

__all__ = ["ExtractOptions", "ExtractionReport", "extract_lora"]

# For `tighter`.
_TIGHTENED: Final = 0.999  # of the error that should do
_LEAST_TIGHTENED: Final = 0.5  # of the error asked for: below, rounding takes up most of it

_CPU: Final = torch.device("cpu")

# For `storage_cost`, in bytes.
_FIELDS_BYTES: Final = 2048  # that the format adds to the header
_ENTRY_BYTES: Final = 200  # that a header entry takes beside the tensor's name in the checkpoint


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
        if options.budget is None:
            layers = extraction.run()
        else:
            storage = storage_cost(lora_format, pair, options, metadata, diffs)
            layers = extraction.run_within(options.budget, storage)
        _refuse_nothing(pair, layers, options)
        report = _report(pair, Path(base), Path(tuned), target, lora_format, options, layers, vectors)
        report = replace(report, weighted_error=extraction.weighted_error(layers))
        # Entered first, left last: the description only appears once the LoRA is in place.
        sidecar = files.enter_context(atomic_path(sidecar_path(target)))
        sidecar.write_text(sidecar_text(report), encoding="utf-8")
        write_extracted(target, lora_format, pair, layers, journal, options, metadata, diffs)
    seconds = time.perf_counter() - started
    return replace(report, seconds=seconds, file_bytes=target.stat().st_size)


def resolve_format(options: ExtractOptions, pair: CheckpointPair, diffs: Iterable[str] = ()) -> FormatName:
    """The format asked for, or the one that tools for such a checkpoint read.

    Args:
        options: With the format, or `auto`.
        pair: The checkpoints.
        diffs: Keys of biases, norms and embeddings that it has to hold.

    Raises:
        ConfigError: It cannot hold what was asked for.
        LoraFormatError: There is no such format, or it has no name for a layer.
    """
    chosen = _usual_format(pair.layout) if options.format == "auto" else options.format
    lora_format = format_named(chosen)
    if options.biases_and_norms and not lora_format.keys.holds_changes:
        raise ConfigError(
            f"--biases_and_norms: {lora_format.name} files hold up and down factors only.",
            hint="Use --format native, kohya or comfyui.",
        )
    blocks = blocks_of_model(pair.layers, pair.layout)
    for layer in pair.layers:
        placed = lora_format.placement(layer, pair.layout, blocks=blocks)
        lora_format.named(layer, placed if isinstance(placed, str) else placed.original, pair.layout)
    for key in diffs:
        _require_name(lora_format, key, pair.layout, blocks)
    return lora_format.name


def _usual_format(layout: ModelLayout) -> FormatName:
    if layout.naming == "diffusers":
        return "peft"
    return "comfyui" if layout.naming in ("sgm", "original") else "native"


def _require_name(lora_format: LoraFormat, key: str, layout: ModelLayout, blocks: UnetBlocks) -> None:
    """Refuse a bias or norm that the format cannot name before hours of work and not after."""
    try:
        lora_format.name_for(key.removesuffix(".weight").removesuffix(".bias"), layout, blocks=blocks)
    except LoraFormatError as error:
        raise ConfigError(
            f"--biases_and_norms: {error.message}",
            hint="Use --format native, which keeps the model's own names.",
        ) from error


def extraction_metadata(
    pair: CheckpointPair, options: ExtractOptions, statistics: ModelStatistics | None = None
) -> dict[str, str]:
    """Where an extracted LoRA comes from, for its header.

    No time of day is in it, so that the same inputs give the same file, byte for byte.
    """
    return {
        "sigmascope_version": __version__,
        "sigmascope_base": as_text(pair.base.path.name),
        "sigmascope_tuned": as_text(pair.tuned.path.name),
        BASE_FINGERPRINT: denoiser_fingerprint(pair.base),
        TUNED_FINGERPRINT: denoiser_fingerprint(pair.tuned),
        "sigmascope_rank": options.asked_rank,
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

    Files are told by place, size and time of change: reading them whole would take as long as the job. What else
    the file holds matters under a budget only: how much is left for a layer depends on it.
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
        "budget_weights": [options.budget_weights, file_weights(options, pair.layers)]
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
) -> StorageCost:
    """What factors take in the file, never too little.

    A format may make one matrix of several layers, or several of one (see `sigmascope.lora.alignment`). Joined, a
    layer's column of `up` is as long as all layers of the fused matrix together; divided, each part has a `down` of
    its own.

    Args:
        format: Of the file.
        pair: The checkpoints.
        options: Precision.
        metadata: Texts for the header.
        diffs: Keys of tensors whose change is stored whole.
    """
    lora_format, layout, blocks = format_named(format), pair.layout, blocks_of_model(pair.layers, pair.layout)
    divides = lora_format.naming(layout.family) == "diffusers"
    layers, rows = frozenset(pair.layers), dict[str, Row]()
    other = _FIELDS_BYTES
    for layer in pair.layers:
        placed = lora_format.placement(layer, layout, blocks=blocks)
        if isinstance(placed, Row) and len(placed.parts) > 1:
            rows[layer] = placed
            if divides:
                other += 3 * (len(layer.encode()) + _ENTRY_BYTES) * (len(placed.parts) - 1)
    for key in diffs:
        values = prod(pair.base.info(key).shape) * options.storage_dtype.itemsize
        other += values + len(key.encode()) + _ENTRY_BYTES

    def numbers(layer: str, weight_shape: Sequence[int]) -> int:
        out, inner = matrix_shape(weight_shape)
        row = rows.get(layer)
        if row is None:
            return out + inner
        if divides:
            return out + len(row.parts) * inner
        start = layer.removesuffix(layout.split(layer)[1])
        sizes = {part: pair.shape(start + part)[0] for part in row.parts if start + part in layers}
        return sum(joined_sizes(sizes, row, inner)) + inner

    return StorageCost.of(
        options.storage_dtype,
        metadata,
        other_bytes=other,
        names=lambda layer: lora_format.keys_for(layer, layout, blocks),
        numbers=numbers,
    )


@dataclass(frozen=True, slots=True)
class DecomposedLayer:
    """A layer with the place of its factors and the rank it gets.

    Attributes:
        name: Of its record in the journal.
        record: What was found.
        rank: 0: it is not in the LoRA.
    """

    name: str
    record: LayerRecord
    rank: int

    @property
    def reason(self) -> LeftOutReason | None:
        """Why it is not in the LoRA; None where it is."""
        return self.record.reason if self.rank > 0 or self.record.reason else "rank_0"


class Extraction:
    """Decomposes the layers of a pair into a journal; what the journal holds already is not done again.

    Args:
        pair: The checkpoints.
        options: What to keep.
        journal: Open.
        device: Where to compute.
        progress: Told after each layer, with the error so far.
        statistics: In whose metric the error is least; in Frobenius norm without.
    """

    def __init__(
        self,
        pair: CheckpointPair,
        options: ExtractOptions,
        journal: Journal,
        device: torch.device,
        progress: Progress,
        statistics: ModelStatistics | None = None,
    ) -> None:
        self._pair = pair
        self._options = options
        self._journal = journal
        self._reader = LayerReader(pair, device)
        self._device = device
        self._progress = progress
        self._statistics = statistics
        self._done = 0
        self._total = 0

    def run(self) -> dict[str, DecomposedLayer]:
        """Decompose every layer at the rank of its own policy, in the order of the pair's layers.

        Raises:
            SigmascopeError: From reading, decomposing or storing a layer.
        """
        rules = self._options.rank_rules
        wanted = {layer: rules.policy_for(layer, self._pair.shape(layer)) for layer in self._pair.layers}
        records = self._round(0, wanted)
        return {
            layer: DecomposedLayer(f"0:{layer}", record, record.rank) for layer, record in records.items()
        }

    def run_within(self, budget: Budget, storage: StorageCost) -> dict[str, DecomposedLayer]:
        """The same under a budget, by which all layers together choose their ranks.

        Args:
            budget: What they share.
            storage: What factors take in the file.

        Raises:
            SigmascopeError: As of `run`.
            ConfigError: The budget cannot be met.
        """
        rules = self._options.rank_rules
        shapes = {layer: self._pair.shape(layer) for layer in self._pair.layers}
        guesses = budget.first_guess(shapes, storage)
        first: dict[str, RankPolicy | int | None] = {
            layer: None if rules.is_excluded(layer) else rules.override_for(layer) or guesses[layer]
            for layer in shapes
        }
        records = self._round(0, first)
        names = {layer: f"0:{layer}" for layer in records}
        pinned = {layer: records[layer].rank for layer in records if rules.override_for(layer)}
        lost = lost_outside(budget, records)
        weights = layer_weights(self._options, records)
        number, allowed, error = 0, budget, 0.0
        while True:
            spectra = {
                layer: record.spectrum for layer, record in records.items() if record.reason is None
            } | lost
            fixed = {layer: rank for layer, rank in pinned.items() if layer in spectra}
            try:
                allocation = allowed.allocate(spectra, storage, fixed | dict.fromkeys(lost, 0), weights)
            except ConfigError:
                if budget.max_error is None or allowed is budget:
                    raise
                refuse_storage(budget.max_error, error)
            if allocation.wanted:
                number += 1
                records |= self._round(number, allocation.wanted)
                names |= {layer: f"{number}:{layer}" for layer in allocation.wanted}
                continue
            chosen = {
                layer: DecomposedLayer(names[layer], record, min(allocation.ranks.get(layer, 0), record.rank))
                for layer, record in records.items()
            }
            error = true_error(chosen, budget.weights, weights)
            if budget.max_error is None or error <= budget.max_error:
                return chosen
            allowed = tighter(allowed, budget.max_error, error)

    def weighted_error(self, layers: Mapping[str, DecomposedLayer]) -> float | None:
        """The overall error as the statistics or the budget weigh it; None where all errors count the same."""
        budget = self._options.budget
        if budget is None:
            return None if self._statistics is None else true_error(layers, (), {})
        records = {layer: decomposed.record for layer, decomposed in layers.items()}
        weights = layer_weights(self._options, records)
        if self._statistics is None and not weights and not budget.weights:
            return None
        return true_error(layers, budget.weights, weights)

    def _round(self, number: int, wanted: Mapping[str, RankPolicy | int | None]) -> dict[str, LayerRecord]:
        """Work through some layers; None as policy: the layer is excluded."""
        decomposed = {
            layer: read_record(self._journal, f"{number}:{layer}")
            for layer in wanted
            if f"{number}:{layer}" in self._journal
        }
        self._total += len(wanted)
        self._done += len(decomposed)

        def work(layer: str) -> LayerRecord:
            policy = wanted[layer]
            left_out: LeftOutReason | None = None
            if policy is None:
                left_out = "excluded"
            elif not in_coverage(layer, self._options.target_coverage):
                left_out = "outside_coverage"
            record, factors = extract_layer(
                self._reader,
                layer,
                policy if policy is not None else 1,
                self._options.storage_dtype,
                left_out=left_out,
                min_diff=self._options.min_diff,
                metric_in=partial(
                    metric_of, self._statistics, self._pair, layer, self._options.ridge, self._device
                ),
            )
            write_record(self._journal, f"{number}:{layer}", record, factors)
            return record

        sizes = {layer: math.prod(self._pair.shape(layer)) for layer in wanted if layer not in decomposed}
        change = math.fsum(record.delta_norm**2 for record in decomposed.values())
        lost = math.fsum(record.error_at(record.rank) ** 2 for record in decomposed.values())
        for layer, record in run_layers(sizes, work, workers=self._options.workers):
            decomposed[layer] = record
            change += record.delta_norm**2
            lost += record.error_at(record.rank) ** 2
            self._done += 1
            error = 100 * math.sqrt(lost / change) if change > 0 else 0.0
            self._progress(self._done, self._total, f"error {error:.1f} % {layer}")
        return {layer: decomposed[layer] for layer in wanted}


def layer_weights(options: ExtractOptions, records: Mapping[str, LayerRecord]) -> Mapping[str, float]:
    """How much each layer's squared error counts under a budget; a metric has it in itself.

    Raises:
        ConfigError: `budget_weights` names no JSON object of layers and weights.
    """
    if options.statistics is not None or options.budget_weights == "plain":
        return {}
    if options.budget_weights != "relative":
        return file_weights(options, list(records))
    # A base of zeros, as of a layer that was added, is taken to be as large as its change.
    sizes = {layer: max(record.base_norm, record.delta_norm) for layer, record in records.items()}
    return {layer: 1.0 / size**2 for layer, size in sizes.items() if size > 0.0}


def metric_of(
    statistics: ModelStatistics | None,
    pair: CheckpointPair,
    layer: str,
    ridge: float,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerMetric | None:
    """As of `ModelStatistics.metric_of`, for a layer of a pair; None without statistics."""
    if statistics is None:
        return None
    part, path = pair.layout.split(layer)
    known = path if part == "denoiser" else None  # a second denoiser has the same paths
    return statistics.metric_of(known, layer, pair.shape(layer), ridge, device, dtype)


def statistics_for(pair: CheckpointPair, path: str | PathLike[str]) -> ModelStatistics:
    """As of `load_statistics_of`, made with either of the two models."""
    places = [pair.layout.split(layer) for layer in pair.layers]
    return load_statistics_of(
        path,
        {denoiser_fingerprint(side) for side in (pair.base, pair.tuned)},
        [inner if part == "denoiser" else None for part, inner in places],
    )


def file_weights(options: ExtractOptions, layers: Sequence[str]) -> dict[str, float]:
    """The weights of a `--budget_weights` file; none for `relative` and `plain`.

    Raises:
        ConfigError: It is no JSON object of layers and weights.
    """
    if options.budget is None or options.budget_weights in ("relative", "plain"):
        return {}
    flag, path = "--budget_weights", Path(options.budget_weights)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{flag} {path}: {error}",
            hint='Use relative, plain, or a JSON file such as {"denoiser.conv_in": 2.0}.',
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} {path} holds no object.", hint="Use a name and a weight for each layer.")
    for layer, weight in given.items():
        if layer not in layers:
            near = get_close_matches(layer, layers, n=1)
            raise ConfigError(
                f"{flag} {path}: the model has no layer {layer!r}.",
                hint=f"Did you mean {near[0]}?" if near else "Use the names of `sigmascope lora inspect`.",
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"{flag} {path}: {layer}: {weight!r} is no weight.", hint="Use 0 or more.")
    return {layer: float(weight) for layer, weight in given.items()}


def lost_outside(budget: Budget, records: Mapping[str, LayerRecord]) -> dict[str, Spectrum]:
    """What layers that are left out add to the error of all, which is what a budget may limit."""
    if budget.max_error is None or all(record.reason is not None for record in records.values()):
        return {}
    reasons = {None, "unchanged"}
    return {
        layer: decomposed.spectrum
        for layer, decomposed in records.items()
        if decomposed.reason not in reasons
    }


def true_error(
    layers: Mapping[str, DecomposedLayer], weights: Weights, layer_weights: Mapping[str, float]
) -> float:
    """The error that `max_error` limits, of the factors as they are stored."""
    change = lost = 0.0
    for layer, decomposed in layers.items():
        weight = weight_of(layer, weights) * layer_weights.get(layer, 1.0)
        change += weight * decomposed.record.weighted_norm**2
        lost += weight * decomposed.record.weighted_error_at(decomposed.rank) ** 2
    return math.sqrt(lost / change) if change > 0 else 0.0


def tighter(allowed: Budget, asked: float, error: float) -> Budget:
    """A budget that makes up for what rounding added beyond what was reckoned with.

    Raises:
        ConfigError: That is most of the error: the change is too small for the storage precision.
    """
    assert allowed.max_error is not None
    tightened = _TIGHTENED * allowed.max_error * asked / error
    if tightened < _LEAST_TIGHTENED * asked:
        refuse_storage(asked, error)
    return replace(allowed, max_error=tightened)


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
            + (" Biases and norms alone make no LoRA." if options.biases_and_norms else ""),
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
) -> ExtractionReport:
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


def _extracted_module(name: str, decomposed: DecomposedLayer) -> ExtractedModule:
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


def write_extracted(
    target: Path,
    format: FormatName,
    pair: CheckpointPair,
    layers: Mapping[str, DecomposedLayer],
    journal: Journal,
    options: ExtractOptions,
    metadata: Mapping[str, str],
    diffs: Iterable[str],
) -> None:
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

    Raises:
        WriteError: The target cannot be written.
        NonFiniteError: A change does not fit the storage precision.
    """
    reader = LayerReader(pair, _CPU)
    writer = LoraWriter(
        target,
        format=format,
        layout=pair.layout,
        metadata=metadata,
        expected=[layer for layer, decomposed in layers.items() if decomposed.rank > 0],
        model_layers=pair.layers,
        dtype=options.storage_dtype,
        compact=options.budget is not None,
    )
    with writer:
        for layer, decomposed in layers.items():
            if decomposed.rank > 0:
                if decomposed.record.whole:
                    factors = at_full_rank(reader.read(layer).delta, options.storage_dtype).factors
                else:
                    factors = read_factors(journal, decomposed.name, decomposed.rank)
                writer.write(layer, factors)
        for key in diffs:
            writer.write_diff(key, pair.change(key, _CPU).delta)
