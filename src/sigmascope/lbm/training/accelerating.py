"""Accelerate, made as the settings say and undone afterwards, so that one process can train twice."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from sigmascope.errors import ConfigError
from sigmascope.lbm.devices import resolve_device
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training.trackers import project_folder

_DEVICE_VARIABLE: Final = "ACCELERATE_TORCH_DEVICE"


@contextmanager
def accelerated(settings: TrainSettings) -> Iterator[Accelerator]:
    """Make the accelerator of one training; under `accelerate launch` it joins the other processes.

    Raises:
        ConfigError: The device is not there, or cannot compute in the precision asked for; or the launcher's
            configuration spreads the model over processes.
    """
    is_ours = not PartialState._shared_state
    with _device(settings.device):
        try:
            accelerator = Accelerator(
                cpu=settings.device == "cpu",
                mixed_precision=settings.mixed_precision,
                log_with=settings.tracker,
                project_dir=project_folder(settings),
            )
        except ValueError as error:
            raise ConfigError(
                f"mixed_precision, device: Accelerate refuses {settings.mixed_precision} on {settings.device} "
                f"({error}).",
                hint="Use bf16 or no, or run on an accelerator.",
            ) from error
    if str(accelerator.distributed_type).rpartition(".")[2] in ("FSDP", "DEEPSPEED"):
        raise ConfigError(
            "accelerate: checkpoints of a model that FSDP or DeepSpeed spreads over processes are not written yet.",
            hint="Launch with --multi_gpu: each process then holds the base, and a LoRA's gradients are small.",
        )
    # Set here: the launcher's environment would win over an argument.
    accelerator.gradient_accumulation_steps = settings.gradient_accumulation_steps
    try:
        yield accelerator
    finally:
        if is_ours and accelerator.num_processes == 1:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


@contextmanager
def _device(name: str) -> Iterator[None]:
    """Tell Accelerate the device: it takes one only from its environment."""
    device: torch.device = resolve_device(name)
    if name in ("auto", "cpu") or "LOCAL_RANK" in os.environ:
        yield
        return
    before = os.environ.get(_DEVICE_VARIABLE)
    os.environ[_DEVICE_VARIABLE] = str(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICE_VARIABLE]
        else:
            os.environ[_DEVICE_VARIABLE] = before
