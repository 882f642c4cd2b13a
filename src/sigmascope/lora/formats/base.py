"""What a LoRA file format has to provide. Each format is one module beside this one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.formats.keys import KeyGroups
from sigmascope.lora.models.layout import ModelLayout, Part
from sigmascope.lora.names.layer_paths import Naming, renamed
from sigmascope.lora.names.transformer_names import Row
from sigmascope.lora.names.unet_names import UnetBlocks
from sigmascope.lora.shapes import is_convolution

FormatName = Literal["native", "kohya", "peft", "comfyui"]


@dataclass(frozen=True, slots=True)
class FactorKeys:
    """The ends of a module's keys.

    Attributes:
        up: Of the up factor.
        down: Of the down factor.
        alpha: Of the alpha; None where the format has none.
        holds_changes: Whether LoHa, LoKr, DoRA and differences are written too, as kohya's tools name them.
        magnitude: Of DoRA's magnitudes per output, where the format writes those but no other changes.
    """

    up: str = "lora_up.weight"
    down: str = "lora_down.weight"
    alpha: str | None = "alpha"
    holds_changes: bool = True
    magnitude: str | None = None

    def tensors(self, module: str, factors: LoraFactors) -> dict[str, Tensor]:
        """The tensors of plain factors by key, with alpha = rank (float32), contiguous."""
        pair = factors.with_unit_scale()
        up, down = pair.up.detach(), pair.down.detach()
        if is_convolution(pair.weight_shape):
            kernel = pair.weight_shape[2:]
            up = up.reshape(*up.shape, *(1 for _ in kernel))
            down = down.reshape(pair.rank, *pair.weight_shape[1:])
        tensors = {f"{module}.{self.up}": up.contiguous(), f"{module}.{self.down}": down.contiguous()}
        if self.alpha is not None:
            tensors[f"{module}.{self.alpha}"] = torch.tensor(float(pair.rank))
        return tensors


def _never(ranks: Mapping[str, int], layout: ModelLayout) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """One way to name a LoRA's tensors in a file.

    Attributes:
        name: As in `LoraFile.format`.
        recognises: Whether a file with these keys is of this format.
        naming: In which naming of a family's layers its names are; None: the checkpoint's own.
        module_name: The name of a module by the part of the model, the layer's path there in that naming, the
            checkpoint's layout, and the prefix that the user asked for.
        keys: How a module's tensors are named.
        alphas_mislead: Whether some reader scales modules of these ranks wrongly if it is told their alphas.
    """

    name: FormatName
    recognises: Callable[[KeyGroups], bool]
    naming: Callable[[str], Naming | None]
    module_name: Callable[[Part, str, ModelLayout, str | None], str]
    keys: FactorKeys = field(default_factory=FactorKeys)
    alphas_mislead: Callable[[Mapping[str, int], ModelLayout], bool] = _never

    def name_for(
        self,
        layer: str,
        layout: ModelLayout,
        *,
        prefix: str | None = None,
        blocks: UnetBlocks | None = None,
    ) -> str:
        """The name of a layer's module.

        Args:
            layer: The layer's path in the checkpoint, without `.weight`.
            layout: The checkpoint's.
            prefix: What to write before the denoiser's names where the format leaves it open; "" for nothing.
            blocks: The U-Net's; the family's own when left out.

        Raises:
            LoraFormatError: The format has no name for such a layer.
        """
        placed = self.placement(layer, layout, blocks=blocks)
        if isinstance(placed, Row):
            raise LoraFormatError(
                f"{layer} is not one layer in {self.name} format: it belongs with "
                f"{', '.join(placed.parts)} in {placed.original}.",
                hint="Convert the whole LoRA, which joins and divides such layers.",
            )
        return self.named(layer, placed, layout, prefix)

    def placement(self, layer: str, layout: ModelLayout, *, blocks: UnetBlocks | None = None) -> str | Row:
        """The layer's path in the format's naming; a line of the table where it is no layer of its own there.

        Raises:
            LoraFormatError: The layer has no name there that is known.
        """
        wanted = self.naming(layout.family)
        part, path = layout.split(layer)
        return path if wanted is None else renamed(path, part, layout, wanted, blocks)

    def named(self, layer: str, path: str, layout: ModelLayout, prefix: str | None = None) -> str:
        """The name of a module by its path in the format's naming; `layer` says which part it is of."""
        part, _ = layout.split(layer)
        return self.module_name(part, path, layout, prefix)

    def module_tensors(self, name: str, factors: LoraFactors) -> dict[str, Tensor]:
        """The tensors of one module by key; see `FactorKeys.tensors`."""
        return self.keys.tensors(name, factors)
