"""The memory that weights, activations and decoding need, and the device's room for them.

All of it is worked out from shapes and configurations before anything runs.
"""

import math
from typing import Final

import torch
from torch import nn

from sigmascope.pipeline.optimizations.interface import Circumstances
from sigmascope.pipeline.peak_prediction import Planned, Prediction, predict_peak
from sigmascope.pipeline.pipeline_parts import Call, Subject, config_value, planned_call, spatial_factor
from sigmascope.pipeline.plan import Hardware, OptimizationConfig, Reckoning
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import mib

_TENSORS_IN_A_TRANSFORMER: Final = 14
"""As wide as the model, alive at once in a block: residual, its norm, query, key, value, attention's output, and the
feed-forward's hidden layer, which is four times as wide, before and after its activation. A rough count."""
_TENSORS_IN_A_UNET: Final = 40
"""The same for a UNet, in maps of its first level: the skips that wait, and a ResNet's or a transformer's in work."""
_TEXT_TOKENS: Final = 512
TEMPORAL_FACTOR: Final = 4
"""Frames of a video for each frame of its latent, after the first."""


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


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most floating-point elements; None: it has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


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


def nbytes_of(model: nn.Module) -> int:
    """Bytes of weights and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


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


def _width(model: nn.Module) -> int | None:
    heads, head = config_value(model, "num_attention_heads"), config_value(model, "attention_head_dim")
    if isinstance(heads, int) and isinstance(head, int):
        return heads * head
    width = config_value(model, "hidden_size") or config_value(model, "inner_dim")
    return width if isinstance(width, int) else None


def _itemsize(dtype: torch.dtype | None) -> int:
    return 4 if dtype is None else dtype.itemsize


def vae_peak(
    found: Circumstances, *, batch_at_once: int | None = None, largest_side: int | None = None
) -> Prediction:
    """The peak of decoding the call's latents at once.

    Args:
        found: What is planned.
        batch_at_once: Images decoded together; None: all of them.
        largest_side: Pixels that are decoded together at most, as of a tile; None: the whole image.
    """
    name, vae = next(iter(found.subject.of_role("vae").items()), ("", None))
    if vae is None:
        return Prediction(unavailable={"bytes": "the pipeline has no VAE"})
    channels = config_value(vae, "latent_channels") or config_value(vae, "z_dim")
    if not isinstance(channels, int):
        return Prediction(unavailable={"bytes": "the VAE's configuration does not tell its latent channels"})
    is_video = config_value(vae, "z_dim") is not None
    planned = Planned(
        _latent_shape(found, channels, largest_side, is_video=is_video),
        "decoding",
        dtype=found.dtypes.get(name),
        device_type=found.hardware.kind,
        batch_at_once=batch_at_once,
    )
    read = attempt(lambda: predict_peak(vae, planned))
    return read.value or Prediction(unavailable={"bytes": read.reason or "it failed"})


def _latent_shape(
    found: Circumstances, channels: int, largest_side: int | None, *, is_video: bool
) -> tuple[int, ...]:
    factor, call = spatial_factor(found.subject), found.call
    frames = (1 + (call.num_frames - 1) // TEMPORAL_FACTOR,) if is_video else ()
    sides = (min(side, largest_side or side) // factor for side in (call.height, call.width))
    return (call.batch_size, channels, *frames, *sides)


def least_vae_bytes(found: Circumstances) -> int | None:
    """The peak of decoding with whatever the VAE offers to need less, as far as the configuration allows it.

    Args:
        found: What is planned.
    """
    config = found.config
    vae = next(iter(found.subject.of_role("vae").values()), None)
    sliced = 1 if config.vae_slicing is not False and hasattr(vae, "use_slicing") else None
    side = None if vae is None or config.vae_tiling is False else tile_side(vae)
    return vae_peak(found, batch_at_once=sliced, largest_side=side).bytes


def tile_side(vae: nn.Module) -> int | None:
    """Side of a VAE's tiles in pixels, by any of the names that diffusers has for it; None: it has no tiles.

    Args:
        vae: The VAE.
    """
    names = ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width")
    sides = [getattr(vae, name, None) for name in names]
    return next((side for side in sides if isinstance(side, int)), None)


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
