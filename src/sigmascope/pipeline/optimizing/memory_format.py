"""Convolutions with channels last, as tensor cores read them."""

from typing import Any, Final

import torch
from torch import nn

from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.kind import Considered, Kind
from sigmascope.pipeline.optimizing.plan import Choice, NotTaken
from sigmascope.pipeline.optimizing.subject import models_of
from sigmascope.probes.set_up import channels_last

CHANNELS_LAST: Final = "channels_last"


def consider_channels_last(found: Circumstances) -> Considered:
    """For UNets, and VAEs of images, in half precision on NVIDIA's devices."""
    parts = found.subject.of_role("denoiser") | found.subject.of_role("vae")
    for name, model in parts.items():
        if channels_last(model) is not None:
            yield _channels_last_of(found, name, model)


def apply_channels_last(pipeline: Any, choice: Choice) -> None:
    """Lay the kernels out anew; what flows through takes their format."""
    models_of(pipeline)[choice.component].to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _channels_last_of(found: Circumstances, name: str, model: nn.Module) -> Choice | NotTaken:
    asked = found.config.channels_last
    if asked is False:
        return NotTaken(CHANNELS_LAST, name, "switched off")
    if channels_last(model):
        return NotTaken(CHANNELS_LAST, name, "they lie so already")
    if any(parameter.dim() == 5 for parameter in model.parameters()):
        return NotTaken(
            CHANNELS_LAST, name, "it has convolutions over time as well, for which this is no format"
        )
    if asked == "auto":
        refusal = found.why_not(CHANNELS_LAST, name, "rounding") or _channels_last_gains_nothing(found, name)
        if refusal is not None:
            return refusal
    return Choice(
        CHANNELS_LAST,
        name,
        f"pipe.{name}.to(memory_format=torch.channels_last)",
        "Its convolutions run in half precision." if asked == "auto" else "Asked for.",
        "time in convolutions, which need not be laid out anew",
        "speed",
        "rounding",
    )


def _channels_last_gains_nothing(found: Circumstances, name: str) -> NotTaken | None:
    if found.hardware.kind != "cuda":
        return NotTaken(CHANNELS_LAST, name, "what it gains on this device is not known")
    if found.dtypes.get(name) not in (torch.float16, torch.bfloat16):
        return NotTaken(CHANNELS_LAST, name, "it gains in half precision, and this is not")
    return None


CHANNELS_LAST_KIND: Final = Kind(
    CHANNELS_LAST, consider_channels_last, apply_channels_last, frozenset({"layout"})
)
