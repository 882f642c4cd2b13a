"""What a merge of LoRAs into a checkpoint did."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sigmascope.lora.merging.baking import BakedTensor
from sigmascope.lora.merging.merge_inputs import InputLora
from sigmascope.lora.norms import root_sum_square


@dataclass(frozen=True, slots=True)
class BakeReport:
    """The result of a merge into a checkpoint.

    Attributes:
        into: The checkpoint that the LoRAs were merged into.
        checkpoint: The file that was written.
        inputs: The LoRAs, in the order given.
        method: How their changes became one.
        tensors: What was changed, in the checkpoint's order.
        copied: How many tensors were copied bit for bit.
        unmatched: Modules that are of no tensor of the checkpoint, by LoRA's position.
        unused_keys: Keys that belong to no module of their LoRA, by its position.
        skipped: What the checkpoint held beside its weights and the new file does not, with the reason.
        file_bytes: Size of the file that was written.
        seconds: Time of the whole work.
    """

    into: Path
    checkpoint: Path
    inputs: tuple[InputLora, ...]
    method: str
    tensors: tuple[BakedTensor, ...]
    copied: int
    unmatched: dict[int, tuple[str, ...]]
    unused_keys: dict[int, tuple[str, ...]]
    skipped: dict[str, str]
    file_bytes: int
    seconds: float

    @property
    def change_norm(self) -> float:
        """‖ΔW‖ of all changes that were to be added."""
        return root_sum_square([tensor.change_norm for tensor in self.tensors])

    @property
    def lost_share(self) -> float | None:
        """Share of the changes that rounding to the checkpoint's dtype took away; None without changes."""
        lost = root_sum_square([tensor.lost_norm for tensor in self.tensors])
        return lost / self.change_norm if self.change_norm > 0.0 else None

    @property
    def most_lost(self) -> tuple[BakedTensor, ...]:
        """The ten tensors whose change suffered most from rounding."""
        measured = [tensor for tensor in self.tensors if tensor.lost_share is not None]
        return tuple(sorted(measured, key=lambda tensor: -(tensor.lost_share or 0.0))[:10])

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "into": str(self.into),
            "checkpoint": str(self.checkpoint),
            "inputs": [asdict(one) | {"path": str(one.path)} for one in self.inputs],
            "method": self.method,
            "changed": len(self.tensors),
            "copied": self.copied,
            "change_norm": self.change_norm,
            "lost_share": self.lost_share,
            "file_bytes": self.file_bytes,
            "seconds": self.seconds,
            "unmatched": {str(position): list(names) for position, names in self.unmatched.items()},
            "unused_keys": {str(position): list(keys) for position, keys in self.unused_keys.items()},
            "skipped": self.skipped,
            "tensors": [tensor.as_dict() for tensor in self.tensors],
        }
