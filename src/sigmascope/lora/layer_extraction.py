"""The layers of an extraction: read from both files, subtracted, decomposed, kept in the journal.

With ranks or policies for single layers there is one round. A budget for the whole file compares layers, so it
may ask for more singular values of some of them once it has seen those of all.

Reading, widening, subtracting and three sums over tens of millions of values are limited by memory traffic if each is
a separate pass, and fresh memory for each layer costs a page fault every 4 KiB. So layers are read and subtracted in
pieces that stay in the processor's cache, into memory that is reused.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.files import short_path
from sigmascope.lora.budget import (
    RELATIVE,
    Budget,
    StorageCost,
    Weights,
    file_weights,
    needs_spread_ranks,
    refuse_storage,
    require_weighing,
    weight_of,
)
from sigmascope.lora.decompose import RoundedFactors, at_full_rank, decompose
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.journal import Journal
from sigmascope.lora.layer_names import Coverage, in_coverage
from sigmascope.lora.linalg import (
    Spectrum,
    blocked_energy,
    fast_dtype,
    frobenius_norm,
    matrix_shape,
    max_rank,
)
from sigmascope.lora.pairs import CheckpointPair, PairOptions, require_one_of
from sigmascope.lora.parallel import ThreadScratch, run_layers
from sigmascope.lora.ranks import FixedRank, RankPolicy, RankRules, require_rank
from sigmascope.lora.statistics import (
    RIDGE,
    LayerMetric,
    ModelStatistics,
    require_ridge,
)
from sigmascope.lora.writer import STORAGE_DTYPES, SavePrecision
from sigmascope.probes.reading import error_text, is_out_of_memory
from sigmascope.progress import Progress

LeftOutReason = Literal["unchanged", "below_min_diff", "outside_coverage", "excluded", "rank_0"]

# For `_tighter`.
_TIGHTENED_SHARE: Final = 0.999  # of the error that should do
_MIN_TIGHTENED_SHARE: Final = 0.5  # of the error asked for: below, rounding takes up most of it

# For `LayerReader`.
_PIECE: Final = 1 << 18  # elements at a time: 1 MiB in float32
_MIN_ORDINARY_SIZE: Final = 1e-12
"""Squares of much smaller float32 values are subnormal, so that their sums would be wrong."""

_TENSORS: Final = ("values", "errors", "weighted")  # of a `LayerRecord`


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The choices of one extraction.

    Attributes:
        rank: Rank of Linear layers; 9999 keeps everything.
        conv_rank: Rank of convolutions; 9999 keeps everything.
        save_precision: Dtype of the stored factors. fp16 and bf16 take the same space; fp16 is the default because it
            rounds eight times finer, and the factors' balanced scaling keeps them far from its limits.
        min_diff: Layers whose largest change is below this are left out. 0 leaves out only unchanged layers.
        target_coverage: `attention`: the projections of attn1 and attn2. `extended`: also the feed-forward
            layers and proj_in/proj_out around them. `full`: every Linear and convolution layer.
        device: Where to decompose: `auto` (CUDA when there is one, else CPU) or a torch device.
        rules: How much rank each layer gets, in place of `rank` and `conv_rank`.
        budget: The size or error that all layers share; then only the overrides and exclusions of `rules` count.
        biases_and_norms: Also store the changes of biases, norms and embeddings, in full, as `diff`.
        format: Of the LoRA: `native`, `kohya`, `peft`, `comfyui`; `auto` is what the model's own tools read.
        pairing: Which parts of the models are compared, and what may be left out of the comparison.
        workers: Threads on the CPU, one core each; as many as cores when left out.
        budget_weights: How much each layer's squared error counts under a budget: `relative`, as its share of the
            layer's own ‖W‖²; `plain`, as it is; or a JSON file of layers and weights. `statistics` replace it.
        statistics: A file of `sigmascope.lora.statistics`: the factors then minimise the error of the layers' outputs
            instead of that of their weights.
        ridge: Weight of directions that never occurred in the statistics, as a share of the mean.

    Raises:
        ConfigError: A value makes no sense; the message names the flag.
    """

    rank: int = 32
    conv_rank: int = 16
    save_precision: SavePrecision = "fp16"
    min_diff: float = 0.0
    target_coverage: Coverage = "full"
    device: str = "auto"
    rules: RankRules | None = None
    budget: Budget | None = None
    biases_and_norms: bool = False
    format: str = "auto"
    pairing: PairOptions = field(default_factory=PairOptions)
    workers: int | None = None
    budget_weights: str = RELATIVE
    statistics: Path | None = None
    ridge: float = RIDGE

    def __post_init__(self) -> None:
        require_ridge(self.ridge)
        require_weighing(self.budget_weights, is_of_use=self.budget is not None and self.statistics is None)
        if self.statistics is not None:
            self.rank_rules.require_for_statistics()
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"--workers {self.workers} leaves no worker.", hint="Use 1 or more.")
        require_rank("--rank", self.rank)
        require_rank("--conv_rank", self.conv_rank)
        require_one_of("--save_precision", self.save_precision, get_args(SavePrecision))
        require_one_of("--target_coverage", self.target_coverage, get_args(Coverage))
        if not (math.isfinite(self.min_diff) and self.min_diff >= 0):
            raise ConfigError(
                f"--min_diff {self.min_diff} is not a threshold.", hint="Use 0 or a positive number."
            )

    @property
    def rank_rules(self) -> RankRules:
        """`rules`, or rules made of `rank` and `conv_rank`."""
        return self.rules or RankRules(FixedRank(self.rank, self.conv_rank))

    @property
    def fixed_rank(self) -> FixedRank | None:
        """The one rank of all Linear layers and that of all convolutions; None where layers differ."""
        rules = self.rank_rules
        alike = self.budget is None and not rules.overrides and isinstance(rules.default, FixedRank)
        return rules.default if alike and isinstance(rules.default, FixedRank) else None

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON values; `ranks` says in one text how much rank was asked for."""
        bare = replace(self, rules=None, budget=None, statistics=None, budget_weights=RELATIVE)
        fields = asdict(bare) | {"budget_weights": self.budget_weights}
        fields["statistics"] = None if self.statistics is None else short_path(self.statistics)
        fixed = self.fixed_rank
        fields |= {
            "rank": None if fixed is None else fixed.rank,
            "conv_rank": None if fixed is None else fixed.conv_rank,
            "ranks": self.asked_rank,
        }
        return {name: value for name, value in fields.items() if name not in {"rules", "budget"}}

    @property
    def asked_rank(self) -> str:
        """Canonical text of how much rank was asked for."""
        if self.budget is None:
            return self.rank_rules.describe()
        patterns = self.rank_rules.describe_patterns()
        return json.dumps({"budget": json.loads(self.budget.describe()), **patterns}, ensure_ascii=False)

    @property
    def header_text(self) -> str:
        """The same for the file's header; see `Budget.brief`."""
        if self.budget is None or self.rank_rules.describe_patterns():
            return self.asked_rank
        return self.budget.brief or self.asked_rank

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype that `save_precision` names."""
        return STORAGE_DTYPES[self.save_precision]


def resolve_device(name: str) -> torch.device:
    """Turn a `--device` value into a device that can be used now.

    Args:
        name: `auto`, `cpu`, `cuda`, `cuda:1`, … MPS is refused: it has no float64, which the errors need.

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises any of these by device type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {name} cannot be used: {reason}", hint="Use --device cpu or auto."
        ) from error
    if device.type == "meta":
        raise ConfigError("--device meta holds no values.", hint="Use --device cpu or auto.")
    return device


