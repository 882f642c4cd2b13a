"""A weight that a LoRA was merged into, with what it takes to put the original back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.matching import LoraTarget

_WORDS_IN_A_ROW = 1024


@dataclass(frozen=True, eq=False)
class ChangedWeight:
    """What is needed to undo one merge safely.

    Attributes:
        target: Where the change went.
        original: The values before, on the CPU.
        checksum: Of the values that the merge left; see `checksum_of`.
    """

    target: LoraTarget
    original: Tensor
    checksum: Tensor

    def is_intact(self) -> bool:
        """Whether the weight is still what the merge left."""
        return all(
            weight.dtype == self.original.dtype
            and weight.shape == self.original.shape
            and torch.equal(checksum_of(weight), self.checksum)
            for weight in self._weights()
        )

    def can_be_restored(self) -> bool:
        """Whether the weight can take the original's values."""
        return all(
            weight.shape == self.original.shape and not weight.is_meta and _is_writable(weight)
            for weight in self._weights()
        )

    def restore(self) -> None:
        """Put the original values back."""
        for weight in self._weights():
            write_values(weight, self.original)

    def _weights(self) -> list[Tensor]:
        """One parameter, unless somebody has untied the layers since."""
        return list({id(layer.weight): layer.weight for layer in self.target.layers}.values())


def checksum_of(tensor: Tensor) -> Tensor:
    """Column and row sums of the tensor's bytes as 64-bit words, modulo 2⁶⁴, on the CPU.

    It guards against accidents, not against intent, and so can run on the weight's device at the speed of its
    memory: a cryptographic hash would take longer than the merge.
    """
    data = tensor.detach().contiguous().view(torch.uint8).flatten()
    words = functional.pad(data, (0, -data.numel() % (8 * _WORDS_IN_A_ROW))).view(torch.int64)
    table = words.view(-1, _WORDS_IN_A_ROW)
    return torch.cat([table.sum(dim=0), table.sum(dim=1)]).cpu()


def write_values(weight: Tensor, values: Tensor) -> None:
    """Change a weight in place, unseen by autograd."""
    with torch.no_grad():
        weight.copy_(values)


def _is_writable(weight: Tensor) -> bool:
    """PyTorch refuses to change a tensor made under torch.inference_mode outside of it."""
    return not weight.is_inference() or torch.is_inference_mode_enabled()


def require_restorable(changes: Sequence[ChangedWeight]) -> None:
    """Refuse to restore some weights where others cannot be.

    Raises:
        ModelMismatchError: With the first of those that cannot.
    """
    lost = [changed.target.name for changed in changes if not changed.can_be_restored()]
    if lost:
        raise ModelMismatchError(
            f"{len(lost)} of {len(changes)} merged weights cannot take their originals back: they have another "
            f"shape, lie on the meta device or are inference tensors; the first is {lost[0]}.",
            hint="Give the layers a weight of the first shape with memory of its own, and unmerge then.",
        )
