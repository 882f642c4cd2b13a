"""Choose a device and a dtype from what a user typed, and say what to change when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.probes.reading import is_out_of_memory

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Names of dtypes that the command line takes."""

LESS_FOR_TRAINING: Final = (
    "Lower batch_size or image_size, set gradient_checkpointing: true or mixed_precision: bf16, or pixel_crop where "
    "there is a pixel loss; --dry_run estimates the memory."
)
LESS_FOR_INFERENCE: Final = "Choose a smaller --size or --resolution, --tile_size 512, or --torch_dtype bf16."
LESS_FOR_GRADIENTS: Final = (
    "Add --gradient_checkpointing, or choose a smaller --size, --torch_dtype bf16 or --device cpu."
)
"""Hints for `explain_out_of_memory`."""


def resolve_device(name: str = "auto", flag: str = "--device") -> torch.device:
    """Turn a device name into a device of this machine.

    Args:
        name: "auto" takes the accelerator that PyTorch sees, else the CPU; or "cpu", "cuda", "cuda:1", ...
        flag: Where it was typed, for the error: a flag, or a key of a YAML file.

    Raises:
        ConfigError: The name is not a device, or there is no such device on this machine.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if accelerator is None else accelerator
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{flag}: {name!r} is not a device.", hint="Use auto, cpu, cuda, cuda:1, mps or xpu."
        ) from error
    if not _is_there(device):
        auto = f"{flag} auto" if flag.startswith("-") else f"{flag}: auto"
        raise ConfigError(f"{flag}: there is no {name} on this machine.", hint=f"Use {auto}.")
    return device


def _is_there(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        return False
    return ":" not in str(device) or device.index < torch.accelerator.device_count()


def resolve_dtype(name: str, flag: str = "--torch_dtype") -> torch.dtype:
    """Turn "float32", "bf16", "fp16" (and their long forms) into a dtype.

    Args:
        name: What the user typed.
        flag: Where, for the error.

    Raises:
        ConfigError: It is none of these.
    """
    dtype = DTYPES.get(name.removeprefix("torch.").lower())
    if dtype is None:
        raise ConfigError(
            f"{flag}: expected one of {', '.join(DTYPES)}, got {name!r}.", hint="Use float32 or bf16."
        )
    return dtype


@contextmanager
def explain_out_of_memory(what: str, hint: str) -> Iterator[None]:
    """Turn running out of memory in the block, on any device, into an error that says what to change.

    Args:
        what: What the block works on.
        hint: What takes less memory.

    Raises:
        ConfigError: In place of PyTorch's, Pillow's or Python's error. Every other error passes unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SigmascopeError) or not is_out_of_memory(error):
            raise
        # The first sentence has the sizes; a `MemoryError` is without words.
        lines = str(error).splitlines()
        sentence = lines[0].partition(". GPU ")[0].rstrip(".") if lines else ""
        words = f" ({sentence})" if sentence else ""
        raise ConfigError(f"{what} does not fit into memory{words}.", hint=hint) from error
