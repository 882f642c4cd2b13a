"""What lets a pipeline fit: narrower weights, where weights are, and VAE slicing and tiling.

What a call takes is worked out from shapes and configurations before anything runs. Weights are narrowed to half
precision, linear layers to int8 or float8 (torchao); or the denoiser's are stored in float8 and widened layer by layer
as they are used (layerwise casting). They are on the device, or in RAM while they are not at work. A VAE that decodes
image by image, or tile by tile, needs less at once.
"""

import importlib
import math
import re
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Final

import torch
from packaging.version import Version
from torch import Tensor, nn

from sigmascope import units
from sigmascope.installation import install_packages
from sigmascope.pipeline.optimization_plan import (
    PIPELINE,
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
    consider_each,
    consider_pipeline,
    model_of,
    models_of,
    planned_call,
    spatial_factor,
)
from sigmascope.pipeline.peak_prediction import Planned, Prediction, predict_peak
from sigmascope.probes.accelerators import has_streams
from sigmascope.probes.models import layerwise_casting
from sigmascope.probes.reading import attempt
from sigmascope.records.memory import MIB, mib
from sigmascope.records.run import JsonScalar

_TENSORS_IN_A_TRANSFORMER: Final = 14
"""As wide as the model, alive at once in a block: residual, its norm, query, key, value, attention's output, and the
feed-forward's hidden layer, which is four times as wide, before and after its activation. A rough count."""
_TENSORS_IN_A_UNET: Final = 40
"""The same for a UNet, in maps of its first level: the skips that wait, and a ResNet's or a transformer's in work."""
_TEXT_TOKENS: Final = 512
_TEMPORAL_FACTOR: Final = 4
"""Frames of a video for each frame of its latent, after the first."""


def context_of(parts: PipelineParts, hardware: Hardware, config: OptimizationConfig) -> PlanningContext:
    """What each kind of choice starts from."""
    call = planned_call(parts, config.height, config.width, config.num_frames, config.batch_size)
    dtypes = {
        name: dtype for name, model in parts.models.items() if (dtype := _main_dtype(model)) is not None
    }
    context = PlanningContext(
        parts,
        hardware,
        config,
        call,
        room_bytes=_room(parts, hardware, config),
        dtypes=dtypes,
        weights={name: _nbytes_of(model) for name, model in parts.models.items()},
    )
    if context.room_bytes is None:
        context.unavailable["room_mb"] = hardware.absence or "the device's memory is not known"
    return context


def _main_dtype(model: nn.Module) -> torch.dtype | None:
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
    free = hardware.total_bytes
    if hardware.free_bytes is not None:
        own = sum(_nbytes_of(model, hardware.device) for model in parts.models.values())
        free = min(hardware.free_bytes + own, free)
    return max(0, int(free - config.headroom * hardware.total_bytes))


def _nbytes_of(model: nn.Module, device: str | None = None) -> int:
    """Bytes of weights and buffers, of those on a device if one is given."""
    tensors = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors if device in (None, str(tensor.device)))


def estimate_work(context: PlanningContext) -> None:
    """Estimate activations with the dtypes planned so far."""
    counts = [
        _denoiser_bytes(context, name, model) for name, model in context.parts.of_role("denoiser").items()
    ]
    context.denoiser_bytes = max((count for count in counts if count is not None), default=None)
    if context.denoiser_bytes is None:
        context.unavailable["denoiser_mb"] = "the denoiser's configuration does not say its width"
    predicted = _vae_peak(context)
    context.vae_bytes = predicted.bytes
    if predicted.bytes is None:
        context.unavailable["vae_mb"] = predicted.unavailable.get("bytes", "there is no VAE")
    # The same with whatever the VAE offers to need less, as far as the configuration allows it.
    config = context.config
    vae = next(iter(context.parts.of_role("vae").values()), None)
    sliced = 1 if config.vae_slicing is not False and hasattr(vae, "use_slicing") else None
    side = None if vae is None or config.vae_tiling is False else _tile_side(vae)
    context.least_vae_bytes = _vae_peak(context, batch_at_once=sliced, largest_side=side).bytes


