"""Linear layers in eight bits, by torchao."""

import importlib
from importlib.util import find_spec
from typing import Any, Final

from torch import nn

from sigmascope import units
from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.reckoning import nbytes_of
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.records.arithmetic import MIB

QUANTISATION: Final = "quantisation"


def consider_quantisation(found: Circumstances) -> Considered:
    """On request, or ("auto") where a denoiser does not fit by itself."""
    for name, model in found.subject.of_role("denoiser").items():
        yield _quantisation_of(found, name, model)


def apply_quantisation(pipeline: Any, choice: Choice) -> None:
    """Replace the weights of linear layers."""
    quantisation = importlib.import_module("torchao.quantization")
    config = getattr(quantisation, str(choice.options["config"]))()
    quantisation.quantize_(models_of(pipeline)[choice.component], config)


def is_quantised(model: nn.Module) -> bool:
    """Whether torchao or bitsandbytes hold some of a model's weights."""
    return any(type(p).__module__.startswith(("torchao", "bitsandbytes")) for p in model.parameters())


def _quantisation_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.quantisation
    if asked is None:
        return NotTaken(QUANTISATION, name, "switched off")
    if find_spec("torchao") is None:
        return NotTaken(QUANTISATION, name, "torchao is not installed (pip install torchao)")
    if is_quantised(model):
        return NotTaken(QUANTISATION, name, "it is quantised already")
    if asked == "auto":
        refusal = found.why_not(QUANTISATION, name, "precision") or _fits_unquantised(found, name)
        if refusal is not None:
            return refusal
    return _quantisation_choice(found, name, model, "int8" if asked == "auto" else asked)


def _fits_unquantised(found: Circumstances, name: str) -> NotTaken | None:
    room = found.room_bytes
    if room is None or found.weights[name] + found.work_bytes <= room:
        return NotTaken(QUANTISATION, name, "it fits by itself, as far as is known")
    return None


def _quantisation_choice(found: Circumstances, name: str, model: nn.Module, to: str) -> Choice:
    before, itemsize = found.weights[name], found.dtypes[name].itemsize
    linear = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    found.weights[name] = before - linear * (itemsize - 1)
    config = _torchao_config(found, to)
    return Choice(
        QUANTISATION,
        name,
        f"torchao.quantization.quantize_(pipe.{name}, {config}())",
        f"{units.mib(before)} MB of weights become about {units.mib(found.weights[name])} MB.",
        "memory"
        + (", and products in float8" if "Dynamic" in config else "; widening the weights costs time"),
        "memory",
        "precision",
        {"config": config},
        {"mb_before": before / MIB, "mb_after": found.weights[name] / MIB},
        necessary=found.config.quantisation == "auto",
        ram_mb=nbytes_of(model) / MIB,
    )


def _torchao_config(found: Circumstances, to: str) -> str:
    if to == "int8":
        return "Int8WeightOnlyConfig"
    return (
        "Float8DynamicActivationFloat8WeightConfig"
        if found.hardware.multiplies_float8()
        else "Float8WeightOnlyConfig"
    )


QUANTISATION_KIND: Final = Kind(
    QUANTISATION, consider_quantisation, apply_quantisation, frozenset({"dtype", "device"}), narrows=True
)
