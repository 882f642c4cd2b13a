"""What a user may choose when a LoRA is extracted, checked before any file is read."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from sigmascope.errors import ConfigError, WriteError
from sigmascope.lora.shapes import FULL_RANK

Coverage = Literal["full", "attention", "extended"]
SavePrecision = Literal["float", "fp16", "bf16"]

STORAGE_DTYPES: Final[dict[str, torch.dtype]] = {
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The choices of one extraction (SPEC section 7).

    Attributes:
        rank: Rank of Linear layers; 9999 keeps everything.
        conv_rank: Rank of Conv2d layers; 9999 keeps everything.
        save_precision: Storage of the factors. fp16 and bf16 take the same space; fp16 rounds eight times
            finer and the factors' balanced scaling keeps them far from its limits, so it is the default.
        min_diff: A layer whose largest change is below this is left out. 0 leaves out unchanged ones only.
        target_coverage: `attention`: the projections of attn1 and attn2. `extended`: also the feed-forward
            layers and proj_in/proj_out around them. `full`: every Linear and Conv2d layer.
        device: Where to decompose: `auto` (CUDA when there is one, else CPU) or a torch device.

    Raises:
        ConfigError: A value makes no sense; the message names the flag.
    """

    rank: int = 32
    conv_rank: int = 16
    save_precision: SavePrecision = "fp16"
    min_diff: float = 0.0
    target_coverage: Coverage = "full"
    device: str = "auto"

    def __post_init__(self) -> None:
        for flag, value in (("--rank", self.rank), ("--conv_rank", self.conv_rank)):
            if value < 1:
                raise ConfigError(
                    f"{flag} {value} keeps nothing.", hint=f"Use 1 or more; {FULL_RANK} is full rank."
                )
        if not (math.isfinite(self.min_diff) and self.min_diff >= 0):
            raise ConfigError(
                f"--min_diff {self.min_diff} is no threshold.", hint="Use 0 or a positive number."
            )

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype that `save_precision` names."""
        return STORAGE_DTYPES[self.save_precision]


def resolve_device(name: str) -> torch.device:
    """Turn a `--device` value into a device that can be used now.

    Args:
        name: `auto`, `cpu`, `cuda`, `cuda:1`, … MPS is refused: it has no float64, which the errors need.

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # torch raises any of these by device type
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {name} cannot be used: {reason}", hint="Use --device cpu or auto."
        ) from error
    if device.type == "meta":
        raise ConfigError("--device meta holds no values.", hint="Use --device cpu or auto.")
    return device


def check_target(save_to: Path, inputs: tuple[Path, ...]) -> None:
    """Refuse a target that would overwrite one of the models, is not named as safetensors, or has no folder.

    Raises:
        ConfigError: With the flag and the file.
        WriteError: The folder does not exist.
    """
    if save_to.suffix != ".safetensors":
        raise ConfigError(
            f"--save_to {save_to}: a LoRA is written as safetensors.",
            hint=f"Name it {save_to.with_suffix('.safetensors').name}.",
        )
    if not save_to.parent.is_dir():
        raise WriteError(save_to, "its folder does not exist.", hint=f"Create {save_to.parent}.")
    for model in inputs:
        if _belongs_to(save_to, model):
            raise ConfigError(
                f"--save_to {save_to} is part of the input {model}.", hint="Choose another name."
            )


def _belongs_to(file: Path, model: Path) -> bool:
    """Whether writing `file` would replace `model` or one of its shards."""
    if not file.exists() or not model.exists():
        return False
    if file.samefile(model):
        return True
    folder = model if model.is_dir() else model.parent
    sharded = model.is_dir() or model.name.endswith(".index.json")
    return sharded and file.resolve().parent == folder.resolve()
