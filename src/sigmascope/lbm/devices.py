"""Choose a device and a dtype from what a user typed."""

import torch

from sigmascope.errors import ConfigError

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


def resolve_device(name: str = "auto", flag: str = "--device") -> torch.device:
    """Turn a device name into a device that is there.

    Args:
        name: "auto" takes the accelerator that PyTorch sees, else the CPU; or "cpu", "cuda", "cuda:1", ...
        flag: Where it was typed, for the error: a flag, or a key of a YAML file.

    Raises:
        ConfigError: The name is not a device, or there is no such device on this machine.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else found
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


def _is_there(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != device.type:
        return False
    return ":" not in str(device) or device.index < torch.accelerator.device_count()
