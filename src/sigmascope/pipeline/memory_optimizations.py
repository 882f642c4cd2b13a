"""Memory: what a call takes, where weights are, and VAE slicing and tiling.

What a call takes is worked out from shapes and configurations before anything runs. Weights are on the device, or in
RAM while they are not at work. A VAE that decodes image by image, or tile by tile, needs less at once.

Stored in float8, the denoiser's weights are widened layer by layer as they are used (layerwise casting).
"""

import importlib
import math
import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope import units
from sigmascope.pipeline.peak_prediction import Planned, Prediction, predict_peak
from sigmascope.pipeline.plan import (
    PIPELINE,
    Call,
    Choice,
    Considered,
    Hardware,
    Kind,
    NotTaken,
    OptimizationConfig,
    PipelineParts,
    PlanningContext,
    Reckoning,
    Undo,
    config_value,
    model_of,
    models_of,
    of_each,
    planned_call,
    spatial_factor,
)
from sigmascope.probes.pipelines import layerwise_casting
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import MIB, mib
from sigmascope.records.run import JsonScalar

_TENSORS_IN_A_TRANSFORMER: Final = 14
"""As wide as the model, alive at once in a block: residual, its norm, query, key, value, attention's output, and the
feed-forward's hidden layer, which is four times as wide, before and after its activation. A rough count."""
_TENSORS_IN_A_UNET: Final = 40
"""The same for a UNet, in maps of its first level: the skips that wait, and a ResNet's or a transformer's in work."""
_TEXT_TOKENS: Final = 512
TEMPORAL_FACTOR: Final = 4
"""Frames of a video for each frame of its latent, after the first."""


def context_of(parts: PipelineParts, hardware: Hardware, config: OptimizationConfig) -> PlanningContext:
    """All that the kinds of choices start from."""
    call = planned_call(parts, config.height, config.width, config.num_frames, config.batch_size)
    dtypes = {name: dtype for name, model in parts.models.items() if (dtype := main_dtype(model)) is not None}
    context = PlanningContext(
        parts,
        hardware,
        config,
        call,
        room_bytes=_room(parts, hardware, config),
        dtypes=dtypes,
        weights={name: nbytes_of(model) for name, model in parts.models.items()},
    )
    if context.room_bytes is None:
        context.unavailable["room_mb"] = hardware.absence or "the device's memory is not known"
    return context


def main_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of most floating-point elements; None: it has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None


def _room(parts: PipelineParts, hardware: Hardware, config: OptimizationConfig) -> int | None:
    """What the device has left, and what the pipeline itself holds there."""
    if hardware.total_bytes is None:
        return None
    own = sum(
        tensor.nbytes
        for model in parts.models.values()
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


def estimate_work(context: PlanningContext) -> None:
    """Reckon activations with the dtypes that are planned by now."""
    counts = [
        count
        for name, model in context.parts.of_role("denoiser").items()
        if (count := denoiser_bytes(model, context.call, _itemsize(context.dtypes.get(name)), context.parts))
        is not None
    ]
    context.denoiser_bytes = max(counts, default=None)
    if context.denoiser_bytes is None:
        context.unavailable["denoiser_mb"] = "the denoiser's configuration does not tell its width"
    predicted = vae_peak(context)
    context.vae_bytes = predicted.bytes
    context.least_vae_bytes = least_vae_bytes(context)
    if predicted.bytes is None:
        context.unavailable["vae_mb"] = predicted.unavailable.get("bytes", "there is no VAE")


def denoiser_bytes(model: nn.Module, call: Call, itemsize: int, parts: PipelineParts) -> int | None:
    """Activations of one call of a denoiser, roughly. None: its configuration does not tell."""
    factor = spatial_factor(parts)
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
    context: PlanningContext, *, batch_at_once: int | None = None, largest_side: int | None = None
) -> Prediction:
    """The peak of decoding the call's latents at once.

    Args:
        context: What is planned.
        batch_at_once: Images decoded together; None: all of them.
        largest_side: Pixels that are decoded together at most, as of a tile; None: the whole image.
    """
    name, vae = next(iter(context.parts.of_role("vae").items()), ("", None))
    if vae is None:
        return Prediction(unavailable={"bytes": "the pipeline has no VAE"})
    channels = config_value(vae, "latent_channels") or config_value(vae, "z_dim")
    if not isinstance(channels, int):
        return Prediction(unavailable={"bytes": "the VAE's configuration does not tell its latent channels"})
    is_video = config_value(vae, "z_dim") is not None
    planned = Planned(
        _latent_shape(context, channels, largest_side, is_video=is_video),
        "decoding",
        dtype=context.dtypes.get(name),
        device_type=context.hardware.kind,
        batch_at_once=batch_at_once,
    )
    read = attempt(lambda: predict_peak(vae, planned))
    return read.value or Prediction(unavailable={"bytes": read.reason or "it failed"})


