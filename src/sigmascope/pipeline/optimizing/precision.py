"""Weights in half precision."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from sigmascope import units
from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import PIPELINE, Choice, NotTaken
from sigmascope.pipeline.optimizing.reckoning import main_dtype, nbytes_of
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.records.arithmetic import MIB

PRECISION: Final = "precision"
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_WIDER: Final = (torch.float32, torch.float64)
_STAYS: Final = ("AutoencoderKLWan",)
"""VAEs that their makers run in float32; WAN's pipelines convert latents for them."""


def consider_precision(found: Circumstances) -> Considered:
    """All models together: pipelines hand one's results to the next without converting them."""
    if found.config.dtype is None:
        yield NotTaken(PRECISION, PIPELINE, "switched off")
        return
    dtype = _dtype_for(found)
    if isinstance(dtype, NotTaken):
        yield dtype
        return
    asked = found.config.dtype != "auto"
    refusal = None if asked else found.too_much(PRECISION, PIPELINE, "precision")
    if refusal is not None:
        yield refusal
        return
    yield from _stay(found)
    names = [name for name in found.subject.models if _is_wide(found, name)]
    if not names:
        yield NotTaken(PRECISION, PIPELINE, f"nothing in it is wider than {dtype}{_emulated(found)}")
        return
    yield _half_precision(found, dtype, names)


def apply_precision(pipeline: Any, choice: Choice) -> None:
    """Narrow weights as loading in that dtype would: some layers stay, and so do tables that are not saved."""
    dtype = DTYPES[str(choice.options["dtype"])]
    models = models_of(pipeline)
    for name in str(choice.options["components"]).split(","):
        for tensor in narrowed_tensors(models[name], dtype):
            tensor.data = tensor.data.to(dtype)


def narrowed_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[Tensor]:
    """The tensors of a model that are of another dtype when it is loaded in this one.

    Args:
        model: A model of diffusers or transformers.
        dtype: bfloat16 or float16.
    """
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


def _dtype_for(found: Circumstances) -> str | NotTaken:
    asked = found.config.dtype
    if asked is not None and asked != "auto":
        return asked
    hardware = found.hardware
    if hardware.multiplies_bfloat16():
        return "float16" if hardware.kind == "mps" else "bfloat16"
    if hardware.is_accelerator:
        return "float16"
    return NotTaken(
        PRECISION,
        PIPELINE,
        f"{found.no_accelerator}; and this CPU does not multiply bfloat16 (AMX, AVX512-BF16)",
    )


def _is_wide(found: Circumstances, name: str) -> bool:
    return found.dtypes.get(name) in _WIDER and type(found.subject.models[name]).__name__ not in _STAYS


def _stay(found: Circumstances) -> Iterator[NotTaken]:
    for name, model in found.subject.models.items():
        if type(model).__name__ in _STAYS and main_dtype(model) in _WIDER:
            yield NotTaken(PRECISION, name, f"{type(model).__name__} is made to run in float32")


def _emulated(found: Circumstances) -> str:
    """What to know of bfloat16 weights on a device that does not multiply them."""
    if found.hardware.multiplies_bfloat16() or torch.bfloat16 not in found.dtypes.values():
        return ""
    return "; bfloat16 is slow on this device, and float16's range may be too small: compare images before loading in it"


def _half_precision(found: Circumstances, dtype: str, names: list[str]) -> Choice:
    before = found.total_bytes
    target = DTYPES[dtype]
    for name in names:
        model = found.subject.models[name]
        narrowed = {id(tensor): tensor for tensor in narrowed_tensors(model, target)}
        found.weights[name] = nbytes_of(model) - sum(t.nbytes - t.numel() * 2 for t in narrowed.values())
        found.dtypes[name] = target
    kept = sum(nbytes_of(found.subject.models[name]) for name in names)
    saved = before - found.total_bytes
    return Choice(
        PRECISION,
        PIPELINE,
        f"from_pretrained(…, torch_dtype=torch.{dtype}) for {', '.join(names)}",
        f"{units.mib(before)} MB of weights become {units.mib(found.total_bytes)} MB.",
        f"{units.mib(saved)} MB less, and {_speed(found)}",
        "speed",
        "precision",
        {"dtype": dtype, "components": ",".join(names)},
        {"mb_before": before / MIB, "mb_after": found.total_bytes / MIB},
        ram_mb=kept / MIB,
    )


def _speed(found: Circumstances) -> str:
    if found.hardware.multiplies_bfloat16():
        return "products that the device multiplies faster than float32's"
    return (
        "no faster products: this device is not made for it"
        if not found.hardware.is_accelerator
        else "half the traffic"
    )


def _kept_wide(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Parts of names that stay in float32: diffusers' models say so for both dtypes, transformers' apart for float16."""
    own = list(getattr(model, "_keep_in_fp32_modules", None) or ())
    is_transformers = type(model).__module__.startswith("transformers.")
    kept = [] if is_transformers and dtype is torch.bfloat16 else own
    return {*kept, *(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}


PRECISION_KIND: Final = Kind(
    PRECISION, consider_precision, apply_precision, frozenset({"dtype"}), narrows=True
)