class Extraction:
    """Decomposes the layers of a pair into a journal, and skips layers that the journal already holds.

    Args:
        pair: The checkpoints.
        options: What to keep.
        journal: The open journal.
        device: Where to compute.
        progress: Called after each layer, with the error so far.
        statistics: The statistics whose metric the error is minimised in; by default the Frobenius norm is.
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
        self._reader = LayerReader(pair, device, statistics, options.ridge)
        self._progress = progress
        self._done = 0
        self._total = 0

    def run(self, storage: StorageCost) -> "dict[str, DecomposedLayer]":
        """Decompose every layer at the rank of its own policy, in the order of the pair's layers.

        Args:
            storage: How many bytes factors take in the file; a budget chooses the ranks of all layers by it.

        Raises:
            SigmascopeError: From reading, decomposing or storing a layer.
            ConfigError: The budget cannot be met.
        """
        if self._options.budget is not None:
            return self._run_within(self._options.budget, storage)
        rules = self._options.rank_rules
        wanted = {layer: rules.policy_for(layer, self._pair.shape(layer)) for layer in self._pair.layers}
        records = self._round(0, wanted)
        return {
            layer: DecomposedLayer(f"0:{layer}", record, record.rank) for layer, record in records.items()
        }

    def _run_within(self, budget: Budget, storage: StorageCost) -> "dict[str, DecomposedLayer]":
        rules = self._options.rank_rules
        shapes = {layer: self._pair.shape(layer) for layer in self._pair.layers}
        has_statistics = self._options.statistics is not None
        guesses = budget.first_guess(shapes, storage, has_statistics=has_statistics)
        first: dict[str, RankPolicy | int | None] = {
            layer: None if rules.is_excluded(layer) else rules.override_for(layer) or guesses[layer]
            for layer in shapes
        }
        records = self._round(0, first)
        names = {layer: f"0:{layer}" for layer in records}
        pinned = {layer: records[layer].rank for layer in records if rules.override_for(layer)}
        lost: dict[str, Spectrum] = {}
        if budget.max_error is not None and any(record.reason is None for record in records.values()):
            # What is left out adds to the error of all, which is limited.
            lost = {
                layer: record.spectrum
                for layer, record in records.items()
                if record.reason not in (None, "unchanged")
            }
        weights = layer_weights(self._options, records)
        spread = needs_spread_ranks(
            self._options.budget_weights,
            self._pair.layout.family,
            has_statistics=has_statistics,
        )
        number, allowed, error = 0, budget, 0.0
        while True:
            spectra = {
                layer: record.spectrum for layer, record in records.items() if record.reason is None
            } | lost
            fixed = {layer: rank for layer, rank in pinned.items() if layer in spectra}
            try:
                allocation = allowed.allocate(
                    spectra, storage, fixed | dict.fromkeys(lost, 0), weights, spread=spread
                )
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
            allowed = _tighter(allowed, budget.max_error, error)

    def weighted_error(self, layers: "Mapping[str, DecomposedLayer]") -> float | None:
        """The overall error as the statistics or the budget weigh it; None where all errors count the same."""
        budget = self._options.budget
        weights: Mapping[str, float] = {}
        if budget is not None:
            weights = layer_weights(self._options, {layer: each.record for layer, each in layers.items()})
        patterns = budget.weights if budget is not None else ()
        if self._options.statistics is None and not weights and not patterns:
            return None
        return true_error(layers, patterns, weights)

    def _round(self, number: int, wanted: Mapping[str, RankPolicy | int | None]) -> "dict[str, LayerRecord]":
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
                self._reader, layer, 1 if policy is None else policy, self._options, left_out
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


@dataclass(frozen=True, slots=True)
class DecomposedLayer:
    """A layer, where its factors are, and the rank that it gets.

    Attributes:
        name: Name of its record in the journal.
        record: What was measured.
        rank: Its rank; 0 if it is not in the LoRA.
    """

    name: str
    record: "LayerRecord"
    rank: int

    @property
    def reason(self) -> LeftOutReason | None:
        """Why it is not in the LoRA; None where it is."""
        return self.record.reason if self.rank > 0 or self.record.reason else "rank_0"


def layer_weights(options: ExtractOptions, records: "Mapping[str, LayerRecord]") -> Mapping[str, float]:
    """How much each layer's squared error counts under a budget; a metric includes such weights already.

    Raises:
        ConfigError: `budget_weights` does not name a JSON object of layers and weights.
    """
    if options.statistics is not None:
        return {}
    if options.budget_weights != RELATIVE:
        return file_weights(options.budget_weights, list(records))
    # A base of zeros, as of a layer that was added, is taken to be as large as its change.
    sizes = {layer: max(record.base_norm, record.delta_norm) for layer, record in records.items()}
    return {layer: 1.0 / size**2 for layer, size in sizes.items() if size > 0.0}


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


def _tighter(allowed: Budget, asked: float, error: float) -> Budget:
    """A tighter budget, to make up for more rounding than was expected.

    Raises:
        ConfigError: That is most of the error: the change is too small for the storage precision.
    """
    assert allowed.max_error is not None
    tightened = _TIGHTENED_SHARE * allowed.max_error * asked / error
    if tightened < _MIN_TIGHTENED_SHARE * asked:
        refuse_storage(asked, error)
    return replace(allowed, max_error=tightened)


def extract_layer(
    reader: "LayerReader",
    layer: str,
    policy: RankPolicy | int,
    options: ExtractOptions,
    left_out: LeftOutReason | None = None,
) -> "tuple[LayerRecord, LoraFactors | None]":
    """Read a layer's change and compute the factors to store.

    Args:
        reader: The pair's reader.
        layer: The layer's path.
        policy: How much rank it gets, or how many singular values to compute for a later choice.
        options: Storage dtype, and the least change that is kept.
        left_out: The reason if the layer is not wanted; its change is measured anyway.

    Raises:
        SigmascopeError: Naming the layer.
    """
    try:
        change = reader.read(layer)
        reason = left_out
        if change.delta_norm == 0:  # below 10⁻¹⁶² too, where float64 has no squares
            reason = "unchanged"
        elif reason is None and change.largest < options.min_diff:
            reason = "below_min_diff"
        metric = None if reason == "unchanged" else reader.metric(layer, change.delta.dtype)
        stored = None
        if reason is None:
            try:
                stored = _decompose(change, policy, options.storage_dtype, metric)
            except SigmascopeError as error:
                raise type(error)(f"{layer}: {error.message}", hint=error.hint) from error
    except Exception as error:
        if isinstance(error, SigmascopeError) or not is_out_of_memory(error):
            raise
        raise SigmascopeError(
            f"{layer}: there is no memory left ({error_text(error).splitlines()[0]})",
            hint="Close other programs that use this memory, or use --workers 1 or --device cpu.",
        ) from error
    if stored is None:
        return _record(change, reason or "rank_0", None, metric), None
    return _record(change, None, stored, metric), stored.factors


def _record(
    change: "LayerDelta",
    reason: LeftOutReason | None,
    stored: RoundedFactors | None,
    metric: LayerMetric | None,
) -> "LayerRecord":
    shape, weighted_norm = tuple(change.delta.shape), change.delta_norm
    values = errors = weighted = torch.empty(0, dtype=torch.float64)
    if stored is not None:
        values, errors, weighted = stored.spectrum.values, stored.errors, stored.weighted
        weighted_norm = math.sqrt(stored.spectrum.total_energy)
    elif metric is not None:
        weighted_norm = frobenius_norm(metric.weigh(change.delta.reshape(matrix_shape(shape))))
    return LayerRecord(
        shape=shape,
        delta_norm=change.delta_norm,
        base_norm=change.base_norm,
        largest=change.largest,
        reason=reason,
        whole=bool(errors.isnan().any()),
        values=values,
        errors=errors,
        weighted_norm=weighted_norm,
        weighted=weighted,
    )


def _decompose(
    change: "LayerDelta", policy: RankPolicy | int, dtype: torch.dtype, metric: LayerMetric | None
) -> RoundedFactors | None:
    """Compute singular values until the policy can choose, and cut to its choice; None for rank 0."""
    shape = tuple(change.delta.shape)
    full = max_rank(shape)
    if isinstance(policy, FixedRank) and policy.rank_for(shape) == full:
        return at_full_rank(change.delta, dtype, metric)
    asked = min(policy if isinstance(policy, int) else policy.first_guess(shape), full)
    while True:
        stored = decompose(
            change.delta,
            asked,
            dtype,
            norm=change.delta_norm,
            rounded=change.rounded,
            with_spectrum=True,
            metric=metric,
            memory=change.memory,
        )
        if isinstance(policy, int):
            return stored
        chosen = policy.choose(stored.spectrum)
        if chosen is not None:
            break
        asked = min(2 * asked, full)
    if chosen == full:
        return at_full_rank(change.delta, dtype, metric)
    return stored.cut(chosen) if chosen > 0 else None


class LayerReader:
    """Reads layers of a pair into its own buffers, one set for each thread that calls it.

    Args:
        pair: The two checkpoints.
        device: Where the difference is formed and stays.
        statistics: Statistics of the model's layers, for `metric`.
        ridge: Weight of directions that never occurred in them.
    """

    def __init__(
        self,
        pair: CheckpointPair,
        device: torch.device,
        statistics: ModelStatistics | None = None,
        ridge: float = RIDGE,
    ) -> None:
        self._pair = pair
        self._device = device
        self._statistics = statistics
        self._ridge = ridge
        self._on_cpu = device.type == "cpu"
        self._rounds = fast_dtype(device) is not None
        self._threads = ThreadScratch()

    def metric(self, layer: str, dtype: torch.dtype) -> LayerMetric | None:
        """The metric in which a layer's error is minimised; without statistics None, for the Frobenius norm."""
        if self._statistics is None:
            return None
        part, path = self._pair.layout.split(layer)
        known = path if part == "denoiser" else None  # a second denoiser has the same paths
        shape = self._pair.shape(layer)
        return self._statistics.metric_of(known, layer, shape, self._ridge, self._device, dtype)

    def read(self, layer: str) -> "LayerDelta":
        """Read one layer from both files and subtract.

        Args:
            layer: One of the pair's layers.

        Raises:
            NonFiniteError: Either file holds NaN or Inf there.
            CheckpointError: The tensor cannot be read.
        """
        key = f"{layer}.weight"
        if not self._on_cpu or self._pair.precision_of(key) != torch.float32:
            return self._as_a_whole(layer)
        shape = self._pair.shape(layer)
        elements = math.prod(shape)
        memory = self._threads.memory
        delta = memory.scratch("delta", elements, torch.float32)
        rounded = weighed = None
        if self._statistics is not None:
            weighed = memory.scratch("weighed", elements, torch.float32).view(matrix_shape(shape))
        elif self._rounds:
            rounded = memory.scratch("rounded", elements, torch.bfloat16)
        base, tuned = (
            side.pieces(key, memory.scratch(name, _PIECE * side.info(key).dtype.itemsize, torch.uint8))
            for name, side in (("base", self._pair.base), ("tuned", self._pair.tuned))
        )
        energy, base_energy, largest = _subtract(base, tuned, delta, rounded)
        # Whether the squares behind these sums were float32 numbers; false for NaN and Inf too.
        changed = largest == 0.0 or largest > _MIN_ORDINARY_SIZE
        if not (changed and base_energy > _MIN_ORDINARY_SIZE**2 and energy + base_energy < math.inf):
            return self._as_a_whole(layer)  # which sums in float64, and says what is wrong where something is
        return LayerDelta(
            delta.view(shape),
            None if rounded is None else rounded.view(shape),
            math.sqrt(energy),
            math.sqrt(base_energy),
            largest,
            weighed,
        )

    def _as_a_whole(self, layer: str) -> "LayerDelta":
        change = self._pair.change(f"{layer}.weight", self._device)
        largest = float(change.delta.abs().max()) if change.delta.numel() else 0.0
        return LayerDelta(change.delta, None, change.delta_norm, change.base_norm, largest)


