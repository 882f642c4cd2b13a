"""Where weights are: on the device, or in RAM while they are not at work, model by model or layer by layer."""

from functools import partial
from typing import Any, Final

from torch import nn

from sigmascope import units
from sigmascope.pipeline.optimizations.interface import Circumstances, Considered, Kind, Undo
from sigmascope.pipeline.pipeline_parts import models_of
from sigmascope.pipeline.plan import PIPELINE, Choice, NotTaken
from sigmascope.records.facts import JsonScalar
from sigmascope.records.memory import MIB

PLACEMENT: Final = "placement"
GROUP_HOOKS: Final = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
"""What diffusers calls the hooks of group offloading."""


def consider_placement(found: Circumstances) -> Considered:
    """On the device if all of it fits; else model by model; else layer by layer."""
    asked = found.config.offload
    already = [n for n, part in found.subject.facts.components.items() if part.offload is not None]
    if already:
        yield NotTaken(PLACEMENT, PIPELINE, f"{', '.join(already)}: weights are offloaded already")
    elif asked in ("model", "group"):
        yield from _asked(found, asked)
    elif not found.hardware.is_accelerator:
        yield NotTaken(PLACEMENT, PIPELINE, found.no_accelerator)
    elif found.room_bytes is None:
        yield NotTaken(PLACEMENT, PIPELINE, f"how much memory {found.hardware.device} has is not known")
    elif not hasattr(found.subject.pipeline, "to"):
        yield NotTaken(PLACEMENT, PIPELINE, "it cannot be moved as a whole: it has no `to`")
    elif _fits(found, found.total_bytes):
        yield _on_device(found)
    elif asked is None:
        yield NotTaken(
            PLACEMENT, PIPELINE, f"offloading is switched off. {_sum_in_words(found, found.total_bytes)}"
        )
    else:
        yield from _offloaded(found)


def _asked(found: Circumstances, how: str) -> Considered:
    if how == "model" and _can_model_offload(found):
        yield _model_offload(found, "Asked for.", necessary=False)
    elif how == "group" and hasattr(found.subject.pipeline, "enable_group_offload"):
        yield _group_offload(found, "Asked for.", necessary=False)
    else:
        yield NotTaken(PLACEMENT, PIPELINE, f"this pipeline has no {how} offloading")


def _can_model_offload(found: Circumstances) -> bool:
    return getattr(found.subject.pipeline, "model_cpu_offload_seq", None) is not None


def _model_offload(found: Circumstances, reason: str, *, necessary: bool) -> Choice:
    device = found.hardware.device
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.enable_model_cpu_offload(device="{device}")',
        reason,
        f"no more than the largest model on the device, {units.mib(found.largest[1])} MB; each moves once a generation",
        "memory",
        "none",
        {"device": device, "how": "model"},
        _numbers(found, found.largest[1]),
        necessary,
    )


def _numbers(found: Circumstances, nbytes: int) -> dict[str, JsonScalar]:
    room = None if found.room_bytes is None else found.room_bytes / MIB
    return {"weights_mb": nbytes / MIB, "work_mb": found.work_bytes / MIB, "room_mb": room}


def _group_offload(found: Circumstances, reason: str, *, necessary: bool) -> Choice:
    device = found.hardware.device
    options: dict[str, JsonScalar] = {
        "offload_type": "leaf_level",
        "use_stream": found.hardware.kind in ("cuda", "xpu"),
    }
    if options["use_stream"]:
        options["low_cpu_mem_usage"] = _ram_is_short(found)
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
        _numbers(found, 0),
        necessary,
    )


def _ram_is_short(found: Circumstances) -> bool:
    """Whether page-locked copies of all weights would take what RAM there is."""
    ram = found.hardware.ram_available_bytes
    return ram is not None and ram < 1.5 * found.total_bytes


def _fits(found: Circumstances, nbytes: int) -> bool:
    return found.room_bytes is not None and nbytes + found.work_bytes <= found.room_bytes


def _on_device(found: Circumstances) -> Choice | NotTaken:
    device = found.hardware.device
    if all(str(p.device) == device for model in found.subject.models.values() for p in model.parameters()):
        return NotTaken(
            PLACEMENT,
            PIPELINE,
            f"it is on {device} already, and fits. {_sum_in_words(found, found.total_bytes)}",
        )
    return Choice(
        PLACEMENT,
        PIPELINE,
        f'pipe.to("{device}")',
        f"All of it fits. {_sum_in_words(found, found.total_bytes)}",
        "nothing moves while it runs",
        "speed",
        "rounding",
        {"device": device, "how": "device"},
        _numbers(found, found.total_bytes),
    )


def _sum_in_words(found: Circumstances, nbytes: int) -> str:
    return (
        f"{units.mib(nbytes)} MB of weights and about {units.mib(found.work_bytes)} MB at work, "
        f"in {units.mib(found.room_bytes)} MB."
    )


def _offloaded(found: Circumstances) -> Considered:
    name, nbytes = found.largest
    if _fits(found, nbytes) and _can_model_offload(found):
        yield _model_offload(
            found, f"All weights do not fit: {_sum_in_words(found, found.total_bytes)}", necessary=True
        )
        return
    reason = f"{name} alone does not fit: {_sum_in_words(found, nbytes)}"
    if hasattr(found.subject.pipeline, "enable_group_offload"):
        yield _group_offload(found, reason, necessary=True)
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
        return partial(_remove_accelerate_hooks, pipeline)
    options = {name: value for name, value in choice.options.items() if name not in ("device", "how")}
    models = models_of(pipeline)
    pipeline.enable_group_offload(onload_device=_torch_device(device), **options)
    return partial(_remove_group_hooks, models)


def _remove_accelerate_hooks(pipeline: Any) -> None:
    """These were put on anew after each generation, so that what was noted at first is not what is there."""
    pipeline.remove_all_hooks()


def _torch_device(device: str) -> Any:
    import torch

    return torch.device(device)


def _remove_group_hooks(models: dict[str, nn.Module]) -> None:
    for model in models.values():
        for part in model.modules():
            registry: Any = getattr(part, "_diffusers_hook", None)
            for name in GROUP_HOOKS if registry is not None else ():
                registry.remove_hook(name, recurse=False)


PLACEMENT_KIND: Final = Kind(PLACEMENT, consider_placement, apply_placement, frozenset({"device"}))
