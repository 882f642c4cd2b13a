"""LoRA files: `load_lora` finds out the format by itself, `save_lora` writes one.

A format is one module here with a `FORMAT`; it joins by being listed in `FORMATS`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint, save_safetensors
from sigmascope.errors import LoraFormatError, NonFiniteError
from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats import native
from sigmascope.lora.formats.base import LoraFormat
from sigmascope.lora.paths import as_text, exists

__all__ = ["FORMATS", "LoraFormat", "load_lora", "save_lora"]

FORMATS: tuple[LoraFormat, ...] = (native.FORMAT,)
"""In the order in which they are tried."""


def load_lora(path: str | Path) -> LoraFile:
    """Read a LoRA file of any known format.

    Args:
        path: A safetensors file, or a `.pt`/`.ckpt` of tensors only.

    Raises:
        CheckpointError: The file is missing, damaged, or no file of tensors.
        LoraFormatError: Its keys follow no known format, or its factors do not fit together.
        NonFiniteError: A factor holds NaN or Inf.
    """
    exists(Path(path))  # refuses what the system will not look at; a missing file is named when it is opened
    with open_checkpoint(path) as checkpoint:
        keys = list(checkpoint.keys())
        for lora_format in FORMATS:
            if lora_format.recognises(keys):
                return lora_format.read(checkpoint)
    known = ", ".join(lora_format.name for lora_format in FORMATS)
    raise LoraFormatError(
        f"{path}: its {len(keys)} keys are those of no known LoRA format. First keys: {', '.join(keys[:3])}.",
        hint=f"Known formats: {known} (<module>.lora_up.weight and <module>.lora_down.weight).",
    )


def save_lora(
    path: str | Path,
    lora: LoraFile,
    metadata: Mapping[str, str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a LoRA in native naming; the target appears whole or not at all.

    The header holds `lora.metadata`, over it what the format says of these modules (ranks, alpha, naming),
    and over that `metadata`.

    Args:
        path: A `.safetensors` file to write or replace.
        lora: At least one module. A scale other than 1 is multiplied into the up factor.
        metadata: More strings for the header.
        dtype: Dtype to store the factors in; their own when left out.

    Raises:
        LoraFormatError: The LoRA has no modules.
        NonFiniteError: A factor holds NaN or Inf, or does so in `dtype`.
        WriteError: The target cannot be written.
    """
    if not lora.modules:
        raise LoraFormatError("a LoRA without modules is not written.", hint="Check what it was made from.")
    lora_format = native.FORMAT
    tensors: dict[str, Tensor] = {}
    for name, factors in lora.modules.items():
        stored = factors.with_unit_scale() if dtype is None else factors.with_unit_scale().to(dtype=dtype)
        _require_storable(name, stored.up, stored.down)
        tensors.update(lora_format.module_tensors(name, stored))
    defaults = {"modelspec.title": as_text(Path(path).stem)}
    header = {**defaults, **lora.metadata, **lora_format.metadata(lora.modules), **(metadata or {})}
    save_safetensors(path, tensors, header)


def _require_storable(module: str, *factors: Tensor) -> None:
    for factor in factors:
        if not bool(torch.isfinite(factor).all()):
            raise NonFiniteError(
                f"{module}: a factor holds NaN or Inf in {factor.dtype}.",
                hint="Store in bfloat16 or float32, which hold larger values than float16.",
            )
