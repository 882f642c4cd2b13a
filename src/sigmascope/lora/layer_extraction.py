"""One layer of an extraction: read from both files, subtracted, decomposed, kept in the journal.

Reading, widening, subtracting and three sums over tens of millions of values cost more in memory traffic than
in arithmetic when each is a pass of its own, and fresh memory for each layer costs a page fault every 4 KiB. So
layers are read and subtracted in pieces that stay in the processor's cache, into memory that is used again.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import SigmascopeError
from sigmascope.lora.decompose import RoundedFactors, at_full_rank, decompose
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.journal import Journal
from sigmascope.lora.linalg import (
    Spectrum,
    blocked_energy,
    fast_dtype,
    frobenius_norm,
    matrix_shape,
    max_rank,
)
from sigmascope.lora.pairs import CheckpointPair
from sigmascope.lora.parallel import ThreadScratch
from sigmascope.lora.ranks import FixedRank, RankPolicy
from sigmascope.lora.statistics import LayerMetric

LeftOutReason = Literal["unchanged", "below_min_diff", "outside_coverage", "excluded", "rank_0"]

# For `LayerReader`.
_PIECE: Final = 1 << 18  # elements at a time: 1 MiB in float32
_TINY: Final = 1e-12
"""Squares of float32 values well below it are no normal numbers any more, and their sums are off."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """What is known of a layer when its turn is over.

    Attributes:
        shape: Of its weight.
        delta_norm: ‖ΔW‖.
        base_norm: ‖W‖ of the base.
        largest: max |ΔW|.
        reason: Why it is not in the LoRA; None where it is.
        whole: Kept at full rank, as ΔW itself: its factors are made again when they are written.
        values: (k,), the singular values found.
        errors: (r + 1,), squared errors of the stored factors cut to their first 0 … r columns.
        weighted_norm: ‖SᵀΔW·R‖ in the metric of the layer's statistics, in which `values` are; ‖ΔW‖ without any.
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


@dataclass(frozen=True, slots=True, eq=False)
class LayerDelta:
    """How one weight differs: ΔW = tuned − base.

    Attributes:
        delta: ΔW, float32 or float64, of the weight's shape. Valid until this thread reads the next layer.
        rounded: ΔW in bfloat16, where iterations are faster in it; None elsewhere.
        delta_norm: ‖ΔW‖, to 10⁻⁷ of itself.
        base_norm: ‖W‖ of the base.
        largest: max |ΔW|.
    """

    delta: Float[Tensor, "*shape"]
    rounded: Float[Tensor, "*shape"] | None
    delta_norm: float
    base_norm: float
    largest: float


class LayerReader:
    """Reads layers of a pair into memory of its own, one set for each thread that calls it.

    Args:
        pair: The two checkpoints.
        device: Where the difference is formed and stays.
    """

    def __init__(self, pair: CheckpointPair, device: torch.device) -> None:
        self._pair = pair
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._rounds = fast_dtype(device) is not None
        self._threads = ThreadScratch()

    def read(self, layer: str) -> LayerDelta:
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
        rounded = memory.scratch("rounded", elements, torch.bfloat16) if self._rounds else None
        base, tuned = (
            side.pieces(key, memory.scratch(name, _PIECE * side.info(key).dtype.itemsize, torch.uint8))
            for name, side in (("base", self._pair.base), ("tuned", self._pair.tuned))
        )
        energy, base_energy, largest = _subtract(base, tuned, delta, rounded)
        # Whether the squares behind these sums were float32 numbers; false for NaN and Inf too.
        changed = largest == 0.0 or largest > _TINY
        if not (changed and base_energy > _TINY**2 and energy + base_energy < math.inf):
            return self._as_a_whole(layer)  # which sums in float64, and says what is wrong where something is
        return LayerDelta(
            delta.view(shape),
            None if rounded is None else rounded.view(shape),
            math.sqrt(energy),
            math.sqrt(base_energy),
            largest,
        )

    def _as_a_whole(self, layer: str) -> LayerDelta:
        change = self._pair.layer_change(layer, self._device)
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


