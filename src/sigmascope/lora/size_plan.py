"""How large a LoRA of two checkpoints has to be: its error at every size, before one is made.

Every layer's change is decomposed once, deeper than any of the planned LoRAs needs. An extraction would store a cut of
these singular values, so the error of every rank and budget is known without writing a file.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Final

from sigmascope import svg
from sigmascope.checkpoints import atomic_path
from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lora.budget import RELATIVE, Budget, StorageCost, needs_spread_ranks
from sigmascope.lora.extract import extraction_metadata, resolve_format, statistics_for, storage_cost
from sigmascope.lora.layer_extraction import (
    DecomposedLayer,
    ExtractOptions,
    LayerReader,
    LayerRecord,
    extract_layer,
    layer_weights,
    resolve_device,
    true_error,
)
from sigmascope.lora.layer_names import in_coverage
from sigmascope.lora.pairs import CheckpointPair, open_pair
from sigmascope.lora.parallel import run_layers
from sigmascope.lora.ranks import FixedRank
from sigmascope.lora.statistics import ModelStatistics
from sigmascope.progress import Progress, no_progress
from sigmascope.units import format_size

_DEPTH_TO_RANK: Final = 2  # a budget gives some layers more than the fixed rank of the same bytes
_CURVE_POINTS: Final = 32  # of the curve
_CURVE_START_DIVISOR: Final = 8  # the curve begins at this part of rank 1's bytes
_NAMED_LAYERS: Final = 10  # that are named

# The picture, in pixels.
_WIDTH, _HEIGHT = 960, 460
_LEFT, _RIGHT, _TOP, _FOOT = 80, 920, 90, 400
_GRID, _FIXED, _BUDGET = "#e0e0e0", "#9e9e9e", "#1565c0"


@dataclass(frozen=True, slots=True)
class PlannedLora:
    """A LoRA that an extraction would make.

    Attributes:
        rank: The rank of all layers; None if a budget chooses each layer's.
        bytes: Size of the file; approximate for points of the curve.
        error: ‖ΔW − A‖ / ‖ΔW‖ over all layers, for the stored factors.
        weighted_error: The same as a budget weighs it: by the size of each layer's weight, or by the statistics.
        ranks: Rank of each layer; 0 if it is not in the file.
    """

    rank: int | None
    bytes: int
    error: float
    weighted_error: float
    ranks: Mapping[str, int] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Without the layers' ranks."""
        values = {name: getattr(self, name) for name in ("rank", "bytes", "error", "weighted_error")}
        return {**values, "layers": sum(rank > 0 for rank in self.ranks.values())}


