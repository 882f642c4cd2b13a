"""How far base + LoRA is from the tuned model in one tensor, without holding ΔW or B·A.

‖ΔW‖ and ‖ΔW − s·B·A‖ are summed over blocks of rows that stay in a core's cache: a block is read from both
files' tensors, subtracted, summed, reduced by its rows of s·B·A and summed again. That costs the products of
the trace formula ‖ΔW‖² − 2·tr(Bᵀ(ΔW·Aᵀ)) + tr((BᵀB)(A·Aᵀ)), and nothing cancels: the square of a small error is
not the difference of two large numbers.

Products run in float32, and sums in float64 across short runs. Rounding of the products can be mistaken for an error of the LoRA
only where little error is left: there, by a stated bound, the tensor is measured again in float64.
"""

import math
import threading
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sigmascope.lora.models.pairs import CheckpointPair
from sigmascope.lora.norms import quick_energy
from sigmascope.lora.validation.subtraction import Change, Subtraction, subtraction

_BLOCK: Final = 1 << 18  # elements of ΔW at a time: 1 MiB in float32
_WORTH_TRUSTING: Final = 1e3
"""How many times the bound of its rounding an error must be to count as measured in float32."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The change of one tensor, and what a LoRA leaves of it.

    Attributes:
        delta_norm: ‖ΔW‖.
        error_norm: ‖ΔW − s·B·A‖; ‖ΔW‖ where there is nothing to subtract.
    """

    delta_norm: float
    error_norm: float


class ResidualMeter:
    """Measures the tensors of a pair, from any thread, in memory that each thread uses again.

    Args:
        pair: The two checkpoints, open.
    """

    def __init__(self, pair: CheckpointPair) -> None:
        self._pair = pair
        self._memory = _Memory()

    def measure(self, key: str, change: Change | None = None) -> Residual:
        """Read one tensor from both files and measure it.

        Args:
            key: The tensor's name.
            change: What the LoRA adds to it, of the tensor's shape.

        Raises:
            NonFiniteError: Either file holds NaN or Inf there.
            CheckpointError: The tensor cannot be read.
            ModelMismatchError: The change is none of such a tensor.
            LoraFormatError: The change cannot be formed.
        """
        if 0 in self._pair.base.info(key).shape:
            return Residual(0.0, 0.0)
        base, tuned = (
            side.tensor_into(key, self._scratch(name, side.info(key).nbytes, torch.uint8))
            for name, side in (("base", self._pair.base), ("tuned", self._pair.tuned))
        )
        dtype = self._pair.precision_of(key)
        found, rounding = self._in(dtype, base, tuned, change)
        if dtype == torch.float32 and not found.error_norm >= _WORTH_TRUSTING * rounding:
            found, _ = self._in(torch.float64, base, tuned, change)
        if not math.isfinite(found.delta_norm):
            self._pair.change(key, torch.device("cpu"))  # says which file holds what
        return found

    def _in(
        self, dtype: torch.dtype, base: Tensor, tuned: Tensor, change: Change | None
    ) -> tuple[Residual, float]:
        """The residual in a dtype, and the bound of that dtype's rounding for float32."""
        taken = None if change is None else subtraction(change, base, dtype)
        rows = base.shape[0] if base.ndim > 1 else 1
        before, after = (tensor.reshape(rows, -1) for tensor in (base, tuned))
        delta_energy, error_energy = self._sum(before, after, taken, dtype)
        found = Residual(math.sqrt(delta_energy), math.sqrt(error_energy))
        return found, 0.0 if taken is None else taken.rounding_bound(found.delta_norm)

    def _sum(
        self, before: Tensor, after: Tensor, taken: Subtraction | None, dtype: torch.dtype
    ) -> tuple[float, float]:
        height, width = before.shape
        step = max(_BLOCK // max(width, 1), 1 if taken is None else taken.rows)
        delta_energy, error_energy = [], []
        for start in range(0, height, step):
            rows = slice(start, min(start + step, height))
            count = (rows.stop - start) * width
            block, other = (
                self._scratch(name, count, dtype).view(-1, max(width, 1)) for name in ("delta", "other")
            )
            block.copy_(after[rows])
            other.copy_(before[rows])
            block.sub_(other)
            delta_energy.append(_energy(block))
            if taken is not None:
                taken.take_off(rows, block)
                error_energy.append(_energy(block))
        total = math.fsum(delta_energy)
        return total, total if taken is None else math.fsum(error_energy)

    def _scratch(self, name: str, elements: int, dtype: torch.dtype) -> Tensor:
        """This thread's memory of that name, as large as anything so far."""
        held = self._memory.held.get((name, dtype))
        if held is None or held.numel() < elements:
            held = self._memory.held[name, dtype] = torch.empty(elements, dtype=dtype)
        return held[:elements]


class _Memory(threading.local):
    """Tensors of one thread, by name and dtype."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype], Tensor] = {}


def _energy(block: Tensor) -> float:
    """‖block‖², summed in float64 across short runs."""
    values = block.view(-1)
    return float(torch.dot(values, values) if values.dtype == torch.float64 else quick_energy(values))
