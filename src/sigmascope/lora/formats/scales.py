"""What the product of a module's factors is multiplied with, wherever the file says so."""

from dataclasses import dataclass

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import scale_of
from sigmascope.lora.formats.asked_rank import true_alpha
from sigmascope.lora.formats.entries import Entry
from sigmascope.lora.formats.peft_config import PeftConfigs
from sigmascope.lora.precision import is_real


@dataclass(frozen=True, slots=True)
class EntryScales:
    """The scales of one file: a module's own alpha goes before PEFT's configuration, and without either it is 1.

    Attributes:
        checkpoint: The open file.
        configs: PEFT's configurations that belong to it.
    """

    checkpoint: Checkpoint
    configs: PeftConfigs

    def alpha(self, entry: Entry, rank: int, weight_shape: tuple[int, ...]) -> float:
        """Alpha such that alpha / rank is the scale of plain factors.

        Raises:
            LoraFormatError: An alpha that is no number.
        """
        if entry.alpha is not None:
            return true_alpha(self._stored(entry.alpha), rank, weight_shape, self.checkpoint.metadata)
        scale = self.configs.scale_of(entry.module, rank)
        return float(rank) if scale is None else scale * rank

    def scale(self, entry: Entry, rank: int | None) -> float:
        """The scale of any other change; raises what `alpha` does.

        Args:
            entry: The change.
            rank: Of its factors; None where it has none.
        """
        if entry.kind in {"diff", "set"}:
            return 1.0
        if entry.alpha is not None:  # LyCORIS stores an alpha beside whole LoKr factors too, and ignores it
            return 1.0 if rank is None else scale_of(self._stored(entry.alpha), rank)
        scale = self.configs.scale_of(entry.module, rank)
        return 1.0 if scale is None else scale

    def _stored(self, key: str) -> float:
        path, alpha = self.checkpoint.path, self.checkpoint.tensor(key)
        if alpha.numel() != 1:
            raise LoraFormatError(
                f"{path}: {key} has the shape {tuple(alpha.shape)}.", hint="Expected a single number."
            )
        if alpha.is_complex() or (alpha.is_floating_point() and not is_real(alpha.dtype)):
            raise LoraFormatError(
                f"{path}: {key} is {str(alpha.dtype).removeprefix('torch.')}.",
                hint="Expected a single number.",
            )
        return float(alpha)