def _subtract(
    base: Iterator[Tensor], tuned: Iterator[Tensor], delta: Tensor, rounded: Tensor | None
) -> tuple[float, float, float]:
    """Fill `delta` and `rounded`; give ‖delta‖², ‖base‖² and max |delta|."""
    wide_base = torch.empty(min(_PIECE, delta.numel()), dtype=torch.float32)
    energies: list[Tensor] = []
    base_energies: list[Tensor] = []
    extremes: list[Tensor] = []
    for number, (base_piece, tuned_piece) in enumerate(zip(base, tuned, strict=True)):
        piece = slice(number * _PIECE, (number + 1) * _PIECE)
        part = delta[piece]
        widened = wide_base[: part.numel()]
        part.copy_(tuned_piece)
        widened.copy_(base_piece)
        part.sub_(widened)
        if rounded is not None:
            rounded[piece].copy_(part)
        energies.append(blocked_energy(part))
        base_energies.append(blocked_energy(widened))
        extremes.extend(torch.aminmax(part))
    return (
        math.fsum(map(float, energies)),
        math.fsum(map(float, base_energies)),
        max((abs(float(extreme)) for extreme in extremes), default=0.0),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerDelta:
    """How one weight differs: ΔW = tuned − base.

    Attributes:
        delta: ΔW, float32 or float64, of the weight's shape. Valid until this thread reads the next layer.
        rounded: ΔW in bfloat16 on devices where iterations are faster in it; otherwise None.
        delta_norm: ‖ΔW‖, to 10⁻⁷ of itself.
        base_norm: ‖W‖ of the base.
        largest: max |ΔW|.
        memory: A buffer (out, in·kh·kw) for the change weighed by a metric, if there is one to reuse.
    """

    delta: Float[Tensor, "*shape"]
    rounded: Float[Tensor, "*shape"] | None
    delta_norm: float
    base_norm: float
    largest: float
    memory: Float[Tensor, "m n"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """What was measured of a layer, and what is stored of it.

    Attributes:
        shape: Shape of its weight.
        delta_norm: ‖ΔW‖.
        base_norm: ‖W‖ of the base.
        largest: max |ΔW|.
        reason: Why it is not in the LoRA; None if it is.
        whole: Whether it is kept at full rank, as ΔW itself: its factors are computed again when they are written.
        values: (k,), the singular values found.
        errors: (r + 1,), squared errors of the stored factors cut to their first 0 … r columns.
        weighted_norm: ‖SᵀΔW·R‖ in the metric of the layer's statistics, which `values` are in too; ‖ΔW‖ without
            statistics.
        weighted: `errors` in that metric.
    """

    shape: tuple[int, ...]
    delta_norm: float
    base_norm: float
    largest: float
    reason: LeftOutReason | None
    whole: bool
    values: Float[Tensor, " k"]
    errors: Float[Tensor, " ranks"]
    weighted_norm: float
    weighted: Float[Tensor, " ranks"]

    @property
    def rank(self) -> int:
        """Columns of the stored factors."""
        return max(len(self.errors) - 1, 0)

    @property
    def spectrum(self) -> Spectrum:
        """The singular values with ‖ΔW‖², in the metric; all zero where nothing changed."""
        values = self.values if self.delta_norm > 0 else torch.zeros(1, dtype=torch.float64)
        return Spectrum(values, self.weighted_norm**2, self.shape)

    def kept_energy(self, rank: int) -> float:
        """Share of ‖ΔW‖², in the metric, in the first singular values, 0 to 1, before rounding."""
        if self.whole:
            return 1.0
        kept = float(self.values[:rank].square().sum())
        return min(kept / self.weighted_norm**2, 1.0) if self.delta_norm > 0 else 0.0

    def error_at(self, rank: int) -> float:
        """‖ΔW − up·down‖ of the stored factors cut to this rank."""
        return self.delta_norm if rank == 0 else math.sqrt(float(self.errors[rank]))

    def weighted_error_at(self, rank: int) -> float:
        """The same in the metric."""
        return self.weighted_norm if rank == 0 else math.sqrt(float(self.weighted[rank]))


def write_record(journal: Journal, name: str, record: LayerRecord, factors: LoraFactors | None) -> None:
    """Keep a layer's record and factors, but not those of a whole layer, which are cheaper to compute again.

    Raises:
        WriteError: The disk refuses.
    """
    tensors = {"values": record.values, "errors": record.errors}
    if record.weighted.data_ptr() != record.errors.data_ptr():
        tensors["weighted"] = record.weighted
    if factors is not None and not record.whole:
        tensors |= {"up": factors.up, "down": factors.down}
    facts = {item.name: getattr(record, item.name) for item in fields(record) if item.name not in _TENSORS}
    journal.append(name, tensors, facts)


def read_record(journal: Journal, name: str) -> LayerRecord:
    """A record as it was written: numbers in JSON and float64 tensors keep every bit."""
    tensors, facts = journal.read(name)
    known = {"weighted": tensors["errors"]} | {key: tensors[key] for key in _TENSORS if key in tensors}
    return LayerRecord(**(facts | known | {"shape": tuple(facts["shape"])}))


def read_factors(
    journal: Journal, reader: LayerReader, layer: str, decomposed: DecomposedLayer, dtype: torch.dtype
) -> LoraFactors:
    """The stored factors of a layer, cut to its rank; those of a whole layer are computed again."""
    if decomposed.record.whole:
        return at_full_rank(reader.read(layer).delta, dtype).factors
    tensors, facts = journal.read(decomposed.name)
    rank = decomposed.rank
    return LoraFactors(tensors["up"][:, :rank], tensors["down"][:rank], float(rank), tuple(facts["shape"]))
