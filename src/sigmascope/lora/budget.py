"""One budget for the whole LoRA: the singular values of all layers compete for its bytes or its error.

A fixed rank spends as many values on a layer that hardly changed as on one that changed much. A budget weighs what each
value saves against what it costs: keeping one more singular value of layer i lowers the weighted squared error by wᵢσ²
and costs cᵢ bytes. A module also costs its header entries once. To keep these from making a layer's first value look
too expensive, its first few values share the benefit per byte of the best group of them, entries included: the upper
concave hull of benefit over bytes. This density never rises within a layer.

Values are taken by falling density, as many as fit the file or as few as the error needs. That order solves the
fractional relaxation of the knapsack problem (Dantzig, 1957), so the choice is optimal except for the last value, which
may not fit. Single values out of order then use up the room or error that is left.

Layers need not be fully decomposed. Singular values fall, so a layer with an unused known value gains nothing from
unknown ones. If all known values of a layer are taken, twice as many are asked for (`Allocation.wanted`), until no such
layer is left. Layers whose last value brings the most come first, since their next values may displace others.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path
from typing import Final, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sigmascope.checkpoints.safetensors import ALIGNMENT, LENGTH_BYTES, encoded_header
from sigmascope.errors import ConfigError
from sigmascope.lora.families import family_named
from sigmascope.lora.layer_names import matches, require_matches, require_pattern
from sigmascope.lora.linalg import Spectrum, is_convolution, matrix_shape, max_rank
from sigmascope.lora.ranks import require_limits, split_patterns
from sigmascope.units import format_size

__all__ = ["Allocation", "Budget", "StorageCost"]

_FIRST_VALUES: Final = 64  # of a layer, to compute without a size to go by
_FEWEST_FIRST_VALUES: Final = 16  # with a size
_SPREAD_SHARE: Final = 7 / 8  # of one rank for all, that each layer gets where ranks are spread,
_SPREAD_WHOLLY_UP_TO: Final = 8  # and all of it up to this rank,
_HEADER_IN_RANKS: Final = 0.05  # give or take so much, which is within a header's length
_MOST_HEADER_FITS: Final = 8  # of ranks to a header that is longer or shorter with them; two do nearly always
_MOST_BYTES_OF_EQUAL_RANKS: Final = 32  # that the header saves where all layers get the same rank
_FIRST_BENEFIT_SHARE: Final = (
    1 / 4
)  # of the largest benefit per byte: layers below it are decomposed further later
_SUM_ROUNDING: Final = 1e-13  # of sums of many float64 squares; without it a sum met exactly could be missed

# Of a file, for `StorageCost`.
_ALPHA_BYTES: Final = 4  # a float32
_ENTRY_BYTES: Final = len(':{"dtype":"BF16","shape":,"data_offsets":[,]},')

_FACTOR_ROUNDING_EPS: Final = 0.32
"""Rounding both factors changes their product by 0.30 ± 0.01 of the type's eps, measured over many shapes."""
_MIN_ROUNDING: Final = 1e-6  # float32 arithmetic, whatever the storage

WEIGHT_FOR: Final = "--weight_for"
BUDGET_WEIGHTS: Final = "--budget_weights"
RELATIVE: Final = "relative"
PLAIN: Final = "plain"
Weights = tuple[tuple[str, float], ...]
"""(pattern, weight); of several patterns that match a layer, the last wins."""


@dataclass(frozen=True)
class Allocation:
    """Ranks under a budget.

    Attributes:
        ranks: By layer; 0 is left out of the file.
        wanted: How many singular values to compute next, for layers whose known values are all taken, the most
            promising first. If empty, the ranks are final; otherwise they are the best for what is known.
        error: √(Σw‖ΔW − A‖² / Σw‖ΔW‖²) over all layers, storage rounding included: what `max_error` limits.
            Without weights this is the overall relative error.
        bytes: What the file takes, as `StorageCost` knows it.
    """

    ranks: dict[str, int]
    wanted: dict[str, int]
    error: float
    bytes: int


@dataclass(frozen=True)
class BudgetLayer:
    """One layer that competes for the budget.

    Attributes:
        layer: Its path.
        spectrum: What is known of its change.
        weight: How much its squared error counts.
        floor: Values that must be taken.
        cap: Values that may be taken.
        rank_bytes: Bytes of one value.
        module_bytes: Bytes of the module beside its values.
    """

    layer: str
    spectrum: Spectrum
    weight: float
    floor: int
    cap: int
    rank_bytes: int
    module_bytes: int

    @cached_property
    def known(self) -> int:
        """Values that may be taken now."""
        return min(self.spectrum.significant, self.cap)

    @cached_property
    def open(self) -> bool:
        """Whether unknown values might be taken if they were known."""
        return self.cap > self.spectrum.known and not self.spectrum.complete

    @property
    def energy(self) -> float:
        """Weighted energy of the whole change."""
        return self.weight * (self.spectrum.known_energy + self.spectrum.tail_energy)