def _denoiser_bytes(context: PlanningContext, name: str, model: nn.Module) -> int | None:
    """Activations of one call of a denoiser, roughly. None: its configuration does not tell."""
    call, factor = context.call, spatial_factor(context.parts)
    frames = 1 + (call.num_frames - 1) // _TEMPORAL_FACTOR
    elements = frames * math.ceil(call.height / factor) * math.ceil(call.width / factor)
    nbytes = call.batch_size * call.branches * _itemsize(context, name)
    channels = config_value(model, "block_out_channels")
    if isinstance(channels, list | tuple) and channels:
        return _TENSORS_IN_A_UNET * elements * int(channels[0]) * nbytes
    heads, head = config_value(model, "num_attention_heads"), config_value(model, "attention_head_dim")
    width: Any = config_value(model, "hidden_size") or config_value(model, "inner_dim")
    if isinstance(heads, int) and isinstance(head, int):
        width = heads * head
    if not isinstance(width, int):
        return None
    # Patches of 2 × 2, which all of them have, and the text beside them.
    tokens = elements // 4 + _TEXT_TOKENS
    return _TENSORS_IN_A_TRANSFORMER * tokens * width * nbytes


def _itemsize(context: PlanningContext, name: str) -> int:
    return context.dtypes.get(name, torch.float32).itemsize


