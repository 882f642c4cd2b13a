"""What a call takes of a device's memory, reckoned from shapes before anything runs."""

import math
from typing import Final

import torch
from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.config import OptimizationConfig
from sigmascope.pipeline.optimizing.decoding import TEMPORAL_FACTOR, least_vae_bytes, vae_peak
from sigmascope.pipeline.optimizing.hardware import Hardware
from sigmascope.pipeline.optimizing.plan import Reckoning
from sigmascope.pipeline.optimizing.subject import (
    Call,
    Subject,
    config_value,
    planned_call,
    spatial_factor,
)
from sigmascope.records.arithmetic import mib

_TENSORS_IN_A_TRANSFORMER: Final = 14
"""As wide as the model, alive at once in a block: residual, its norm, query, key, value, attention's output, and the
feed-forward's hidden layer, which is four times as wide, before and after its activation. A rough count."""
_TENSORS_IN_A_UNET: Final = 40
"""The same for a UNet, in maps of its first level: the skips that wait, and a ResNet's or a transformer's in work."""
_TEXT_TOKENS: Final = 512


def circumstances_of(subject: Subject, hardware: Hardware, config: OptimizationConfig) -> Circumstances:
    """All that the kinds of choices start from.

    Args:
        subject: The pipeline.
        hardware: Where it shall run.
        config: What may be done.
    """
    call = planned_call(subject, config.height, config.width, config.num_frames, config.batch_size)
    dtypes = {
        name: dtype for name, model in subject.models.items() if (dtype := main_dtype(model)) is not None
    }
    found = Circumstances(
        subject,
        hardware,
        config,
        call,
        room_bytes=_room(subject, hardware, config),
        dtypes=dtypes,
        weights={name: nbytes_of(model) for name, model in subject.models.items()},
    )
    if found.room_bytes is None:
        found.unavailable["room_mb"] = hardware.absence or "the device's memory is not known"
    return found


def reckon_work(found: Circumstances) -> None:
    """Reckon activations with the dtypes that are planned by now."""
    counts = [
        count
        for name, model in found.subject.of_role("denoiser").items()
        if (count := denoiser_bytes(model, found.call, _itemsize(found.dtypes.get(name)), found.subject))
        is not None
    ]
    found.denoiser_bytes = max(counts, default=None)
    if found.denoiser_bytes is None:
        found.unavailable["denoiser_mb"] = "the denoiser's configuration does not tell its width"
    predicted = vae_peak(found)
    found.vae_bytes = predicted.bytes
    found.least_vae_bytes = least_vae_bytes(found)
    if predicted.bytes is None:
        found.unavailable["vae_mb"] = predicted.unavailable.get("bytes", "there is no VAE")


def reckoning_of(found: Circumstances) -> Reckoning:
    """What was reckoned, for the plan."""
    now = {name: nbytes_of(model) for name, model in found.subject.models.items()}
    return Reckoning(
        found.as_mb(now),
        found.as_mb(found.weights),
        mib(found.denoiser_bytes),
        mib(found.vae_bytes),
        mib(found.room_bytes),
        dict(found.unavailable),
    )


def denoiser_bytes(model: nn.Module, call: Call, itemsize: int, subject: Subject) -> int | None:
    """Activations of one call of a denoiser, roughly. None: its configuration does not tell.

    Args:
        model: The denoiser.
        call: Its sizes.
        itemsize: Bytes of an element.
        subject: For the VAE's factors.
    """
    factor = spatial_factor(subject)
    frames = 1 + (call.num_frames - 1) // TEMPORAL_FACTOR
    elements = frames * math.ceil(call.height / factor) * math.ceil(call.width / factor)
    images = call.batch_size * call.branches
    channels = config_value(model, "block_out_channels")
    if isinstance(channels, list | tuple) and channels:
        return _TENSORS_IN_A_UNET * elements * int(channels[0]) * images * itemsize
    width = _width(model)
    if width is None:
        return None
    tokens = (
        elements // 4 + _TEXT_TOKENS
    )  # patches of 2 × 2, which all of them have, and the text beside them
    return _TENSORS_IN_A_TRANSFORMER * tokens * width * images * itemsize


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most floating-point elements; None: it has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def nbytes_of(model: nn.Module) -> int:
    """Bytes of weights and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _room(subject: Subject, hardware: Hardware, config: OptimizationConfig) -> int | None:
    """What the device has left, and what the pipeline itself holds there."""
    if hardware.total_bytes is None:
        return None
    own = sum(
        tensor.nbytes
        for model in subject.models.values()
        for tensor in (*model.parameters(), *model.buffers())
        if str(tensor.device) == hardware.device
    )
    free = (
        hardware.total_bytes
        if hardware.free_bytes is None
        else min(hardware.free_bytes + own, hardware.total_bytes)
    )
    return max(0, int(free - config.headroom * hardware.total_bytes))


def _width(model: nn.Module) -> int | None:
    heads, head = config_value(model, "num_attention_heads"), config_value(model, "attention_head_dim")
    if isinstance(heads, int) and isinstance(head, int):
        return heads * head
    width = config_value(model, "hidden_size") or config_value(model, "inner_dim")
    return width if isinstance(width, int) else None


def _itemsize(dtype: torch.dtype | None) -> int:
    return 4 if dtype is None else dtype.itemsize
