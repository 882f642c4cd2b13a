"""In which dtype a LoRA's factors are stored, told from the header of its file."""

from typing import Final, Literal

import torch

from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.precision import is_real


def storage_dtype(*files: Checkpoint) -> torch.dtype:
    """The dtype in which to store what comes of these files: their own where they share one.

    8-bit floats are no dtype to round factors to, and count as float16. Of several dtypes the widest wins, and
    float16 before bfloat16, since it rounds eight times finer.

    Args:
        files: Opened LoRA files.
    """
    found = {
        torch.float16 if info.dtype.itemsize == 1 else info.dtype
        for file in files
        for info in map(file.info, file)
        if len(info.shape) >= 2 and is_real(info.dtype)
    }
    order = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return next((dtype for dtype in order if dtype in found), torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


SavePrecision = Literal["float", "fp16", "bf16"]

STORAGE_DTYPES: Final[dict[str, torch.dtype]] = {
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