def _vae_peak(
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
        return Prediction(unavailable={"bytes": "the VAE's configuration does not say its latent channels"})
    factor, call = spatial_factor(context.parts), context.call
    is_video = config_value(vae, "z_dim") is not None
    frames = (1 + (call.num_frames - 1) // _TEMPORAL_FACTOR,) if is_video else ()
    sides = (min(side, largest_side or side) // factor for side in (call.height, call.width))
    planned = Planned(
        (call.batch_size, channels, *frames, *sides),
        "decoding",
        dtype=context.dtypes.get(name),
        device_type=context.hardware.kind,
        batch_at_once=batch_at_once,
    )
    read = attempt(lambda: predict_peak(vae, planned))
    return read.value or Prediction(unavailable={"bytes": read.reason or "it failed"})


def _tile_side(vae: nn.Module) -> int | None:
    """Side of a VAE's tiles in pixels, by any of the names that diffusers has for it; None: it has no tiles."""
    names = ("tile_sample_min_size", "tile_sample_min_height", "tile_sample_min_width")
    sides = (getattr(vae, name, None) for name in names)
    return next((side for side in sides if isinstance(side, int)), None)


def memory_estimate(context: PlanningContext) -> Reckoning:
    """The estimates, for the plan."""
    now = {name: _nbytes_of(model) for name, model in context.parts.models.items()}
    return Reckoning(
        {name: nbytes / MIB for name, nbytes in now.items()},
        {name: nbytes / MIB for name, nbytes in context.weights.items()},
        mib(context.denoiser_bytes),
        mib(context.vae_bytes),
        mib(context.room_bytes),
        dict(context.unavailable),
    )


PRECISION: Final = "precision"
_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDER: Final = (torch.float32, torch.float64)
_KEEPS_FLOAT32: Final = ("AutoencoderKLWan",)
"""VAEs that their makers run in float32; WAN's pipelines convert latents for them."""


def consider_precision(context: PlanningContext) -> Considered:
    """All models together: pipelines hand one's results to the next without converting them."""
    asked, hardware = context.config.dtype, context.hardware
    refusal: str | None = None
    dtype: str = asked or ""
    if asked is None:
        refusal = "switched off"
    elif asked == "auto":
        if not hardware.is_accelerator and not hardware.multiplies_bfloat16():
            refusal = (
                f"{context.no_accelerator}; and this CPU has no instructions for bfloat16 (AMX, AVX512-BF16)"
            )
        refusal = refusal or context.too_much("precision")
        dtype = "bfloat16" if hardware.multiplies_bfloat16() and hardware.kind != "mps" else "float16"
    if refusal is not None:
        yield NotTaken(PRECISION, PIPELINE, refusal)
        return
    names: list[str] = []
    for name, model in context.parts.models.items():
        if context.dtypes.get(name) not in _WIDER:
            continue
        if type(model).__name__ in _KEEPS_FLOAT32:
            yield NotTaken(PRECISION, name, f"{type(model).__name__} is meant to run in float32")
        else:
            names.append(name)
    if names:
        yield _half_precision(context, dtype, names)
        return
    reason = f"nothing in it is wider than {dtype}"
    if not hardware.multiplies_bfloat16() and torch.bfloat16 in context.dtypes.values():
        reason += "; bfloat16 is slow on this device, and float16's range may be too small: compare images before you load in float16"
    yield NotTaken(PRECISION, PIPELINE, reason)


def _half_precision(context: PlanningContext, dtype: str, names: list[str]) -> Choice:
    before = context.total_bytes
    target = _DTYPES[dtype]
    for name in names:
        model = context.parts.models[name]
        narrowed = {id(tensor): tensor for tensor in _narrowed_tensors(model, target)}
        context.weights[name] = _nbytes_of(model) - sum(t.nbytes - t.numel() * 2 for t in narrowed.values())
        context.dtypes[name] = target
    kept = sum(_nbytes_of(context.parts.models[name]) for name in names)
    after = context.total_bytes
    if context.hardware.multiplies_bfloat16():
        speed = "faster matrix products than in float32"
    elif context.hardware.is_accelerator:
        speed = "half the traffic"
    else:
        speed = "no faster products: this device has no instructions for it"
    return Choice(
        PRECISION,
        PIPELINE,
        f"from_pretrained(…, torch_dtype=torch.{dtype}) for {', '.join(names)}",
        f"{units.mib(before)} MB of weights become {units.mib(after)} MB.",
        f"{units.mib(before - after)} MB less, and {speed}",
        "speed",
        "precision",
        {"dtype": dtype, "components": ",".join(names)},
        {"mb_before": before / MIB, "mb_after": after / MIB},
        ram_mb=kept / MIB,
    )


def _narrowed_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensors of a model that are of another dtype when it is loaded in this one."""
    kept = _kept_wide(model, dtype)
    for path, part in model.named_modules():
        buffers = {n: b for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set}
        for name, tensor in (*part._parameters.items(), *buffers.items()):
            if tensor is None or kept.intersection((*path.split("."), name)):
                continue
            if tensor.is_floating_point() and tensor.dtype != dtype and tensor.itemsize >= 2:
                yield tensor


def _kept_wide(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parts of names that stay in float32: diffusers' models say so for both dtypes, transformers' apart for float16."""
    own = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    is_transformers = type(model).__module__.startswith("transformers.")
    kept = [] if is_transformers and dtype is torch.bfloat16 else own
    return {*kept, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}


def apply_precision(pipeline: Any, choice: Choice) -> None:
    """Narrow weights as loading in that dtype would: some layers stay, and so do tables that are not saved."""
    dtype = _DTYPES[str(choice.options["dtype"])]
    models = models_of(pipeline)
    for name in str(choice.options["components"]).split(","):
        for tensor in _narrowed_tensors(models[name], dtype):
            tensor.data = tensor.data.to(dtype)


PRECISION_KIND: Final = Kind(
    PRECISION, consider_precision, apply_precision, frozenset({"dtype"}), narrows=True
)


QUANTISATION: Final = "quantisation"


def consider_quantisation(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    """On request, or ("auto") where a denoiser does not fit by itself."""
    asked, before, room = context.config.quantisation, context.weights[name], context.room_bytes
    if asked is None:
        return "switched off"
    if find_spec("torchao") is None:
        return f"torchao is not installed ({install_packages('torchao')})"
    if is_quantised(model):
        return "it is quantised already"
    if asked == "auto":
        refusal = context.why_not("precision")
        if refusal is not None:
            return refusal
        if room is None or before + context.work_bytes <= room:
            return "it fits as it is, as far as is known"
    config = "Float8WeightOnlyConfig" if asked == "float8" else "Int8WeightOnlyConfig"
    gain = "memory; widening the weights costs time"
    if asked == "float8" and context.hardware.multiplies_float8():
        config = "Float8DynamicActivationFloat8WeightConfig"
        gain = "memory, and products in float8"
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    after = context.weights[name] = before - linear * (_itemsize(context, name) - 1)
    return Choice(
        QUANTISATION,
        name,
        f"torchao.quantization.quantize_(pipe.{name}, {config}())",
        f"{units.mib(before)} MB of weights become about {units.mib(after)} MB.",
        gain,
        "memory",
        "precision",
        {"config": config},
        {"mb_before": before / MIB, "mb_after": after / MIB},
        necessary=asked == "auto",
        ram_mb=_nbytes_of(model) / MIB,
    )


def is_quantised(model: nn.Module) -> bool:
    """Whether torchao or bitsandbytes hold some of a model's weights."""
    return any(type(p).__module__.startswith(("torchao", "bitsandbytes")) for p in model.parameters())


def apply_quantisation(pipeline: Any, choice: Choice) -> None:
    """Replace the weights of linear layers."""
    quantisation = importlib.import_module("torchao.quantization")
    config = getattr(quantisation, str(choice.options["config"]))()
    quantisation.quantize_(model_of(pipeline, choice), config)


QUANTISATION_KIND: Final = Kind(
    QUANTISATION,
    consider_each(QUANTISATION, "denoiser", consider_quantisation),
    apply_quantisation,
    frozenset({"dtype", "device"}),
    narrows=True,
)


LAYERWISE_CASTING: Final = "layerwise_casting"
_NEVER_CAST: Final = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
"""What diffusers leaves as it is in any model, beside the patterns of each class."""
# Layers whose weights diffusers stores in float8.
_CAST_LAYERS: Final = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear, nn.Embedding,
)  # fmt: skip


def consider_layerwise_casting(context: PlanningContext, name: str, model: nn.Module) -> Choice | str:
    """Where a denoiser does not fit on the device by itself."""
    asked = context.config.layerwise_casting
    if asked is False:
        return "switched off"
    if not hasattr(model, "enable_layerwise_casting"):
        return f"{type(model).__name__} does not support it"
    if layerwise_casting(model):
        return "it is on already"
    if context.has(QUANTISATION):
        return "the weights are quantised"
    before = context.weights[name]
    after = before - _bytes_saved_by_casting(model, _itemsize(context, name))
    if asked == "auto":
        refusal = context.why_not("precision") or _casting_not_needed(context, before, after)
        if refusal is not None:
            return refusal
    context.weights[name] = after
    compute = str(context.dtypes.get(name, torch.float32)).removeprefix("torch.")
    return Choice(
        LAYERWISE_CASTING,
        name,
        f"pipe.{name}.enable_layerwise_casting(torch.float8_e4m3fn, torch.{compute})",
        f"{units.mib(before)} MB of weights become about {units.mib(after)} MB.",
        "memory; a few per cent of time for widening",
        "memory",
        "precision",
        {},
        {"mb_before": before / MIB, "mb_after": after / MIB},
        necessary=asked == "auto",
        ram_mb=_nbytes_of(model) / MIB,
    )


def _casting_not_needed(context: PlanningContext, before: int, after: int) -> str | None:
    room = context.room_bytes
    if room is None:
        return f"how much memory {context.hardware.device} has is not known"
    at_work = f"{units.mib(context.work_bytes)} MB at work"
    if before + context.work_bytes <= room:
        return f"it fits as it is: {units.mib(before)} MB of weights and {at_work}, in {units.mib(room)} MB"
    if after + context.work_bytes > room:
        return f"it would not fit even so: {units.mib(after)} MB of weights and {at_work}, in {units.mib(room)} MB"
    return None


def _bytes_saved_by_casting(model: nn.Module, itemsize: int) -> int:
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


def apply_layerwise_casting(pipeline: Any, choice: Choice) -> None:
    """Cast, and hook each layer to widen and narrow its weights around its call."""
    model = model_of(pipeline, choice)
    compute = _main_dtype(model)  # as it is now: a measurement may have dropped what was to change it
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=compute)


LAYERWISE_CASTING_KIND: Final = Kind(
    LAYERWISE_CASTING,
    consider_each(LAYERWISE_CASTING, "denoiser", consider_layerwise_casting),
    apply_layerwise_casting,
    frozenset({"dtype"}),
    narrows=True,
)


PLACEMENT: Final = "placement"
GROUP_HOOKS: Final = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""What diffusers calls the hooks of group offloading."""
_GROUPS_ON_CPU: Final = Version("0.41")


def consider_placement(context: PlanningContext) -> Choice | str:
    """On the device if all of it fits; else model by model; else layer by layer."""
    asked, pipeline = context.config.offload, context.parts.pipeline
    device, (largest, nbytes) = context.hardware.device, context.largest
    has_models = getattr(pipeline, "model_cpu_offload_seq", None) is not None
    has_groups = hasattr(pipeline, "enable_group_offload")
    already = [n for n, part in context.parts.facts.components.items() if part.offload is not None]
    if already:
        return f"{', '.join(already)}: weights are offloaded already"
    if asked == "model" and has_models:
        return _model_offload(context, "Asked for.", necessary=False)
    if asked == "group" and has_groups:
        return _why_no_groups(context) or _group_offload(context, "Asked for.", necessary=False)
    if asked in ("model", "group"):
        return f"this pipeline has no {asked} offloading"
    if not context.hardware.is_accelerator:
        return context.no_accelerator
    if context.room_bytes is None:
        return f"how much memory {device} has is not known"
    if not hasattr(pipeline, "to"):
        return "it cannot be moved as a whole: it has no `to`"
    all_of_it = _sum_in_words(context, context.total_bytes)
    if context.total_bytes + context.work_bytes <= context.room_bytes:
        return _on_device(context, all_of_it)
    if asked is None:
        return f"offloading is switched off. {all_of_it}"
    if nbytes + context.work_bytes <= context.room_bytes and has_models:
        return _model_offload(context, f"The weights do not fit all at once: {all_of_it}", necessary=True)
    reason = f"{largest} alone does not fit: {_sum_in_words(context, nbytes)}"
    if has_groups:
        return _group_offload(context, reason, necessary=True)
    return f"{reason} This pipeline has no group offloading."


def _why_no_groups(context: PlanningContext) -> str | None:
    """Why the diffusers that is installed cannot move groups of layers, or None."""
    diffusers = attempt(lambda: metadata.version("diffusers")).value
    if diffusers is None or context.hardware.is_accelerator or Version(diffusers) >= _GROUPS_ON_CPU:
        return None
    return f"group offloading in diffusers {diffusers} needs an accelerator; from {_GROUPS_ON_CPU} on it does not"


def _sum_in_words(context: PlanningContext, nbytes: int) -> str:
    return (
        f"{units.mib(nbytes)} MB of weights and about {units.mib(context.work_bytes)} MB at work, "
        f"in {units.mib(context.room_bytes)} MB."
    )


def _numbers(context: PlanningContext, nbytes: int) -> dict[str, JsonScalar]:
    return {
        "weights_mb": nbytes / MIB,
        "work_mb": context.work_bytes / MIB,
        "room_mb": mib(context.room_bytes),
    }


def _on_device(context: PlanningContext, all_of_it: str) -> Choice | str:
    device = context.hardware.device
    if all(str(p.device) == device for model in context.parts.models.values() for p in model.parameters()):
        return f"it is on {device} already, and fits. {all_of_it}"
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.to("{device}")',
        f"All of it fits. {all_of_it}",
        "nothing moves while it runs",
        "speed",
        "rounding",
        {"device": device, "how": "device"},
        _numbers(context, context.total_bytes),
    )


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


def _group_offload(context: PlanningContext, reason: str, *, necessary: bool) -> Choice:
    device = context.hardware.device
    use_stream = has_streams(context.hardware.kind)
    options: dict[str, JsonScalar] = {"offload_type": "leaf_level", "use_stream": use_stream}
    if use_stream:
        ram = context.hardware.ram_available_bytes
        # Whether page-locked copies of all weights would take what RAM there is.
        options["low_cpu_mem_usage"] = ram is not None and ram < 1.5 * context.total_bytes
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.enable_group_offload(onload_device=torch.device("{device}"){arguments})',
        reason,
        "only a few layers on the device at a time; copying overlaps with computing as far as possible",
        "memory",
        "none",
        {"device": device, "how": "group", **options},
        _numbers(context, 0),
        necessary,
    )


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


PLACEMENT_KIND: Final = Kind(
    PLACEMENT, consider_pipeline(PLACEMENT, consider_placement), apply_placement, frozenset({"device"})
)


SLICING: Final = "vae_slicing"
TILING: Final = "vae_tiling"


def consider_slicing(context: PlanningContext, name: str, vae: nn.Module) -> Choice | str:
    """For several images whose decoding at once does not fit."""
    asked, batch, peak = context.config.vae_slicing, context.call.batch_size, context.vae_bytes
    refusal = _settled(vae, "use_slicing", asked)
    if refusal is not None:
        return refusal
    fits, words = _decoding_fits(context, name, peak)
    if asked == "auto" and batch == 1:
        return "one image at a time is planned"
    if asked == "auto" and fits:
        return words
    return Choice(
        SLICING,
        name,
        f"pipe.{name}.enable_slicing()",
        f"{batch} images are decoded at once. {words}",
        "the memory of one image; a little time",
        "memory",
        "rounding",
        numbers={"peak_mb": mib(peak)},
        necessary=asked == "auto",
    )


def _settled(vae: nn.Module, switch: str, asked: object) -> str | None:
    if asked is False:
        return "switched off"
    if not hasattr(vae, switch) or not hasattr(vae, switch.replace("use", "enable", 1)):
        return f"{type(vae).__name__} does not support it"
    return "it is on already" if getattr(vae, switch) is True else None


def _decoding_fits(context: PlanningContext, name: str, peak: int | None) -> tuple[bool, str]:
    """Whether it does as far as is known, and the numbers behind it."""
    if peak is None:
        reason = context.unavailable.get("vae_mb", "no reason is known")
        return True, f"How much memory decoding takes is unknown: {reason}."
    room = context.available_bytes
    if room is None:
        return True, f"Decoding takes about {units.mib(peak)} MB; how much is free could not be read."
    resident = 0  # weights that are on the device while the VAE works
    if context.hardware.is_accelerator:
        offloaded = any(choice.options.get("how") in ("model", "group") for choice in context.chosen)
        resident = context.weights.get(name, 0) if offloaded else context.total_bytes
    words = (
        f"Decoding takes about {units.mib(peak)} MB beside {units.mib(resident)} MB of weights, "
        f"in {units.mib(room)} MB."
    )
    return peak + resident <= room, words


def consider_tiling(context: PlanningContext, name: str, vae: nn.Module) -> Choice | str:
    """For an image whose decoding at once does not fit."""
    asked = context.config.vae_tiling
    refusal = _settled(vae, "use_tiling", asked)
    if refusal is not None:
        return refusal
    peak = _vae_peak(context, batch_at_once=1).bytes if context.has(SLICING) else context.vae_bytes
    fits, words = _decoding_fits(context, name, peak)
    if asked == "auto":
        tile = _tile_side(vae)
        if tile is not None and max(context.call.height, context.call.width) <= tile:
            return f"an image of this size is one tile of {tile} pixels"
        if fits:
            return words
    return Choice(
        TILING,
        name,
        f"pipe.{name}.enable_tiling()",
        words,
        "the memory of one tile; seams are blended, and colours may shift between tiles",
        "memory",
        "approximation",
        numbers={"peak_mb": mib(peak)},
        necessary=asked == "auto",
    )


def apply_slicing(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    model_of(pipeline, choice).enable_slicing()


def apply_tiling(pipeline: Any, choice: Choice) -> None:
    """Switch it on."""
    model_of(pipeline, choice).enable_tiling()


SLICING_KIND: Final = Kind(SLICING, consider_each(SLICING, "vae", consider_slicing), apply_slicing)
TILING_KIND: Final = Kind(TILING, consider_each(TILING, "vae", consider_tiling), apply_tiling)
