"""Sizes of images that a device can hold the work for."""

from dataclasses import replace
from typing import Final

from sigmascope import units
from sigmascope.pipeline.optimizing.circumstances import Circumstances
from sigmascope.pipeline.optimizing.config import OptimizationConfig
from sigmascope.pipeline.optimizing.hardware import Hardware
from sigmascope.pipeline.optimizing.reckoning import circumstances_of, reckon_work
from sigmascope.pipeline.optimizing.settings import GenerationSettings
from sigmascope.pipeline.optimizing.subject import Subject

_STEP: Final = 0.8
_MULTIPLE: Final = 64
_SMALLEST: Final = 256
"""Models of today make little of smaller images."""


def shrink_to_fit(
    subject: Subject, settings: GenerationSettings, hardware: Hardware, config: OptimizationConfig
) -> None:
    """Make the size smaller until what is needed beside weights fits; weights can take turns, this cannot.

    Args:
        subject: The pipeline.
        settings: With the size that is wanted; changed where that does not fit.
        hardware: Where it shall run.
        config: Of the optimizer.
    """
    if not {"height", "width"} <= settings.keys():
        return
    wanted = (int(settings["height"]), int(settings["width"]))
    frames = settings.get("num_frames")
    sizes = [wanted]
    while min(sizes[-1]) > _SMALLEST:
        sizes.append((_smaller(sizes[-1][0]), _smaller(sizes[-1][1])))
    first: Circumstances | None = None
    for height, width in sizes:
        asked = replace(config, height=height, width=width, num_frames=frames)
        found = circumstances_of(subject, hardware, asked)
        reckon_work(found)
        first = first or found
        room = _room(found)
        if room is None or found.work_bytes <= room:
            break
    else:
        return  # nothing fits as far as can be told: leave the size that the model is made for
    if (height, width) != wanted:
        reason = (
            f"{wanted[0]} × {wanted[1]} pixels take about {units.mib(first.work_bytes)} MB beside weights, and "
            f"{hardware.device} has {units.mib(_room(first))} MB."
        )
        settings.put("height", height, reason)
        settings.put("width", width, reason)


def _smaller(side: int) -> int:
    return max(_MULTIPLE, int(side * _STEP) // _MULTIPLE * _MULTIPLE)


def _room(found: Circumstances) -> int | None:
    return found.room_bytes if found.hardware.is_accelerator else found.hardware.ram_available_bytes