def _latent_shape(
    context: PlanningContext, channels: int, largest_side: int | None, *, is_video: bool
) -> tuple[int, ...]:
    factor, call = spatial_factor(context.parts), context.call
    frames = (1 + (call.num_frames - 1) // TEMPORAL_FACTOR,) if is_video else ()
    sides = (min(side, largest_side or side) // factor for side in (call.height, call.width))
    return (call.batch_size, channels, *frames, *sides)


def least_vae_bytes(context: PlanningContext) -> int | None:
    """The peak of decoding with whatever the VAE offers to need less, as far as the configuration allows it."""
    config = context.config
    vae = next(iter(context.parts.of_role("vae").values()), None)
    sliced = 1 if config.vae_slicing is not False and hasattr(vae, "use_slicing") else None
    side = None if vae is None or config.vae_tiling is False else tile_side(vae)
    return vae_peak(context, batch_at_once=sliced, largest_side=side).bytes


def tile_side(vae: nn.Module) -> int | None:
    """Side of a VAE's tiles in pixels, by any of the names that diffusers has for it; None: it has no tiles."""
    names = ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width")
    sides = [getattr(vae, name, None) for name in names]
    return next((side for side in sides if isinstance(side, int)), None)


def memory_estimate(context: PlanningContext) -> Reckoning:
    """What was reckoned, for the plan."""
    now = {name: nbytes_of(model) for name, model in context.parts.models.items()}
    return Reckoning(
        context.as_mb(now),
        context.as_mb(context.weights),
        mib(context.denoiser_bytes),
        mib(context.vae_bytes),
        mib(context.room_bytes),
        dict(context.unavailable),
    )


PLACEMENT: Final = "placement"
GROUP_HOOKS: Final = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""What diffusers calls the hooks of group offloading."""


def consider_placement(context: PlanningContext) -> Considered:
    """On the device if all of it fits; else model by model; else layer by layer."""
    asked = context.config.offload
    already = [n for n, part in context.parts.facts.components.items() if part.offload is not None]
    if already:
        yield NotTaken(PLACEMENT, PIPELINE, f"{', '.join(already)}: weights are offloaded already")
    elif asked in ("model", "group"):
        yield from _asked(context, asked)
    elif not context.hardware.is_accelerator:
        yield NotTaken(PLACEMENT, PIPELINE, context.no_accelerator)
    elif context.room_bytes is None:
        yield NotTaken(PLACEMENT, PIPELINE, f"how much memory {context.hardware.device} has is not known")
    elif not hasattr(context.parts.pipeline, "to"):
        yield NotTaken(PLACEMENT, PIPELINE, "it cannot be moved as a whole: it has no `to`")
    elif _fits(context, context.total_bytes):
        yield _on_device(context)
    elif asked is None:
        yield NotTaken(
            PLACEMENT, PIPELINE, f"offloading is switched off. {_sum_in_words(context, context.total_bytes)}"
        )
    else:
        yield from _offloaded(context)


def _asked(context: PlanningContext, how: str) -> Considered:
    if how == "model" and _can_model_offload(context):
        yield _model_offload(context, "Asked for.", necessary=False)
    elif how == "group" and hasattr(context.parts.pipeline, "enable_group_offload"):
        yield _group_offload(context, "Asked for.", necessary=False)
    else:
        yield NotTaken(PLACEMENT, PIPELINE, f"this pipeline has no {how} offloading")


def _can_model_offload(context: PlanningContext) -> bool:
    return getattr(context.parts.pipeline, "model_cpu_offload_seq", None) is not None


def _model_offload(context: PlanningContext, reason: str, *, necessary: bool) -> Choice:
    device = context.hardware.device
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.enable_model_cpu_offload(device="{device}")',
        reason,
        f"no more than the largest model on the device, {units.mib(context.largest[1])} MB; each moves once a generation",
        "memory",
        "none",
        {"device": device, "how": "model"},
        _numbers(context, context.largest[1]),
        necessary,
    )


def _numbers(context: PlanningContext, nbytes: int) -> dict[str, JsonScalar]:
    room = None if context.room_bytes is None else context.room_bytes / MIB
    return {"weights_mb": nbytes / MIB, "work_mb": context.work_bytes / MIB, "room_mb": room}


def _group_offload(context: PlanningContext, reason: str, *, necessary: bool) -> Choice:
    device = context.hardware.device
    options: dict[str, JsonScalar] = {
        "offload_type": "leaf_level",
        "use_stream": context.hardware.kind in ("cuda", "xpu"),
    }
    if options["use_stream"]:
        options["low_cpu_mem_usage"] = _ram_is_short(context)
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.enable_group_offload(onload_device=torch.device("{device}"){arguments})',
        reason,
        "a few layers on the device at a time; copying hides behind computing as far as there is enough of it",
        "memory",
        "none",
        {"device": device, "how": "group", **options},
        _numbers(context, 0),
        necessary,
    )


def _ram_is_short(context: PlanningContext) -> bool:
    """Whether page-locked copies of all weights would take what RAM there is."""
    ram = context.hardware.ram_available_bytes
    return ram is not None and ram < 1.5 * context.total_bytes


def _fits(context: PlanningContext, nbytes: int) -> bool:
    return context.room_bytes is not None and nbytes + context.work_bytes <= context.room_bytes


def _on_device(context: PlanningContext) -> Choice | NotTaken:
    device = context.hardware.device
    if all(str(p.device) == device for model in context.parts.models.values() for p in model.parameters()):
        return NotTaken(
            PLACEMENT,
            PIPELINE,
            f"it is on {device} already, and fits. {_sum_in_words(context, context.total_bytes)}",
        )
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.to("{device}")',
        f"All of it fits. {_sum_in_words(context, context.total_bytes)}",
        "nothing moves while it runs",
        "speed",
        "rounding",
        {"device": device, "how": "device"},
        _numbers(context, context.total_bytes),
    )


def _sum_in_words(context: PlanningContext, nbytes: int) -> str:
    return (
        f"{units.mib(nbytes)} MB of weights and about {units.mib(context.work_bytes)} MB at work, "
        f"in {units.mib(context.room_bytes)} MB."
    )


def _offloaded(context: PlanningContext) -> Considered:
    name, nbytes = context.largest
    if _fits(context, nbytes) and _can_model_offload(context):
        yield _model_offload(
            context, f"All weights do not fit: {_sum_in_words(context, context.total_bytes)}", necessary=True
        )
        return
    reason = f"{name} alone does not fit: {_sum_in_words(context, nbytes)}"
    if hasattr(context.parts.pipeline, "enable_group_offload"):
        yield _group_offload(context, reason, necessary=True)
    else:
        yield NotTaken(PLACEMENT, PIPELINE, f"{reason} This pipeline has no group offloading.")


def apply_placement(pipeline: Any, choice: Choice) -> Undo | None:
    """Move the pipeline, or let diffusers and accelerate move its weights while it runs."""
    device, how = str(choice.options["device"]), choice.options["how"]
    if how == "device":
        pipeline.to(device)
        return None
    if how == "model":
        pipeline.enable_model_cpu_offload(device=device)
        # They are put on anew after each generation, so that what is noted now is not what will be there.
        undo: Undo = pipeline.remove_all_hooks
        return undo
    options = {name: value for name, value in choice.options.items() if name not in ("device", "how")}
    models = models_of(pipeline)
    pipeline.enable_group_offload(onload_device=torch.device(device), **options)
    return partial(_remove_group_hooks, models)


def _remove_group_hooks(models: dict[str, nn.Module]) -> None:
    for model in models.values():
        for part in model.modules():
            registry: Any = getattr(part, "_diffusers_hook", None)
            for name in GROUP_HOOKS if registry is not None else ():
                registry.remove_hook(name, recurse=False)


PLACEMENT_KIND: Final = Kind(PLACEMENT, consider_placement, apply_placement, frozenset({"device"}))


SLICING: Final = "vae_slicing"
TILING: Final = "vae_tiling"


def consider_slicing(context: PlanningContext, name: str, vae: nn.Module) -> Choice | NotTaken:
    """For several images whose decoding at once does not fit."""
    asked = context.config.vae_slicing
    refusal = _settled(SLICING, name, vae, "use_slicing", asked)
    if refusal is not None:
        return refusal
    batch = context.call.batch_size
    if asked == "auto" and (batch == 1 or _decoding_fits(context, name, context.vae_bytes) is not False):
        why = (
            "one image at a time is planned"
            if batch == 1
            else _fitting_words(context, name, context.vae_bytes)
        )
        return NotTaken(SLICING, name, why)
    return Choice(
        SLICING,
        name,
        f"pipe.{name}.enable_slicing()",
        f"{batch} images are decoded at once. {_fitting_words(context, name, context.vae_bytes)}",
        "the memory of one image; a little time",
        "memory",
        "rounding",
        numbers={"peak_mb": None if context.vae_bytes is None else context.vae_bytes / MIB},
        necessary=asked == "auto",
    )


def _settled(kind: str, name: str, vae: nn.Module, switch: str, asked: object) -> NotTaken | None:
    if asked is False:
        return NotTaken(kind, name, "switched off")
    if not hasattr(vae, switch) or not hasattr(vae, switch.replace("use", "enable", 1)):
        return NotTaken(kind, name, f"{type(vae).__name__} does not offer it")
    if getattr(vae, switch) is True:
        return NotTaken(kind, name, "it is on already")
    return None


def _decoding_fits(context: PlanningContext, name: str, peak: int | None) -> bool | None:
    """None: not known."""
    room = context.available_bytes
    return None if peak is None or room is None else peak + _resident(context, name) <= room


def _resident(context: PlanningContext, name: str) -> int:
    """Weights that are on the device while the VAE works."""
    if not context.hardware.is_accelerator:
        return 0
    offloaded = any(choice.options.get("how") in ("model", "group") for choice in context.chosen)
    return context.weights.get(name, 0) if offloaded else context.total_bytes


def _fitting_words(context: PlanningContext, name: str, peak: int | None) -> str:
    if peak is None:
        return f"What decoding takes is not known: {context.unavailable.get('vae_mb', 'no reason is known')}."
    room = context.available_bytes
    if room is None:
        return f"Decoding takes about {units.mib(peak)} MB, and how much there is could not be read."
    return (
        f"Decoding takes about {units.mib(peak)} MB beside {units.mib(_resident(context, name))} MB of weights, "
        f"in {units.mib(room)} MB."
    )


def consider_tiling(context: PlanningContext, name: str, vae: nn.Module) -> Choice | NotTaken:
    """For an image whose decoding at once does not fit."""
    asked = context.config.vae_tiling
    refusal = _settled(TILING, name, vae, "use_tiling", asked)
    if refusal is not None:
        return refusal
    peak = vae_peak(context, batch_at_once=1).bytes if context.has(SLICING) else context.vae_bytes
    if asked == "auto":
        tile = tile_side(vae)
        if tile is not None and max(context.call.height, context.call.width) <= tile:
            return NotTaken(TILING, name, f"an image of this size is one tile of {tile} pixels")
        if _decoding_fits(context, name, peak) is not False:
            return NotTaken(TILING, name, _fitting_words(context, name, peak))
    return Choice(
        TILING,
        name,
        f"pipe.{name}.enable_tiling()",
        _fitting_words(context, name, peak),
        "the memory of one tile; seams are blended, and colours may shift between tiles",
        "memory",
        "approximation",
        numbers={"peak_mb": None if peak is None else peak / MIB},
        necessary=asked == "auto",
    )


def apply_slicing(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    model_of(pipeline, choice).enable_slicing()


def apply_tiling(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    model_of(pipeline, choice).enable_tiling()


SLICING_KIND: Final = Kind(SLICING, of_each("vae", consider_slicing), apply_slicing)
TILING_KIND: Final = Kind(TILING, of_each("vae", consider_tiling), apply_tiling)


PRECISION: Final = "precision"
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDER: Final = (torch.float32, torch.float64)
_KEEPS_FLOAT32: Final = ("AutoencoderKLWan",)
"""VAEs that their makers run in float32; WAN's pipelines convert latents for them."""
QUANTISATION: Final = "quantisation"
LAYERWISE_CASTING: Final = "layerwise_casting"
_NEVER_CAST: Final = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
"""What diffusers leaves as it is in any model, beside the patterns of each class."""
# Layers whose weights diffusers stores in float8.
_CAST_LAYERS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear, nn.Embedding,
)  # fmt: skip


def consider_precision(context: PlanningContext) -> Considered:
    """All models together: pipelines hand one's results to the next without converting them."""
    if context.config.dtype is None:
        yield NotTaken(PRECISION, PIPELINE, "switched off")
        return
    dtype = _dtype_for(context)
    if isinstance(dtype, NotTaken):
        yield dtype
        return
    asked = context.config.dtype != "auto"
    refusal = None if asked else context.too_much(PRECISION, PIPELINE, "precision")
    if refusal is not None:
        yield refusal
        return
    yield from _left_in_float32(context)
    names = [name for name in context.parts.models if _is_wide(context, name)]
    if not names:
        yield NotTaken(PRECISION, PIPELINE, f"nothing in it is wider than {dtype}{_emulated(context)}")
        return
    yield _half_precision(context, dtype, names)


def _dtype_for(context: PlanningContext) -> str | NotTaken:
    asked = context.config.dtype
    if asked is not None and asked != "auto":
        return asked
    hardware = context.hardware
    if hardware.multiplies_bfloat16():
        return "float16" if hardware.kind == "mps" else "bfloat16"
    if hardware.is_accelerator:
        return "float16"
    return NotTaken(
        PRECISION,
        PIPELINE,
        f"{context.no_accelerator}; and this CPU does not multiply bfloat16 (AMX, AVX512-BF16)",
    )


def _left_in_float32(context: PlanningContext) -> Iterator[NotTaken]:
    for name, model in context.parts.models.items():
        if type(model).__name__ in _KEEPS_FLOAT32 and main_dtype(model) in _WIDER:
            yield NotTaken(PRECISION, name, f"{type(model).__name__} is made to run in float32")


def _is_wide(context: PlanningContext, name: str) -> bool:
    return (
        context.dtypes.get(name) in _WIDER and type(context.parts.models[name]).__name__ not in _KEEPS_FLOAT32
    )


def _emulated(context: PlanningContext) -> str:
    """What to know of bfloat16 weights on a device that does not multiply them."""
    if context.hardware.multiplies_bfloat16() or torch.bfloat16 not in context.dtypes.values():
        return ""
    return "; bfloat16 is slow on this device, and float16's range may be too small: compare images before loading in it"


def _half_precision(context: PlanningContext, dtype: str, names: list[str]) -> Choice:
    before = context.total_bytes
    target = DTYPES[dtype]
    for name in names:
        model = context.parts.models[name]
        narrowed = {id(tensor): tensor for tensor in narrowed_tensors(model, target)}
        context.weights[name] = nbytes_of(model) - sum(t.nbytes - t.numel() * 2 for t in narrowed.values())
        context.dtypes[name] = target
    kept = sum(nbytes_of(context.parts.models[name]) for name in names)
    saved = before - context.total_bytes
    return Choice(
        PRECISION,
        PIPELINE,
        f"from_pretrained(…, torch_dtype=torch.{dtype}) for {', '.join(names)}",
        f"{units.mib(before)} MB of weights become {units.mib(context.total_bytes)} MB.",
        f"{units.mib(saved)} MB less, and {_speed(context)}",
        "speed",
        "precision",
        {"dtype": dtype, "components": ",".join(names)},
        {"mb_before": before / MIB, "mb_after": context.total_bytes / MIB},
        ram_mb=kept / MIB,
    )


def narrowed_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensors of a model that are of another dtype when it is loaded in this one."""
    kept = _kept_wide(model, dtype)
    for path, part in model.named_modules():
        buffers = {n: b for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set}
        for name, tensor in (*part._parameters.items(), *buffers.items()):
            if (
                tensor is None
                or not tensor.is_floating_point()
                or tensor.dtype == dtype
                or tensor.itemsize < 2
            ):
                continue
            if not kept.intersection((*path.split("."), name)):
                yield tensor


def _kept_wide(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parts of names that stay in float32: diffusers' models say so for both dtypes, transformers' apart for float16."""
    own = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    is_transformers = type(model).__module__.startswith("transformers.")
    kept = [] if is_transformers and dtype is torch.bfloat16 else own
    return {*kept, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}


def _speed(context: PlanningContext) -> str:
    if context.hardware.multiplies_bfloat16():
        return "products that the device multiplies faster than float32's"
    return (
        "no faster products: this device is not made for it"
        if not context.hardware.is_accelerator
        else "half the traffic"
    )


def apply_precision(pipeline: Any, choice: Choice) -> None:
    """Narrow weights as loading in that dtype would: some layers stay, and so do tables that are not saved."""
    dtype = DTYPES[str(choice.options["dtype"])]
    models = models_of(pipeline)
    for name in str(choice.options["components"]).split(","):
        for tensor in narrowed_tensors(models[name], dtype):
            tensor.data = tensor.data.to(dtype)


PRECISION_KIND: Final = Kind(
    PRECISION, consider_precision, apply_precision, frozenset({"dtype"}), narrows=True
)


def consider_quantisation(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    """On request, or ("auto") where a denoiser does not fit by itself."""
    asked = context.config.quantisation
    if asked is None:
        return NotTaken(QUANTISATION, name, "switched off")
    if find_spec("torchao") is None:
        return NotTaken(QUANTISATION, name, "torchao is not installed (pip install torchao)")
    if is_quantised(model):
        return NotTaken(QUANTISATION, name, "it is quantised already")
    if asked == "auto":
        refusal = context.why_not(QUANTISATION, name, "precision") or _fits_unquantised(context, name)
        if refusal is not None:
            return refusal
    return _quantisation_choice(context, name, model, "int8" if asked == "auto" else asked)


def is_quantised(model: nn.Module) -> bool:
    """Whether torchao or bitsandbytes hold some of a model's weights."""
    return any(type(p).__module__.startswith(("torchao", "bitsandbytes")) for p in model.parameters())


def _fits_unquantised(context: PlanningContext, name: str) -> NotTaken | None:
    room = context.room_bytes
    if room is None or context.weights[name] + context.work_bytes <= room:
        return NotTaken(QUANTISATION, name, "it fits by itself, as far as is known")
    return None


def _quantisation_choice(context: PlanningContext, name: str, model: nn.Module, to: str) -> Choice:
    before, itemsize = context.weights[name], context.dtypes[name].itemsize
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    context.weights[name] = before - linear * (itemsize - 1)
    config = _torchao_config(context, to)
    return Choice(
        QUANTISATION,
        name,
        f"torchao.quantization.quantize_(pipe.{name}, {config}())",
        f"{units.mib(before)} MB of weights become about {units.mib(context.weights[name])} MB.",
        "memory"
        + (", and products in float8" if "Dynamic" in config else "; widening the weights costs time"),
        "memory",
        "precision",
        {"config": config},
        {"mb_before": before / MIB, "mb_after": context.weights[name] / MIB},
        necessary=context.config.quantisation == "auto",
        ram_mb=nbytes_of(model) / MIB,
    )


def _torchao_config(context: PlanningContext, to: str) -> str:
    if to == "int8":
        return "Int8WeightOnlyConfig"
    return (
        "Float8DynamicActivationFloat8WeightConfig"
        if context.hardware.multiplies_float8()
        else "Float8WeightOnlyConfig"
    )


def apply_quantisation(pipeline: Any, choice: Choice) -> None:
    """Replace the weights of linear layers."""
    quantisation = importlib.import_module("torchao.quantization")
    config = getattr(quantisation, str(choice.options["config"]))()
    quantisation.quantize_(model_of(pipeline, choice), config)


QUANTISATION_KIND: Final = Kind(
    QUANTISATION,
    of_each("denoiser", consider_quantisation),
    apply_quantisation,
    frozenset({"dtype", "device"}),
    narrows=True,
)


def consider_layerwise_casting(context: PlanningContext, name: str, model: nn.Module) -> Choice | NotTaken:
    """Where a denoiser does not fit on the device by itself."""
    asked = context.config.layerwise_casting
    if asked is False:
        return NotTaken(LAYERWISE_CASTING, name, "switched off")
    if not hasattr(model, "enable_layerwise_casting"):
        return NotTaken(LAYERWISE_CASTING, name, f"{type(model).__name__} does not offer it")
    if layerwise_casting(model):
        return NotTaken(LAYERWISE_CASTING, name, "it is on already")
    if context.has("quantisation"):
        return NotTaken(LAYERWISE_CASTING, name, "the weights are quantised")
    if asked == "auto":
        refusal = context.why_not(LAYERWISE_CASTING, name, "precision") or _casting_not_needed(
            context, name, model
        )
        if refusal is not None:
            return refusal
    return _casting_choice(context, name, model)


def _casting_not_needed(context: PlanningContext, name: str, model: nn.Module) -> NotTaken | None:
    nbytes, room = context.weights[name], context.room_bytes
    if room is None:
        return NotTaken(
            LAYERWISE_CASTING, name, f"how much memory {context.hardware.device} has is not known"
        )
    if nbytes + context.work_bytes <= room:
        words = f"{units.mib(nbytes)} MB of weights and {units.mib(context.work_bytes)} MB at work are in {units.mib(room)} MB"
        return NotTaken(LAYERWISE_CASTING, name, f"it fits by itself: {words}")
    cast = nbytes - saved_bytes(model, _itemsize_precision(context, name))
    if cast + context.work_bytes > room:
        words = f"{units.mib(cast)} MB of weights and {units.mib(context.work_bytes)} MB at work, in {units.mib(room)} MB"
        return NotTaken(LAYERWISE_CASTING, name, f"it would not fit even so: {words}")
    return None


def saved_bytes(model: nn.Module, itemsize: int) -> int:
    """Bytes that a model's layers lose by casting; diffusers leaves embeddings of place and norms as they are."""
    own = getattr(model, "_skip_layerwise_casting_patterns", None) or ()
    skipped = (*_NEVER_CAST, *own, *(getattr(model, "_keep_in_fp32_modules", None) or ()))
    layers = [
        layer
        for path, layer in model.named_modules()
        if isinstance(layer, _CAST_LAYERS)
        and not any(re.search(pattern, part) for part in _prefixes(path) for pattern in skipped)
    ]
    return sum(p.numel() * (itemsize - 1) for layer in layers for p in layer.parameters(recurse=False))


def _prefixes(path: str) -> list[str]:
    """A module's path and those of the modules around it."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _itemsize_precision(context: PlanningContext, name: str) -> int:
    return context.dtypes.get(name, torch.float32).itemsize


def _casting_choice(context: PlanningContext, name: str, model: nn.Module) -> Choice:
    compute = str(context.dtypes.get(name, torch.float32)).removeprefix("torch.")
    before = context.weights[name]
    context.weights[name] = before - saved_bytes(model, _itemsize_precision(context, name))
    return Choice(
        LAYERWISE_CASTING,
        name,
        f"pipe.{name}.enable_layerwise_casting(torch.float8_e4m3fn, torch.{compute})",
        f"{units.mib(before)} MB of weights become about {units.mib(context.weights[name])} MB.",
        "memory; a few per cent of time for widening",
        "memory",
        "precision",
        {},
        {"mb_before": before / MIB, "mb_after": context.weights[name] / MIB},
        necessary=context.config.layerwise_casting == "auto",
        ram_mb=nbytes_of(model) / MIB,
    )


def apply_layerwise_casting(pipeline: Any, choice: Choice) -> None:
    """Cast, and hook each layer to widen and narrow its weights around its call."""
    model = model_of(pipeline, choice)
    compute = main_dtype(
        model
    )  # as it is now: a measurement may have dropped the choice that was to change it
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=compute)


LAYERWISE_CASTING_KIND: Final = Kind(
    LAYERWISE_CASTING,
    of_each("denoiser", consider_layerwise_casting),
    apply_layerwise_casting,
    frozenset({"dtype"}),
    narrows=True,
)
