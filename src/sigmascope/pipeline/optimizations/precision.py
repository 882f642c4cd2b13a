"""Narrower weights: half precision, linear layers in int8 or float8 (torchao), storage in float8.

Stored in float8, the denoiser's weights are widened layer by layer as they are used (layerwise casting).
"""

import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope import units
from sigmascope.pipeline.optimizations.memory import main_dtype, nbytes_of
from sigmascope.pipeline.plan import (
    PIPELINE,
    Choice,
    Considered,
    Kind,
    NotTaken,
    PlanningContext,
    model_of,
    models_of,
    of_each,
)
from sigmascope.probes.models import layerwise_casting
from sigmascope.records.memory import MIB

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
    cast = nbytes - saved_bytes(model, _itemsize(context, name))
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


def _itemsize(context: PlanningContext, name: str) -> int:
    return context.dtypes.get(name, torch.float32).itemsize


def _casting_choice(context: PlanningContext, name: str, model: nn.Module) -> Choice:
    compute = str(context.dtypes.get(name, torch.float32)).removeprefix("torch.")
    before = context.weights[name]
    context.weights[name] = before - saved_bytes(model, _itemsize(context, name))
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
