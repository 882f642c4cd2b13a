"""Accelerate, made as the settings say and undone afterwards, so that one process can train twice."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from sigmascope.errors import ConfigError
from sigmascope.lbm.devices import resolve_device
from sigmascope.lbm.training.deepspeed_config import deepspeed_plugin, launched_processes
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.trackers import project_folder

_DEVICE_VARIABLE: Final = "ACCELERATE_TORCH_DEVICE"
_ASKED_FOR: Final = {
    DistributedType.DEEPSPEED: ("DeepSpeed", "use_deepspeed"),
    DistributedType.FSDP: ("FSDP", "use_fsdp"),
}
"""What the launcher's flags ask for, which Accelerate has not on every device."""
_NOT_IN_PARTS: Final = ("adafactor", "rprop")
"""Optimizers whose operations in place PyTorch 2.13 refuses on a DTensor; all others were tried."""


@contextmanager
def accelerated(settings: TrainSettings) -> Iterator[Accelerator]:
    """Make the accelerator of one training; under `accelerate launch` it joins the other processes.

    Raises:
        ConfigError: The device is not there, or cannot compute in the precision asked for; or the launcher asks for
            a way to spread the model over processes that training has not, or contradicts the settings.
    """
    is_ours = not PartialState._shared_state
    plugin = deepspeed_plugin(settings)
    with _device(settings.device) as device:
        try:
            accelerator = Accelerator(
                # Without a GPU, auto is the CPU too: not told so, it would leave each process alone.
                cpu=device.type == "cpu",
                # Under DeepSpeed it would turn the model itself into bfloat16.
                mixed_precision=settings.mixed_precision if plugin is None else "no",
                log_with=settings.tracker,
                project_dir=project_folder(settings),
                deepspeed_plugin=plugin,
            )
        except NotImplementedError as error:
            raise ConfigError(
                f"accelerate: this process has trained under DeepSpeed before ({error}).",
                hint="Train in a new process.",
            ) from error
        except ImportError as error:
            raise ConfigError(
                f"accelerate: what the launcher asks for is not installed ({error}).",
                hint="Install it, or launch without it.",
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"mixed_precision, device: Accelerate refuses {settings.mixed_precision} on {settings.device} "
                f"({error}).",
                hint="Use bf16 or no, or run on an accelerator.",
            ) from error
    kind = accelerator.distributed_type
    try:
        _check_kind(accelerator)
        check_spreading(kind, settings, fsdp2=is_sharded(accelerator))
        # Set here: the launcher's environment would win over an argument.
        accelerator.gradient_accumulation_steps = settings.gradient_accumulation_steps
        yield accelerator
    finally:
        # DeepSpeed keeps a state of its own, which nothing undoes: a second training is refused above.
        if is_ours and accelerator.num_processes == 1 and kind != DistributedType.DEEPSPEED:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether FSDP spreads the denoiser over the processes."""
    return bool(getattr(accelerator, "is_fsdp2", False))  # Accelerate before 1.6 has no such FSDP


def _check_kind(accelerator: Accelerator) -> None:
    """Refuse to train otherwise than the launcher asks: Accelerate does so without a word, on the CPU for one.

    Raises:
        ConfigError: It has not what was asked for on this device, or leaves each process alone.
    """
    kind, device = accelerator.distributed_type, accelerator.device.type
    for asked, (name, flag) in _ASKED_FOR.items():
        variable = f"ACCELERATE_{flag.upper()}"
        if os.environ.get(variable, "false").lower() == "true" and kind != asked:
            raise ConfigError(
                f"device: Accelerate has no {name} on {device} here, and would train without it.",
                hint=f"Use device auto on a machine with GPUs, or launch without --{flag}.",
            )
    count = launched_processes()
    if accelerator.num_processes != count:
        raise ConfigError(
            f"device: Accelerate leaves each of the {count} processes alone on {device}.",
            hint="Start them by torchrun or accelerate launch, on GPUs or with device cpu.",
        )


def check_spreading(kind: DistributedType, settings: TrainSettings, *, fsdp2: bool) -> None:
    """Refuse ways to spread the model over processes that training has not.

    Args:
        kind: What the launcher's configuration asks for.
        settings: Of the run.
        fsdp2: Whether that is FSDP of version 2, PyTorch's `fully_shard`.

    Raises:
        ConfigError: It is Megatron-LM, FSDP of version 1, or FSDP in float16 or with an optimizer that cannot do it.
    """
    if kind == DistributedType.MEGATRON_LM:
        raise ConfigError(
            "accelerate: Megatron-LM trains language models of its own making, not this one.",
            hint="Launch with --use_fsdp --fsdp_version 2, or without --use_megatron_lm.",
        )
    if kind != DistributedType.FSDP:
        return
    if not fsdp2:
        raise ConfigError(
            "accelerate: FSDP of version 1 keeps weights in flat buffers, from which no checkpoints are written here.",
            hint="Set fsdp_version: 2 in Accelerate's configuration, or launch with --fsdp_version 2.",
        )
    if settings.optimizer.lower() in _NOT_IN_PARTS:
        raise ConfigError(
            f"optimizer: PyTorch's {settings.optimizer} does not work on weights that FSDP spreads over processes.",
            hint="Use AdamW, or any other than Adafactor and Rprop.",
        )
    if settings.mixed_precision == "fp16":
        raise ConfigError(
            "mixed_precision: fp16 does not go with FSDP: all processes would have to skip the same steps.",
            hint="Use bf16 or no.",
        )


@contextmanager
def _device(name: str) -> Iterator[torch.device]:
    """Tell Accelerate the device: it takes one only from its environment."""
    device = resolve_device(name, "device")
    if name in ("auto", "cpu") or "LOCAL_RANK" in os.environ:
        yield device
        return
    before = os.environ.get(_DEVICE_VARIABLE)
    os.environ[_DEVICE_VARIABLE] = str(device)
    try:
        yield device
    finally:
        if before is None:
            del os.environ[_DEVICE_VARIABLE]
        else:
            os.environ[_DEVICE_VARIABLE] = before