def native_names(layer: str) -> tuple[str, ...]:
    """The tensors of a module in native naming: up, down and alpha."""
    return f"{layer}.lora_up.weight", f"{layer}.lora_down.weight", f"{layer}.alpha"


def plain_numbers(layer: str, weight_shape: Sequence[int]) -> int:
    """The numbers that one rank takes if every layer is its own module: a column of up and a row of down."""
    return sum(matrix_shape(weight_shape))


@dataclass(frozen=True)
class StorageCost:
    """The bytes of a safetensors file of LoRA modules, measured or estimated.

    Attributes:
        value_bytes: Of one number of a factor: 2 for float16 and bfloat16.
        fixed_bytes: What the file holds whatever the ranks are: metadata, and tensors other than factors.
        names: Gives the names of a layer's up, down and (where the format has one) alpha in the file.
        numbers: Gives how many numbers one rank of a layer of that shape takes.
        offset_digits: Digits of the largest byte offset, which the header repeats for every tensor.
        rounding: What rounding to storage precision adds: its share of ‖up·down‖, as a fraction.
        measure: Gives the size of a file of these ranks; without it, the size is what the other attributes say.
    """

    value_bytes: int
    fixed_bytes: int = 0
    names: Callable[[str], Sequence[str]] = native_names
    numbers: Callable[[str, Sequence[int]], int] = plain_numbers
    offset_digits: int = 12
    rounding: float = 0.0
    measure: Callable[[Mapping[str, int]], int] | None = None

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        metadata: Mapping[str, str] | None = None,
        *,
        other_bytes: int = 0,
        names: Callable[[str], Sequence[str]] = native_names,
        numbers: Callable[[str, Sequence[int]], int] = plain_numbers,
    ) -> "StorageCost":
        """The cost of a file with factors of a dtype.

        Args:
            dtype: Storage dtype.
            metadata: The header's texts.
            other_bytes: Bytes of tensors other than factors, with their header entries.
            names: As the attribute.
            numbers: As the attribute.
        """
        fixed = len(encoded_header([], metadata or {})) + other_bytes
        rounding = max(_FACTOR_ROUNDING_EPS * torch.finfo(dtype).eps, _MIN_ROUNDING)
        return cls(dtype.itemsize, fixed, names, numbers, rounding=rounding)

    def rank_bytes(self, layer: str, weight_shape: Sequence[int]) -> int:
        """What one more singular value takes: a column of up and a row of down."""
        return self.numbers(layer, weight_shape) * self.value_bytes

    def module_bytes(self, layer: str, weight_shape: Sequence[int]) -> int:
        """What a module takes besides its factors: header entries and alpha."""
        names = self.names(layer)
        shapes = _factor_shapes(weight_shape)[: len(names)]
        entries = sum(_entry_bytes(name, shape) for name, shape in zip(names, shapes, strict=True))
        entries += len(names) * 2 * self.offset_digits
        return entries + (_ALPHA_BYTES if len(names) > 2 else 0)

    @property
    def empty_bytes(self) -> int:
        """The file without any module: what is fixed, the header's length and its padding."""
        return LENGTH_BYTES + ALIGNMENT + self.fixed_bytes

    def within(self, max_bytes: int) -> "StorageCost":
        """The same for a file of at most this size: its offsets have no more digits than the size."""
        return replace(self, offset_digits=len(str(max_bytes)))

    def file_bytes(self, ranks: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> int:
        """The most that a file of these modules takes.

        Args:
            ranks: By layer; 0 is not in the file.
            shapes: Weight shapes by layer.
        """
        return self.empty_bytes + sum(
            rank * self.rank_bytes(layer, shapes[layer]) + self.module_bytes(layer, shapes[layer])
            for layer, rank in ranks.items()
            if rank > 0
        )


def _factor_shapes(weight_shape: Sequence[int]) -> list[list[int]]:
    """Shapes of up, down and alpha at the largest rank, whose digits are the most."""
    rank = max_rank(weight_shape)
    ones = [1] * (len(weight_shape) - 2)
    return [[weight_shape[0], rank, *ones], [rank, *weight_shape[1:]], []]


def _entry_bytes(name: str, shape: list[int]) -> int:
    """Bytes of `"<name>":{"dtype":"BF16","shape":[…],"data_offsets":[,]},`, offsets aside."""
    sizes = json.dumps(shape, separators=(",", ":"))
    return len(json.dumps(name, ensure_ascii=False).encode("utf-8")) + len(sizes) + _ENTRY_BYTES


@dataclass(frozen=True)
class Budget:
    """What the ranks of all layers together may cost: bytes, or error. One of the two.

    Attributes:
        max_bytes: The file's size, header included, is at most this, and its error as small as it can be.
        max_error: The overall relative error is at most this fraction, and the file as small as it can be.
        weights: (pattern, weight): the squared error of layers whose path matches counts `weight` times; if several
            match, the last wins. Other layers count once.
        max_rank: No layer gets more.
        max_conv_rank: The same for convolutions; `max_rank` when left out.
        min_rank: No layer that changed gets less; with 0, layers that bring too little for their bytes are left out.
            None means 0, unless ranks are spread.

    Raises:
        ConfigError: Neither or both limits, or a value that makes no sense.
    """

    max_bytes: int | None = None
    max_error: float | None = None
    weights: tuple[tuple[str, float], ...] = ()
    max_rank: int | None = None
    max_conv_rank: int | None = None
    min_rank: int | None = None

    def __post_init__(self) -> None:
        if (self.max_bytes is None) == (self.max_error is None):
            raise ConfigError(
                "a budget is a size or an error, not both.", hint="Give one of --max_size and --max_error."
            )
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError(f"--max_size {self.max_bytes} holds nothing.", hint="Write it as 100MB.")
        if self.max_error is not None and not 0.0 < self.max_error < 1.0:
            raise ConfigError(
                f"--max_error {_percent(self.max_error)} is not a limit: it must be above 0% and below 100% of the change.",
                hint="Write it as 5% or 0.05.",
            )
        if self.max_conv_rank is None:  # left out and spelt out are the same budget
            object.__setattr__(self, "max_conv_rank", self.max_rank)
        require_limits(
            self.min_rank or 0, {"--max_rank": self.max_rank, "--max_conv_rank": self.max_conv_rank}
        )
        require_weights(self.weights)

    def allocate(
        self,
        spectra: Mapping[str, Spectrum],
        storage: StorageCost,
        pinned: Mapping[str, int] | None = None,
        layer_weights: Mapping[str, float] | None = None,
        *,
        spread: bool = False,
    ) -> Allocation:
        """Choose the rank of every layer.

        Args:
            spectra: By layer, with any number of leading singular values; those of layers that did not change
                need not be here.
            storage: What the values and modules take.
            pinned: Ranks that are set already. They count towards size and error; of a layer at full rank no
                singular value needs to be known.
            layer_weights: How much the squared error of each layer counts, on top of `weights`; once where it is
                not here.
            spread: Start from the one rank for all layers that would take these bytes: each layer gets all of it up to
                rank 8, and seven eighths of it, rounded up, above. Only for a budget without a `min_rank`.

        Raises:
            ConfigError: The budget cannot be met; the message says what can.
        """

        def choose(cost: StorageCost) -> Allocation:
            return self._choose(spectra, cost, pinned or {}, layer_weights or {}, spread=spread)

        return choose(storage) if self.max_bytes is None else _filled(choose, storage, self.max_bytes)

    def _choose(
        self,
        spectra: Mapping[str, Spectrum],
        storage: StorageCost,
        pinned: Mapping[str, int],
        layer_weights: Mapping[str, float],
        *,
        spread: bool,
    ) -> Allocation:
        """`allocate` at an estimated cost."""
        weights = {layer: weight_of(layer, self.weights) * layer_weights.get(layer, 1.0) for layer in spectra}

        def between(least: int, most: int | None) -> Allocation:
            contestants = [
                self._contestant(layer, spectrum, storage, pinned, weights[layer], least, most)
                for layer, spectrum in spectra.items()
            ]
            return allocate(
                BudgetArrays.of(contestants), storage, max_bytes=self.max_bytes, max_error=self.max_error
            )

        if not spread or self.min_rank is not None:
            return between(self.min_rank or 0, None)
        return self._spread(between, spectra, storage)

    def _spread(
        self,
        between: Callable[[int, int | None], Allocation],
        spectra: Mapping[str, Spectrum],
        storage: StorageCost,
    ) -> Allocation:
        """Start each layer with its share of the one rank; if that exceeds the size, with a part of it for all."""
        shapes = {layer: spectrum.weight_shape for layer, spectrum in spectra.items()}
        if self.max_bytes is not None:
            share = _spread_rank(_one_rank(self.max_bytes, shapes, storage))
            for least in range(share, 0, -1):
                with suppress(ConfigError):  # of a file this small, or whose pinned layers take the room
                    return between(least, None if least == share else share)
            return between(0, share or None)
        # More for all takes more bytes, of which the share is larger: the least rank that is as much as its share.
        highest = max((spectrum.largest_rank for spectrum in spectra.values()), default=0)
        met = cache(lambda rank: between(rank, None))

        def is_its_share(rank: int) -> bool:
            return rank >= _spread_rank(_one_rank(met(rank).bytes, shapes, storage))

        return met(bisect_left(range(highest + 1), True, key=is_its_share))

    def first_guess(
        self, shapes: Mapping[str, Sequence[int]], storage: StorageCost, *, has_statistics: bool = False
    ) -> dict[str, int]:
        """How many singular values of each layer to compute first.

        For a size: twice the one rank for all layers that would fill the file; once if a few layers will get most of
        it.

        Args:
            shapes: Weight shapes by layer.
            storage: What the values and modules take.
            has_statistics: Whether statistics weigh the errors; then a few layers matter most.
        """
        guess = _FIRST_VALUES
        if self.max_bytes is not None:
            uniform = _one_rank(self.max_bytes, shapes, storage)
            guess = max(math.floor(uniform if has_statistics else 2 * uniform), _FEWEST_FIRST_VALUES)
        return {layer: min(guess, self._cap(shape)) for layer, shape in shapes.items()}

    def check(self, layers: Sequence[str]) -> None:
        """Refuse a weight whose pattern matches no layer.

        Args:
            layers: Paths of all layers of the model.

        Raises:
            ConfigError: With the pattern and the nearest layers.
        """
        for pattern, _ in self.weights:
            require_matches(pattern, layers, WEIGHT_FOR)

    def describe(self) -> str:
        """Canonical text, as JSON of what is set."""
        limits = {
            "max_size": self.max_bytes,
            "max_error": self.max_error,
            "weight_for": [list(pair) for pair in self.weights] or None,
            "max_rank": self.max_rank,
            "max_conv_rank": self.max_conv_rank,
            "min_rank": self.min_rank,
        }
        return json.dumps({name: value for name, value in limits.items() if value is not None})

    @property
    def brief(self) -> str | None:
        """`size:100000000`, for a header whose length counts towards the size; None if more than a size is set."""
        is_plain = self.max_bytes is not None and self == Budget(self.max_bytes)
        return f"size:{self.max_bytes}" if is_plain else None

    def _cap(self, weight_shape: Sequence[int]) -> int:
        cap = self.max_conv_rank if is_convolution(weight_shape) else self.max_rank
        return max_rank(weight_shape) if cap is None else min(cap, max_rank(weight_shape))

    def _contestant(
        self,
        layer: str,
        spectrum: Spectrum,
        storage: StorageCost,
        pinned: Mapping[str, int],
        weight: float,
        least: int,
        most: int | None,
    ) -> BudgetLayer:
        shape = spectrum.weight_shape
        if pinned.get(layer, 0) >= spectrum.largest_rank:
            spectrum = _known_to_the_end(spectrum)
        there = spectrum.significant if spectrum.complete else spectrum.largest_rank
        limit = self._cap(shape) if most is None else min(self._cap(shape), most)
        cap = min(pinned.get(layer, limit), there)
        return BudgetLayer(
            layer=layer,
            spectrum=spectrum,
            weight=weight,
            floor=cap if layer in pinned else min(least, cap),
            cap=cap,
            rank_bytes=storage.rank_bytes(layer, shape),
            module_bytes=storage.module_bytes(layer, shape),
        )


@dataclass(frozen=True, eq=False)
class BudgetArrays:
    """Layers as arrays: a row a layer, a column a singular value, largest first.

    Attributes:
        layers: Their paths.
        benefits: wσ²; 0 where a value is unknown or above the cap.
        densities: Benefit per byte as it counts for the order; falls along each row.
        energy: w·‖ΔW‖².
        known: Values that may be taken now.
        floor: Values that must be taken.
        cap: Values that may be taken.
        rank_bytes: Bytes of one value.
        module_bytes: Bytes of the module beside its values.
        open: Whether unknown values might be taken if they were known.
    """

    layers: tuple[str, ...]
    benefits: Float[Tensor, "layers values"]
    densities: Float[Tensor, "layers values"]
    energy: Float[Tensor, " layers"]
    known: Int[Tensor, " layers"]
    floor: Int[Tensor, " layers"]
    cap: Int[Tensor, " layers"]
    rank_bytes: Int[Tensor, " layers"]
    module_bytes: Int[Tensor, " layers"]
    open: Bool[Tensor, " layers"]

    @classmethod
    def of(cls, contestants: Sequence[BudgetLayer]) -> "BudgetArrays":
        """Bring layers together."""
        benefits = torch.zeros(
            len(contestants),
            max((contestant.known for contestant in contestants), default=0) + 1,
            dtype=torch.float64,
        )
        for row, contestant in enumerate(contestants):
            benefits[row, : contestant.known] = (
                contestant.weight * contestant.spectrum.values[: contestant.known].square()
            )
        floor, rank_bytes = (
            _ints(contestant.floor for contestant in contestants),
            _ints(contestant.rank_bytes for contestant in contestants),
        )
        module_bytes = _ints(contestant.module_bytes for contestant in contestants)
        return cls(
            layers=tuple(contestant.layer for contestant in contestants),
            benefits=benefits,
            densities=_densities(benefits, rank_bytes, torch.where(floor > 0, 0, module_bytes)),
            energy=torch.tensor([contestant.energy for contestant in contestants], dtype=torch.float64),
            known=_ints(contestant.known for contestant in contestants),
            floor=floor,
            cap=_ints(contestant.cap for contestant in contestants),
            rank_bytes=rank_bytes,
            module_bytes=module_bytes,
            open=torch.tensor([contestant.open for contestant in contestants], dtype=torch.bool),
        )

    def best_first(self) -> tuple[Int[Tensor, " items"], Int[Tensor, " items"]]:
        """(row, column) of every value above the floors that brings something, by falling density."""
        column = torch.arange(self.benefits.shape[1])
        row, column = ((column >= self.floor[:, None]) & (self.benefits > 0)).nonzero(as_tuple=True)
        order = self.densities[row, column].argsort(descending=True, stable=True)
        return row[order], column[order]

    def benefit_at(self, column: Int[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """Each layer's benefit in its own column; 0 outside."""
        return _pick(self.benefits, column)

    def density_at(self, column: Int[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """Each layer's density in its own column; 0 outside."""
        return _pick(self.densities, column)

    def cost_at(
        self, column: Int[Tensor, "..."], row: Int[Tensor, "..."] | None = None
    ) -> Int[Tensor, "..."]:
        """Bytes of the values in these columns; the first of a module brings its header entries.

        Args:
            column: One for each layer, or for each of `row`.
            row: Layers; each once when left out.
        """
        rank_bytes = self.rank_bytes if row is None else self.rank_bytes[row]
        module_bytes = self.module_bytes if row is None else self.module_bytes[row]
        return rank_bytes + torch.where(column == 0, module_bytes, 0)

    def bytes_at(self, ranks: Int[Tensor, " layers"]) -> int:
        """Bytes of all modules at these ranks."""
        return int((ranks * self.rank_bytes + torch.where(ranks > 0, self.module_bytes, 0)).sum())

    def kept_at(self, ranks: Int[Tensor, " layers"]) -> Float[Tensor, " layers"]:
        """Weighted energy that each layer keeps at these ranks."""
        column = torch.arange(self.benefits.shape[1])
        return torch.where(column < ranks[:, None], self.benefits, 0.0).sum(dim=1)


def _ints(values: Iterable[int]) -> Int[Tensor, " layers"]:
    return torch.tensor(list(values), dtype=torch.int64)


def _densities(
    benefits: Float[Tensor, "layers values"],
    rank_bytes: Int[Tensor, " layers"],
    module_bytes: Int[Tensor, " layers"],
) -> Float[Tensor, "layers values"]:
    count = torch.arange(1, benefits.shape[1] + 1)
    group = benefits.cumsum(dim=1) / (count * rank_bytes[:, None] + module_bytes[:, None])
    best, last = group.max(dim=1)
    alone = benefits / rank_bytes[:, None]
    densities = torch.where(count - 1 <= last[:, None], best[:, None], alone)
    return densities.cummin(dim=1).values  # rounding must not bring a layer's values out of order


def _pick(table: Float[Tensor, "layers values"], column: Int[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    inside = (column >= 0) & (column < table.shape[1])
    picked = table.gather(1, column.clamp(0, table.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, picked, 0.0)


def _known_to_the_end(spectrum: Spectrum) -> Spectrum:
    """Some spectrum of the same energy: all of it is kept, so it does not matter which."""
    rank = spectrum.largest_rank
    value = math.sqrt(max(spectrum.total_energy, 0.0) / rank)
    return Spectrum(
        torch.full((rank,), value, dtype=torch.float64), spectrum.total_energy, spectrum.weight_shape
    )


def _one_rank(size: int, shapes: Mapping[str, Sequence[int]], storage: StorageCost) -> float:
    """The rank for all layers, or as much of it as each can have, that would fill a file of that size."""
    storage = storage.within(size)
    costs = {layer: storage.rank_bytes(layer, shape) for layer, shape in shapes.items()}
    modules = sum(storage.module_bytes(layer, shape) for layer, shape in shapes.items())
    room, growing = max(size - storage.empty_bytes - modules, 0), sum(costs.values())
    rank = 0
    for limit, layer in sorted((max_rank(shape), layer) for layer, shape in shapes.items()):
        if (limit - rank) * growing > room:
            return rank + room / growing
        room -= (limit - rank) * growing
        rank = limit
        growing -= costs[layer]
    return float(rank)


def _spread_rank(one_rank: float) -> int:
    """Each layer's part of the one rank for all, if ranks are spread."""
    share = math.ceil(_SPREAD_SHARE * (one_rank - _HEADER_IN_RANKS))
    return max(share, min(math.floor(one_rank + _HEADER_IN_RANKS), _SPREAD_WHOLLY_UP_TO))


def _filled(choose: Callable[[StorageCost], Allocation], storage: StorageCost, max_bytes: int) -> Allocation:
    """Choose again with the header that the file really has, in place of the most that it could take."""
    storage = storage.within(max_bytes)
    allocation, fitting, size = choose(storage), None, 0
    for attempt in range(_MOST_HEADER_FITS):
        if storage.measure is None or allocation.wanted:
            return allocation
        size = storage.measure(allocation.ranks)
        storage = replace(storage, fixed_bytes=storage.fixed_bytes + size - allocation.bytes)
        if size <= max_bytes:
            fitting = replace(allocation, bytes=size)
            if attempt > 0:
                break
        allocation = choose(storage)
    if fitting is None:
        refuse_size(max_bytes, size)
    bolder = choose(replace(storage, fixed_bytes=storage.fixed_bytes - _MOST_BYTES_OF_EQUAL_RANKS))
    if storage.measure is None or bolder.wanted or (size := storage.measure(bolder.ranks)) > max_bytes:
        return fitting
    return replace(bolder, bytes=size)


def allocate(
    contest: BudgetArrays, storage: StorageCost, *, max_bytes: int | None, max_error: float | None
) -> Allocation:
    """Choose the rank of every layer under one of two limits.

    Args:
        contest: The layers.
        storage: What the values and modules take.
        max_bytes: The file's size, header included; as small an error as it allows.
        max_error: The overall relative error; as small a file as it allows.

    Raises:
        ConfigError: The limit cannot be met; the message says what can.
    """
    if max_bytes is not None:
        room = max_bytes - storage.empty_bytes
        if (least := contest.bytes_at(contest.floor)) > room:
            refuse_size(max_bytes, storage.empty_bytes + least)
        ranks = reached = most_within(contest, room)
    else:
        ranks, reached = _within_error(contest, storage, max_error or 0.0)
    wanted = _next_wanted(contest, reached)
    error = _error(contest, ranks, storage)
    if not wanted:
        if max_error is not None and error > max_error * (1.0 + 1e-9):
            refuse_error(max_error, error)
        if max_bytes is not None:
            _require_something(contest, ranks, storage, max_bytes)
    return Allocation(
        ranks=dict(zip(contest.layers, ranks.tolist(), strict=True)),
        wanted=wanted,
        error=error,
        bytes=storage.empty_bytes + contest.bytes_at(ranks),
    )


def _within_error(
    contest: BudgetArrays, storage: StorageCost, error: float
) -> tuple[Int[Tensor, " layers"], Int[Tensor, " layers"]]:
    """`least_for` the fewest bytes at which discarded energy and rounding together stay below error².

    Rounding adds ρ²·(T − d) to the d discarded of T in all: d ≤ (e² − ρ²)·T / (1 − ρ²).
    """
    rounding = storage.rounding
    if error <= rounding:
        refuse_rounding(error, storage)
    total = float(contest.energy.sum())
    allowed = (error**2 - rounding**2) / (1.0 - rounding**2) * total
    needed = total - allowed - float(contest.kept_at(contest.floor).sum())
    return least_for(contest, needed)


def _error(contest: BudgetArrays, ranks: Int[Tensor, " layers"], storage: StorageCost) -> float:
    total = float(contest.energy.sum())
    kept = contest.kept_at(ranks)
    lost = float((contest.energy - kept).clamp(min=0.0).sum()) + storage.rounding**2 * float(kept.sum())
    return math.sqrt(lost / total) if total > 0.0 else 0.0


def _next_wanted(contest: BudgetArrays, reached: Int[Tensor, " layers"]) -> dict[str, int]:
    """Layers whose known values were all taken: how many to compute next, twice as many.

    First of those whose last value brings the most per byte: their next ones may push values of the others out.
    """
    at_end = contest.open & (reached >= contest.known)
    last = torch.where(contest.known > contest.floor, contest.density_at(contest.known - 1), torch.inf)
    first = at_end & (last >= _FIRST_BENEFIT_SHARE * max(last[at_end].tolist(), default=0.0))
    target = (2 * contest.known).clamp(min=1).maximum(contest.floor).minimum(contest.cap)
    return {contest.layers[row]: int(target[row]) for row in first.nonzero()[:, 0].tolist()}


def _require_something(
    contest: BudgetArrays, ranks: Int[Tensor, " layers"], storage: StorageCost, max_bytes: int
) -> None:
    """Refuse a size that leaves out every layer although some changed."""
    if not bool(ranks.any()) and float(contest.energy.sum()) > 0.0:
        first = contest.cost_at(torch.zeros_like(ranks)) + torch.where(contest.known > 0, 0, 2**62)
        refuse_size(max_bytes, storage.empty_bytes + int(first.min()))


def most_within(contest: BudgetArrays, limit: int) -> Int[Tensor, " layers"]:
    """Take values above the floors while they fit.

    Args:
        contest: The layers.
        limit: Bytes for all modules, the floors' included.
    """
    room = limit - contest.bytes_at(contest.floor)
    row, column = contest.best_first()
    cost = contest.cost_at(column, row).cumsum(0)
    fit = int(torch.searchsorted(cost, room, right=True))
    ranks = contest.floor + torch.bincount(row[:fit], minlength=len(contest.layers))
    if fit < len(row):
        _fill(contest, ranks, room - (int(cost[fit - 1]) if fit else 0))
    return ranks


def _fill(contest: BudgetArrays, ranks: Int[Tensor, " layers"], room: int) -> None:
    """Take what still fits, best first; changes `ranks`."""
    while True:
        cost = contest.cost_at(ranks)
        possible = (cost <= room) & (contest.benefit_at(ranks) > 0)
        density = torch.where(possible, contest.density_at(ranks), 0.0)
        best = int(density.argmax())
        if float(density[best]) <= 0.0:
            return
        ranks[best] += 1
        room -= int(cost[best])


def least_for(contest: BudgetArrays, needed: float) -> tuple[Int[Tensor, " layers"], Int[Tensor, " layers"]]:
    """Take values above the floors until they bring what is needed; if they do not suffice, all known ones.

    Args:
        contest: The layers.
        needed: Weighted energy to keep above that of the floors.

    Returns:
        Ranks by layer, and the most that each had before needless values were given back.
    """
    if needed <= 0.0:
        return contest.floor, contest.floor
    row, column = contest.best_first()
    gain = contest.benefits[row, column].cumsum(0)
    last = int(torch.searchsorted(gain, needed * (1.0 - _SUM_ROUNDING)))
    ranks = contest.floor + torch.bincount(row[:last], minlength=len(contest.layers))
    if last == len(row):
        return ranks, ranks
    missing = needed - (float(gain[last - 1]) if last else 0.0)
    cheapest = _cheapest(contest, ranks, missing)
    ranks[cheapest] += 1
    reached = ranks.clone()
    _prune(contest, ranks, float(contest.benefit_at(ranks - 1)[cheapest]) - missing)
    return ranks, reached


def _cheapest(contest: BudgetArrays, ranks: Int[Tensor, " layers"], missing: float) -> int:
    """The layer whose next value suffices at the least bytes; there is one, the next in order."""
    enough = contest.benefit_at(ranks) >= missing * (1.0 - _SUM_ROUNDING)
    cost = torch.where(enough, contest.cost_at(ranks), torch.iinfo(torch.int64).max)
    return int(cost.argmin())


def _prune(contest: BudgetArrays, ranks: Int[Tensor, " layers"], spare: float) -> None:
    """Give back values that are not needed after all, those of most bytes first; changes `ranks`."""
    while True:
        last = ranks - 1
        benefit = contest.benefit_at(last)
        needless = (benefit <= spare) & (ranks > contest.floor)
        cost = torch.where(needless, contest.cost_at(last), 0)
        most = int(cost.argmax())
        if int(cost[most]) <= 0:
            return
        ranks[most] -= 1
        spare -= float(benefit[most])


def parse_weights(texts: Iterable[str]) -> Weights:
    """Read weights such as `mid_block=2`.

    Raises:
        ConfigError: One is not of that form.
    """
    weights = []
    for pattern, value in split_patterns(texts, WEIGHT_FOR):
        try:
            weights.append((pattern, float(value)))
        except ValueError as error:
            raise ConfigError(
                f"{WEIGHT_FOR} {pattern}={value} is not a weight.", hint="Use 0 or more, such as 2."
            ) from error
    require_weights(tuple(weights))
    return tuple(weights)


def require_weights(weights: Weights) -> None:
    """Refuse patterns that are not regular expressions, and weights that are negative or infinite.

    Raises:
        ConfigError: With the pattern.
    """
    for pattern, weight in weights:
        require_pattern(pattern, WEIGHT_FOR)
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ConfigError(
                f"{WEIGHT_FOR} {pattern}={weight:g} is not a weight.", hint="Use 0 or more, such as 2."
            )


def require_weighing(weighing: str, *, is_of_use: bool) -> None:
    """Refuse `--budget_weights` without effect: without a budget, or with statistics, which weigh errors themselves.

    Raises:
        ConfigError: With what to do.
    """
    if weighing != RELATIVE and not is_of_use:
        raise ConfigError(
            f"{BUDGET_WEIGHTS} {weighing} applies only to a budget without statistics.",
            hint="Add --max_size or --max_error, and leave --statistics out.",
        )


def file_weights(weighing: str, layers: Sequence[str]) -> dict[str, float]:
    """The weights of a `--budget_weights` file; none for `relative` and `plain`.

    Args:
        weighing: `relative`, `plain`, or the file's path.
        layers: All that there are.

    Raises:
        ConfigError: It is not a JSON object of layers and weights.
    """
    if weighing in (RELATIVE, PLAIN):
        return {}
    path = Path(weighing)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{BUDGET_WEIGHTS} {path}: {error}",
            hint='Use relative, plain, or a JSON file such as {"denoiser.conv_in": 2.0}.',
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            f"{BUDGET_WEIGHTS} {path} is not a JSON object.", hint="Map each layer's name to its weight."
        )
    for layer, weight in given.items():
        if layer not in layers:
            near = get_close_matches(layer, layers, n=1)
            raise ConfigError(
                f"{BUDGET_WEIGHTS} {path}: there is no layer {layer!r}.",
                hint=f"Did you mean {near[0]}?" if near else "Use the names of `sigmascope lora inspect`.",
            )
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"{BUDGET_WEIGHTS} {path}: {layer}: {weight!r} is not a weight.", hint="Use 0 or more."
            )
    return {layer: float(weight) for layer, weight in given.items()}


def needs_spread_ranks(weighing: str, family: str, *, has_statistics: bool) -> bool:
    """Whether too little is known to let layers compete freely for ranks.

    Weights alone do not say what a model does with them. For a model that makes its picture in one step, free
    competition gave pictures 3 to 5 dB better than one rank for all layers. For two models that sample in many steps
    it gave pictures up to 4.5 dB worse; with most of the rank spread evenly, they were as good or better
    (`benchmarks/lora_pictures.py`).

    Args:
        weighing: As `--budget_weights`.
        family: Of the model, as `ModelLayout.family`.
        has_statistics: Whether statistics weigh the errors.
    """
    return weighing == RELATIVE and not has_statistics and family_named(family).steps != 1


def weight_of(layer: str, weights: Weights) -> float:
    """How often the squared error of a layer counts: once where no pattern matches."""
    return next((weight for pattern, weight in reversed(weights) if matches(pattern, layer)), 1.0)


def refuse_size(max_bytes: int, needed: int) -> NoReturn:
    """Refuse a file size that is too small even for the least content.

    Raises:
        ConfigError: With the least size.
    """
    raise ConfigError(
        f"--max_size {format_size(max_bytes)} is too small: the smallest file with these settings takes {needed} bytes.",
        hint=f"Give --max_size {needed} or more. Higher --min_rank and --rank_for raise the least size.",
    )


def refuse_rounding(max_error: float, storage: StorageCost) -> NoReturn:
    """Refuse an error that storage precision alone makes.

    Raises:
        ConfigError: With the least error.
    """
    finer = ", or store with --save_precision float" if storage.value_bytes < torch.float32.itemsize else ""
    raise ConfigError(
        f"--max_error {_percent(max_error)} is not above what rounding to storage precision costs, "
        f"{_percent(storage.rounding)}.",
        hint=f"Give --max_error {_above(storage.rounding)} or more{finer}.",
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def _above(share: float) -> str:
    """The percentage of three digits just above a share, which works when it is typed in."""
    digits = max(2 - math.floor(math.log10(share * 100)), 0)
    scaled = math.floor(share * 100 * 10**digits) + 1
    while scaled / 10**digits / 100 <= share:  # 0.01 * 100 is not quite 1
        scaled += 1
    return f"{scaled / 10**digits:.{digits}f}%"


def refuse_error(max_error: float, least: float) -> NoReturn:
    """Refuse an error that cannot be met with the ranks that are set or limited.

    Raises:
        ConfigError: With the least error.
    """
    raise ConfigError(
        f"--max_error {_percent(max_error)} cannot be met: the ranks that are set or limited leave "
        f"{_percent(least)}.",
        hint=f"Give --max_error {_above(least)} or more, or allow higher ranks.",
    )


def refuse_storage(max_error: float, left: float) -> NoReturn:
    """Refuse an error that factors in storage precision cannot meet at any rank.

    Raises:
        ConfigError: With the error that they leave.
    """
    raise ConfigError(
        f"--max_error {_percent(max_error)} cannot be met: factors in storage precision leave {_percent(left)}.",
        hint="Store with --save_precision float, or give a larger --max_error.",
    )