@dataclass(frozen=True, slots=True)
class LayerShare:
    """One layer's share of the whole change.

    Attributes:
        name: Its path.
        share: Its share of the weighted ‖ΔW‖² of all layers.
        rank: Its rank at the knee.
    """

    name: str
    share: float
    rank: int


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The sizes that a LoRA of two checkpoints could have.

    Attributes:
        base, tuned: The checkpoints.
        statistics: The statistics that weigh the errors; None if each layer's error is weighed by the size of its
            weight.
        fixed: LoRAs with one rank for all layers, from 1 up.
        budget: For each of `fixed`, the best ranks for as many bytes.
        curve: The best ranks from an eighth of rank 1's bytes to those of the highest rank.
        knee: The point of `curve` beyond which more bytes gain little (Satopää et al. 2011, "kneedle").
        layers: Those with the largest shares, largest first.
        changed: Layers that changed and are wanted.
    """

    base: Path
    tuned: Path
    statistics: Path | None
    fixed: tuple[PlannedLora, ...]
    budget: tuple[PlannedLora, ...]
    curve: tuple[PlannedLora, ...]
    knee: PlannedLora
    layers: tuple[LayerShare, ...]
    changed: int

    def bytes_for(self, weighted_error: float) -> int | None:
        """Approximately the smallest size with at most this error; None if the curve does not reach it."""
        before: PlannedLora | None = None
        for point in self.curve:
            if point.weighted_error <= weighted_error:
                if before is None:
                    return point.bytes
                lost, height = (
                    before.weighted_error - other for other in (weighted_error, point.weighted_error)
                )
                return math.ceil(
                    before.bytes * math.exp(lost / height * math.log(point.bytes / before.bytes))
                )
            before = point
        return None

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "base": self.base.name,
            "tuned": self.tuned.name,
            "statistics": None if self.statistics is None else self.statistics.name,
            "changed_layers": self.changed,
            "knee": self.knee.as_dict(),
            **{
                name: [planned.as_dict() for planned in getattr(self, name)]
                for name in ("fixed", "budget", "curve")
            },
            "layers": [asdict(layer) for layer in self.layers],
        }


def plan_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    options: ExtractOptions | None = None,
    *,
    most_rank: int = 32,
    progress: Progress = no_progress,
) -> LoraPlan:
    """Find what error a LoRA has at which size. Nothing is written.

    Args:
        base: Checkpoint that the LoRA is for: safetensors (sharded too), `.ckpt`, or a diffusers folder.
        tuned: The fine-tuned checkpoint of the same architecture.
        options: Options of the extraction; their ranks and budget do not matter.
        most_rank: Fixed ranks are powers of two up to this. Each layer is decomposed to twice as many values.
        progress: Told after each layer.

    Raises:
        ConfigError: The rank makes no sense, or the device is not there.
        ModelMismatchError: The checkpoints do not belong together, nothing differs, or the statistics are those of
            another model.
        CheckpointError: An input cannot be read.
        NonFiniteError: NaN or Inf in an input.
    """
    options = options or ExtractOptions()
    if most_rank < 1:
        raise ConfigError(f"--max_rank {most_rank} is not a rank.", hint="Use 1 or more, such as 32.")
    with open_pair(base, tuned, options.pairing) as pair:
        statistics = None if options.statistics is None else statistics_for(pair, options.statistics)
        records = _decomposed(pair, options, statistics, _DEPTH_TO_RANK * most_rank, progress)
        format = resolve_format(options, pair)

        def storage(of: ExtractOptions) -> StorageCost:
            metadata = extraction_metadata(pair, of, statistics)
            return storage_cost(format, pair, of, metadata, layers=tuple(records))

        def of_rank(rank: int) -> StorageCost:
            rules = replace(options.rank_rules, default=FixedRank(rank, rank))
            return storage(replace(options, rules=rules, budget=None, budget_weights=RELATIVE))

        def of_size(size: int) -> StorageCost:
            return storage(replace(options, budget=Budget(max_bytes=size)))

        spread = needs_spread_ranks(
            options.budget_weights, pair.layout.family, has_statistics=statistics is not None
        )
        if not records:
            raise ModelMismatchError(
                f"{base} and {tuned} hold the same weights in all layers that are wanted: there is nothing to plan.",
                hint="Give the fine-tuned checkpoint as --tuned_model_path.",
            )
        weights = layer_weights(options, records)
        sizes = _Sizes(records, of_rank, of_size, weights, _DEPTH_TO_RANK * most_rank, spread=spread)
        fixed = tuple(sizes.of_rank(2**power) for power in range(most_rank.bit_length()))
        smallest, largest = fixed[0].bytes / _CURVE_START_DIVISOR, fixed[-1].bytes
        steps = [
            smallest * (largest / smallest) ** (point / (_CURVE_POINTS - 1)) for point in range(_CURVE_POINTS)
        ]
        curve = tuple(sizes.within([math.ceil(step) for step in steps]))
        at_fixed = tuple(sizes.within([planned.bytes for planned in fixed], measured=True))
        knee = curve[knee_of([point.bytes for point in curve], [point.weighted_error for point in curve])]
    shares = {layer: weights.get(layer, 1.0) * record.weighted_norm**2 for layer, record in records.items()}
    largest_first = sorted(shares, key=lambda layer: -shares[layer])[:_NAMED_LAYERS]
    return LoraPlan(
        base=Path(base),
        tuned=Path(tuned),
        statistics=options.statistics,
        fixed=fixed,
        budget=at_fixed,
        curve=curve,
        knee=knee,
        layers=tuple(
            LayerShare(layer, shares[layer] / math.fsum(shares.values()), knee.ranks[layer])
            for layer in largest_first
        ),
        changed=len(records),
    )


def _decomposed(
    pair: CheckpointPair,
    options: ExtractOptions,
    statistics: ModelStatistics | None,
    rank: int,
    progress: Progress,
) -> dict[str, LayerRecord]:
    """What is known of each layer that changed and is wanted, with that many singular values."""
    reader = LayerReader(pair, resolve_device(options.device), statistics, options.ridge)
    rules = options.rank_rules
    rules.check(pair.layers)
    sizes = {
        layer: math.prod(pair.shape(layer))
        for layer in pair.layers
        if in_coverage(layer, options.target_coverage) and not rules.is_excluded(layer)
    }

    def work(layer: str) -> LayerRecord:
        return extract_layer(reader, layer, rank, options)[0]

    found = {}
    for layer, record in run_layers(sizes, work, workers=options.workers):
        found[layer] = record
        progress(len(found), len(sizes), layer)
    return {layer: found[layer] for layer in sizes if found[layer].reason is None}


class _Sizes:
    """LoRAs of the same decompositions at any size.

    Args:
        records: Of all layers.
        of_rank: What factors take in a file of one rank, which its header tells.
        of_size: The same of a size.
        weights: How much each layer's squared error counts.
        most: No layer's rank is known beyond it.
        spread: As of `Budget.allocate`.
    """

    def __init__(
        self,
        records: Mapping[str, LayerRecord],
        of_rank: Callable[[int], StorageCost],
        of_size: Callable[[int], StorageCost],
        weights: Mapping[str, float],
        most: int,
        *,
        spread: bool,
    ) -> None:
        self._records, self._weights, self._most, self._spread = records, weights, most, spread
        self._of_rank, self._of_size = of_rank, of_size
        self._shapes = {layer: record.shape for layer, record in records.items()}
        self._spectra = {layer: record.spectrum for layer, record in records.items()}

    def of_rank(self, rank: int) -> PlannedLora:
        """One rank for all layers."""
        same = FixedRank(rank, rank)
        ranks = {layer: same.rank_for(shape) for layer, shape in self._shapes.items()}
        measure = self._of_rank(rank).measure
        assert measure is not None
        return self._planned(rank, measure(ranks), ranks)

    def within(self, sizes: Sequence[int], *, measured: bool = False) -> Iterator[PlannedLora]:
        """The best ranks for each size; none for one that holds nothing. Measured to the byte, each takes a while."""
        for size in sizes:
            budget = Budget(max_bytes=size, max_rank=self._most)
            try:
                storage = self._of_size(size) if measured else replace(self._of_size(size), measure=None)
                chosen = budget.allocate(
                    self._spectra, storage, layer_weights=self._weights, spread=self._spread
                )
            except ConfigError:
                continue
            yield self._planned(None, chosen.bytes, chosen.ranks)

    def _planned(self, rank: int | None, size: int, ranks: Mapping[str, int]) -> PlannedLora:
        layers = {
            layer: DecomposedLayer("", record, min(ranks[layer], record.rank))
            for layer, record in self._records.items()
        }
        change = math.fsum(record.delta_norm**2 for record in self._records.values())
        lost = math.fsum(layer_cut.record.error_at(layer_cut.rank) ** 2 for layer_cut in layers.values())
        weighted = true_error(layers, (), self._weights)
        return PlannedLora(rank, size, math.sqrt(lost / change), weighted, dict(ranks))


def knee_of(sizes: Sequence[int], errors: Sequence[float]) -> int:
    """The point where a falling curve bends most: farthest below the straight line between its ends.

    Args:
        sizes: Rising.
        errors: Falling, of the same length, at least 1.
    """
    if len(sizes) < 3 or errors[0] == errors[-1]:
        return len(sizes) - 1
    width, height = sizes[-1] - sizes[0], errors[0] - errors[-1]

    def below(index: int) -> float:
        return (1 - (sizes[index] - sizes[0]) / width) - (errors[index] - errors[-1]) / height

    return max(range(len(sizes)), key=below)


def save_plan_picture(path: str | PathLike[str], plan: LoraPlan) -> None:
    """Draw error against size into an `.svg` or `.png` file, whole or not at all.

    Raises:
        WriteError: The file cannot be written.
    """
    content = svg.drawn(Path(path).suffix, (_WIDTH, _HEIGHT), _shapes(plan))
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def _shapes(plan: LoraPlan) -> list[svg.Shape]:
    points = [*plan.fixed, *plan.curve]
    sizes = [point.bytes for point in points]
    least, most = min(sizes), max(sizes)
    highest = max(point.weighted_error for point in points) or 1.0

    def place(planned: PlannedLora) -> tuple[float, float]:
        across = math.log(planned.bytes / least) / max(math.log(most / least), 1e-9)
        return _LEFT + (_RIGHT - _LEFT) * across, _FOOT - (_FOOT - _TOP) * planned.weighted_error / highest

    shapes: list[svg.Shape] = [
        svg.Label(16, 30, f"Error and size: {plan.tuned.name} as a LoRA on {plan.base.name}", size=18),
        svg.Label(16, 54, _what_is_drawn(plan)),
    ]
    for quarter in range(5):
        y = _FOOT - (_FOOT - _TOP) * quarter / 4
        shapes.append(svg.Line((_LEFT, y), (_RIGHT, y), _GRID))
        shapes.append(svg.Label(_LEFT - 8, y + 4, f"{100 * highest * quarter / 4:.3g} %", anchor="end"))
    for planned in plan.fixed:
        x = place(planned)[0]
        shapes.append(svg.Line((x, _TOP), (x, _FOOT + 5), _GRID))
        shapes.append(svg.Label(x, _FOOT + 20, format_size(planned.bytes), anchor="middle"))
        shapes.append(svg.Label(x, _FOOT + 36, f"rank {planned.rank}", anchor="middle", size=11))
    first = plan.curve[0]
    shapes.append(svg.Label(place(first)[0], _FOOT + 20, format_size(first.bytes), anchor="middle"))
    for line, colour in ((plan.fixed, _FIXED), (plan.curve, _BUDGET)):
        shapes += [svg.Line(place(start), place(end), colour) for start, end in pairwise(line)]
        for planned in line:
            tip = f"{format_size(planned.bytes)}: {100 * planned.weighted_error:.3g} %"
            shapes.append(svg.Dot(*place(planned), 3, colour, tip))
    x, y = place(plan.knee)
    shapes += [svg.Dot(x, y, 6, _BUDGET), svg.Label(x + 10, y - 8, f"knee: {format_size(plan.knee.bytes)}")]
    return shapes


def _what_is_drawn(plan: LoraPlan) -> str:
    weighed = (
        "by the size of its weight" if plan.statistics is None else "by its effect on the model's output"
    )
    return f"Error of all layers, each {weighed}. Grey: one rank for all; blue: the best ranks for the size."
