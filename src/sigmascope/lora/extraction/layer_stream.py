"""One layer of two checkpoints, read and subtracted in pieces that stay in the processor's cache.

Reading, widening, subtracting and three sums over tens of millions of values cost more in memory traffic than
in arithmetic when each is a pass of its own, and fresh memory for each layer costs a page fault every 4 KiB.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.norms import quick_energy
from sigmascope.lora.numerics.krylov import fast_dtype

_PIECE: Final = 1 << 18  # elements: 1 MiB in float32
_TINY: Final = 1e-12
"""Squares of float32 values well below it are no normal numbers any more, and their sums are off."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamedChange:
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
        self._memory = threading.local()

    def read(self, layer: str) -> StreamedChange:
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
        delta = self._buffer("delta", torch.float32, elements)
        rounded = self._buffer("rounded", torch.bfloat16, elements) if self._rounds else None
        base, tuned = (
            side.pieces(key, self._buffer(name, torch.uint8, _PIECE * side.info(key).dtype.itemsize))
            for name, side in (("base", self._pair.base), ("tuned", self._pair.tuned))
        )
        energy, base_energy, largest = _subtract(base, tuned, delta, rounded)
        if not _in_range(energy, base_energy, largest):
            return self._as_a_whole(layer)  # which sums in float64, and says what is wrong where something is
        return StreamedChange(
            delta.view(shape),
            None if rounded is None else rounded.view(shape),
            math.sqrt(energy),
            math.sqrt(base_energy),
            largest,
        )

    def _as_a_whole(self, layer: str) -> StreamedChange:
        change = self._pair.layer_change(layer, self._device)
        largest = float(change.delta.abs().max()) if change.delta.numel() else 0.0
        return StreamedChange(change.delta, None, change.delta_norm, change.base_norm, largest)

    def _buffer(self, name: str, dtype: torch.dtype, elements: int) -> Tensor:
        """This thread's memory of that name, as large as the largest layer so far."""
        held: Tensor | None = getattr(self._memory, name, None)
        if held is None or held.dtype != dtype or held.numel() < elements:
            held = torch.zeros(elements, dtype=dtype)
            setattr(self._memory, name, held)
        return held[:elements]


def _in_range(energy: float, base_energy: float, largest: float) -> bool:
    """Whether the squares behind these sums were float32 numbers; false for NaN and Inf too."""
    changed = largest == 0.0 or largest > _TINY
    return changed and base_energy > _TINY**2 and energy + base_energy < math.inf


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
        energies.append(quick_energy(part))
        base_energies.append(quick_energy(widened))
        extremes.extend(torch.aminmax(part))
    return (
        math.fsum(map(float, energies)),
        math.fsum(map(float, base_energies)),
        max((abs(float(extreme)) for extreme in extremes), default=0.0),
    )
