"""Weights of the base model, found by a LoRA's own names."""

from collections.abc import Sequence

from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.errors import ModelMismatchError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.names.landing import aligned_with
from sigmascope.lora.precision import at_least_float32

_WEIGHT = ".weight"


class BaseWeights:
    """Reads the weight that a LoRA's module changes.

    Args:
        base: An open checkpoint.
        loras: The LoRAs under their own names.

    Raises:
        LoraFormatError: Two modules of a LoRA are for one layer.
    """

    def __init__(self, base: Checkpoint, loras: Sequence[LoraFile]) -> None:
        self._base = base
        self._layers = [
            {name: layer for layer, names in aligned_with(base, lora).sources.items() for name in names}
            for lora in loras
        ]

    def weight(self, position: int, name: str) -> Tensor:
        """The base weight of one module, in float32 or wider.

        Args:
            position: Of the LoRA.
            name: Of the module in its file.

        Raises:
            ModelMismatchError: The checkpoint has no such weight.
        """
        layer = self._layers[position].get(name)
        key = layer if layer is None or f"{layer}{_WEIGHT}" not in self._base else f"{layer}{_WEIGHT}"
        if key is None or key not in self._base:
            raise ModelMismatchError(
                f"{self._base.path} has no weight for {name}.",
                hint="Give the model that the LoRA was made for as --base_model_path.",
            )
        weight = self._base.tensor(key)
        return weight.to(at_least_float32(weight.dtype))
