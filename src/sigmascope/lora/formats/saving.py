"""Write a LoRA that is in memory."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from sigmascope.errors import LoraFormatError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.writer import LoraWriter
from sigmascope.lora.models.layout import ModelLayout


def save_lora(
    path: str | Path,
    lora: LoraFile,
    metadata: Mapping[str, str] | None = None,
    *,
    format: str = "native",
    layout: ModelLayout | None = None,
    model_layers: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a LoRA; the target appears whole or not at all.

    The header holds `lora.metadata`, over it what the format says of these modules (ranks, alpha, naming),
    and over that `metadata`.

    Args:
        path: A `.safetensors` file to write or replace.
        lora: At least one module or change, named by the checkpoint's own paths. To change the format of a
            file, use `convert_lora`. A scale other than 1 is multiplied into the up factor.
        metadata: More strings for the header.
        format: "native", "kohya", "peft" or "comfyui".
        layout: Of the checkpoint that the names are of; LBM's own when left out.
        model_layers: Paths of all layers of the model, by which a U-Net of unusual size counts its blocks.
        dtype: Dtype to store the factors in; their own when left out, or float32 where a scale would round them.

    Raises:
        LoraFormatError: The LoRA has no modules, or the format cannot hold one of them.
        NonFiniteError: A factor holds NaN or Inf, or does so in `dtype`.
        WriteError: The target cannot be written.
    """
    if not lora.names:
        raise LoraFormatError("a LoRA without modules is not written.", hint="Check what it was made from.")
    with LoraWriter(
        path,
        format=format,
        layout=layout,
        metadata=metadata,
        inherited=lora.metadata,
        expected=lora.names,
        model_layers=model_layers,
        dtype=dtype,
    ) as writer:
        for name, factors in lora.modules.items():
            writer.write(name, factors)
        for name, change in lora.changes.items():
            writer.write_change(name, change)