def extract_layer(
    reader: LayerReader,
    layer: str,
    policy: RankPolicy | int,
    dtype: torch.dtype,
    *,
    left_out: LeftOutReason | None = None,
    min_diff: float = 0.0,
    metric_in: Callable[[torch.dtype], LayerMetric | None] = lambda _dtype: None,
) -> tuple[LayerRecord, LoraFactors | None]:
    """Read a layer's change and give what is to be stored of it.

    Args:
        reader: Of the pair.
        layer: Its path.
        policy: How much rank; or simply how many singular values, of which the choice is made later.
        dtype: Storage dtype.
        left_out: Why it is not wanted, if so; its change is measured all the same.
        min_diff: A layer whose largest change is below this is left out.
        metric_in: Gives what its error is least in, in the precision of the change; nothing for Frobenius norm.

    Raises:
        SigmascopeError: Naming the layer.
    """
    with _memory_errors(layer):
        change = reader.read(layer)
    reason: LeftOutReason | None = left_out
    if change.delta_norm == 0:  # below 10⁻¹⁶² too, where float64 has no squares
        reason = "unchanged"
    elif reason is None and change.largest < min_diff:
        reason = "below_min_diff"
    metric = None if change.delta_norm == 0 else metric_in(change.delta.dtype)
    if reason is not None:
        return _record(change, None, reason, _norm_in(metric, change)), None
    try:
        with _memory_errors():
            stored = _decompose(change, policy, dtype, metric)
    except SigmascopeError as error:
        raise type(error)(f"{layer}: {error.message}", hint=error.hint) from error
    if stored is None:
        return _record(change, None, "rank_0", _norm_in(metric, change)), None
    return _record(change, stored, None), stored.factors


def _norm_in(metric: LayerMetric | None, change: LayerDelta) -> float | None:
    """‖SᵀΔW·R‖; None without a metric, and where the change is zero or nothing."""
    if metric is None or change.delta_norm == 0.0:
        return None
    return frobenius_norm(metric.weigh(change.delta.reshape(matrix_shape(change.delta.shape))))


@contextmanager
def _memory_errors(layer: str = "") -> Iterator[None]:
    """Say what to do about a GPU that is full."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        prefix = f"{layer}: " if layer else ""
        raise SigmascopeError(
            f"{prefix}the device has no memory left ({str(error).splitlines()[0]})",
            hint="Close what else runs there, or use --workers 1 or --device cpu.",
        ) from error


def _record(
    change: LayerDelta,
    stored: RoundedFactors | None,
    reason: LeftOutReason | None,
    weighted_norm: float | None = None,
) -> LayerRecord:
    nothing = torch.empty(0, dtype=torch.float64)
    shape = tuple(change.delta.shape)
    whole = stored is not None and bool(stored.errors.isnan().any())
    if stored is not None:
        weighted_norm = math.sqrt(stored.spectrum.total_energy)
    return LayerRecord(
        shape=shape,
        delta_norm=change.delta_norm,
        base_norm=change.base_norm,
        largest=change.largest,
        reason=reason,
        whole=whole,
        values=nothing if stored is None else stored.spectrum.values,
        errors=nothing if stored is None else stored.errors,
        weighted_norm=change.delta_norm if weighted_norm is None else weighted_norm,
        weighted=nothing if stored is None else stored.weighted,
    )


def _decompose(
    change: LayerDelta, policy: RankPolicy | int, dtype: torch.dtype, metric: LayerMetric | None
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


def write_record(journal: Journal, name: str, record: LayerRecord, factors: LoraFactors | None) -> None:
    """Keep a layer's record with its factors; those of a whole layer are cheaper to make again.

    Raises:
        WriteError: The disk refuses.
    """
    tensors = {"values": record.values, "errors": record.errors}
    if record.weighted.data_ptr() != record.errors.data_ptr():
        tensors["weighted"] = record.weighted
    if factors is not None and not record.whole:
        tensors |= {"up": factors.up, "down": factors.down}
    facts = {
        "shape": list(record.shape),
        "delta_norm": record.delta_norm,
        "weighted_norm": record.weighted_norm,
        "base_norm": record.base_norm,
        "largest": record.largest,
        "reason": record.reason,
        "whole": record.whole,
    }
    journal.append(name, tensors, facts)


def read_record(journal: Journal, name: str) -> LayerRecord:
    """A record as it was written: numbers in JSON and float64 tensors keep every bit."""
    tensors, facts = journal.read(name)
    return LayerRecord(
        shape=tuple(facts["shape"]),
        delta_norm=facts["delta_norm"],
        base_norm=facts["base_norm"],
        largest=facts["largest"],
        reason=cast("LeftOutReason | None", facts["reason"]),
        whole=facts["whole"],
        values=tensors["values"],
        errors=tensors["errors"],
        weighted_norm=facts["weighted_norm"],
        weighted=tensors.get("weighted", tensors["errors"]),
    )


def read_factors(journal: Journal, name: str, rank: int) -> LoraFactors:
    """The stored factors of a layer, cut to their first columns."""
    tensors, facts = journal.read(name)
    up, down = tensors["up"][:, :rank], tensors["down"][:rank]
    return LoraFactors(up, down, float(rank), tuple(facts["shape"]))
