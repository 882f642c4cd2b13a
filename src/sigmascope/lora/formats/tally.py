"""What has been written to a LoRA file, for its header."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from sigmascope.lora.formats.header import VARYING, lora_header
from sigmascope.lora.shapes import is_convolution, max_rank

_LYCORIS: Final = frozenset({"loha", "lokr", "tucker", "dora"})


@dataclass(slots=True)
class Tally:
    """Kinds and ranks of the modules so far.

    Attributes:
        kinds: `lora` for plain factors, else as `WeightChange.kind`.
        linear: How many Linear layers have each rank, and whether it is all that such a layer can have.
        convolution: The same of convolutions.
        changes: How many changes of other kinds there are.
    """

    kinds: set[str] = field(default_factory=set)
    linear: Counter[tuple[int, bool]] = field(default_factory=Counter)
    convolution: Counter[tuple[int, bool]] = field(default_factory=Counter)
    changes: int = 0

    @property
    def modules(self) -> int:
        """How many modules of plain factors there are."""
        return self.linear.total() + self.convolution.total()

    def add(self, rank: int, weight_shape: tuple[int, ...]) -> None:
        """Count plain factors."""
        self.kinds.add("lora")
        counts = self.convolution if is_convolution(weight_shape) else self.linear
        counts[rank, rank >= max_rank(weight_shape)] += 1

    def add_change(self, kind: str) -> None:
        """Count a change that is more than plain factors."""
        self.kinds.add(kind)
        self.changes += 1

    def header(self, format_name: str, family: str) -> dict[str, str]:
        """The header's fields; see `lora_header`."""
        module = "lycoris.kohya" if self.kinds & _LYCORIS else "networks.lora"
        linear = VARYING if _varies(self.linear) else _common(self.linear)
        return lora_header(format_name, family, linear, _common(self.convolution), module=module)


def _varies(counts: Counter[tuple[int, bool]]) -> bool:
    """Whether ranks were chosen layer by layer: a layer that cannot have the others' rank proves nothing."""
    chosen = {rank for rank, full in counts if not full}
    return len(chosen) > 1 or any(full and rank > min(chosen, default=rank) for rank, full in counts)


def _common(counts: Counter[tuple[int, bool]]) -> int | None:
    """The rank that most layers have, of several the smallest; among those that were free to have another."""
    free = {rank: number for (rank, full), number in counts.items() if not full}
    ranks = free or {rank: number for (rank, _), number in counts.items()}
    return max(ranks, key=lambda rank: (ranks[rank], -rank)) if ranks else None
