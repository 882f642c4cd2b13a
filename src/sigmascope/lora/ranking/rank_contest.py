"""The contest between the singular values of all layers for the bytes of one file, as arrays.

Keeping one more singular value of layer i costs cᵢ bytes and lowers the weighted squared error by wᵢσ². A module
costs its header entries once. So that the first value of a layer does not look dearer than it is, the first few
count with the benefit per byte of the best group of them, entries included: the upper concave hull of benefit over
bytes. By this density the values of each layer come in their own order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sigmascope.lora.ranking.spectrum import Spectrum


@dataclass(frozen=True)
class Contestant:
    """One layer in the contest.

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
    def unknown_energy(self) -> float:
        """Weighted energy of the unknown values, with room for rounding; 0 when none might be taken."""
        if not self.open:
            return 0.0
        return self.weight * (self.spectrum.tail_energy + self.spectrum.energy_rounding)

    @property
    def energy(self) -> float:
        """Weighted energy of the whole change."""
        return self.weight * (self.spectrum.known_energy + self.spectrum.tail_energy)


@dataclass(frozen=True, eq=False)
class Contest:
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
        next_benefit: The most that the first unknown value can bring; 0 when none might be taken.
        unknown_energy: The most that all unknown values bring together; 0 when none might be taken.
        unknown_values: How many they are.
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
    next_benefit: Float[Tensor, " layers"]
    unknown_energy: Float[Tensor, " layers"]
    unknown_values: Int[Tensor, " layers"]

    @classmethod
    def of(cls, contestants: Sequence[Contestant]) -> "Contest":
        """Bring layers together."""
        benefits = torch.zeros(
            len(contestants), max((one.known for one in contestants), default=0) + 1, dtype=torch.float64
        )
        for row, one in enumerate(contestants):
            benefits[row, : one.known] = one.weight * one.spectrum.values[: one.known].square()
        floor, rank_bytes = (
            _ints(one.floor for one in contestants),
            _ints(one.rank_bytes for one in contestants),
        )
        module_bytes = _ints(one.module_bytes for one in contestants)
        return cls(
            layers=tuple(one.layer for one in contestants),
            benefits=benefits,
            densities=_densities(benefits, rank_bytes, torch.where(floor > 0, 0, module_bytes)),
            energy=_floats(one.energy for one in contestants),
            known=_ints(one.known for one in contestants),
            floor=floor,
            cap=_ints(one.cap for one in contestants),
            rank_bytes=rank_bytes,
            module_bytes=module_bytes,
            next_benefit=_floats(
                one.weight * one.spectrum.next_value_bound**2 if one.open else 0.0 for one in contestants
            ),
            unknown_energy=_floats(one.unknown_energy for one in contestants),
            unknown_values=_ints(
                one.spectrum.largest_rank - one.spectrum.known if one.open else 0 for one in contestants
            ),
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


def _ints(values: Iterable[int]) -> Int[Tensor, " layers"]:
    return torch.tensor(list(values), dtype=torch.int64)


def _floats(values: Iterable[float]) -> Float[Tensor, " layers"]:
    return torch.tensor(list(values), dtype=torch.float64)
