"""Which tensor of a model each change of a LoRA is for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from sigmascope.errors import ModelMismatchError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.models.layer_kinds import WEIGHT
from sigmascope.lora.models.layout import ModelLayout
from sigmascope.lora.names.alignment import align
from sigmascope.lora.validation.subtraction import Change


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """A LoRA sorted by what it changes in a model.

    Attributes:
        lora: The LoRA under the names of the model's layers, with fused matrices divided or put together.
        names: The name in `lora` by key of the tensor that it changes.
        unmatched: Names in the LoRA as it was given that no tensor of the model fits.
    """

    lora: LoraFile
    names: Mapping[str, str]
    unmatched: tuple[str, ...]

    def change(self, key: str) -> Change:
        """Read what is added to a tensor of the model.

        Raises:
            LoraFormatError: Its tensors do not fit together.
            NonFiniteError: They hold NaN or Inf.
        """
        name = self.names[key]
        return self.lora.modules[name] if name in self.lora.modules else self.lora.changes[name]


def changed_keys(lora: LoraFile, keys: Iterable[str], layout: ModelLayout) -> ChangedKeys:
    """Find the tensor of each change by name alone; nothing is read.

    Args:
        lora: Of any format.
        keys: Of all the model's tensors, such as `denoiser.conv_in.weight` and `denoiser.conv_in.bias`.
        layout: How the model names them.

    Raises:
        LoraFormatError: Two modules of the LoRA are for one tensor.
    """
    paths = {key.removesuffix(WEIGHT): key for key in keys}
    aligned = align(lora, tuple(paths), layout)
    names = {paths[path]: path for path in aligned.lora.names if path in paths}
    # A change of the bias of a layer that has none is aligned all the same.
    lost = [name for path in aligned.lora.names if path not in paths for name in aligned.sources[path]]
    return ChangedKeys(aligned.lora, names, (*aligned.unmatched, *lost))


def formed(change: Change, weight: Tensor) -> Tensor:
    """ΔW in the shape of the weight that it changes, float32.

    Raises:
        ModelMismatchError: The change is none of such a weight.
    """
    if not isinstance(change, LoraFactors):
        return change.delta(weight)
    require_shape(change, tuple(weight.shape))
    return change.delta()


def require_shape(change: Change, shape: tuple[int, ...]) -> None:
    """Refuse factors of another weight; other kinds know what they fit only when they are formed.

    Raises:
        ModelMismatchError: With both shapes.
    """
    if isinstance(change, LoraFactors) and change.weight_shape != shape:
        raise ModelMismatchError(
            f"the weight is {shape}, the LoRA's module is for {change.weight_shape}",
            hint="Use the LoRA with the model it was made for.",
        )
