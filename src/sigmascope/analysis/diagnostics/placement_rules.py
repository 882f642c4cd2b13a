"""Rules on where weights are, and how often they move."""

from collections.abc import Iterator
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.arithmetic import mib
from sigmascope.records.finding import Finding
from sigmascope.records.pipeline import ComponentFacts

_COMFORTABLE: Final = 0.7
"""Weights that take less of a device than this leave room for activations at usual sizes."""


def cpu_while_an_accelerator_is_free(case: Case) -> Iterator[Finding]:
    """A denoiser on the CPU, with no offloading that would move it, while there is a device."""
    devices = case.accelerators()
    if not devices:
        return
    for name, part in case.components("denoiser").items():
        if part.module is None or set(part.module.devices) != {"cpu"} or part.offload is not None:
            continue
        yield Finding(
            id="placement.cpu_while_accelerator_free",
            severity="warning",
            message=f"{name} ({part.class_name}) is on the CPU while {devices[0].device} "
            f"({devices[0].name or 'unnamed'}) is there.",
            evidence={"component": name, "accelerator": devices[0].device, "mb": mib(part.module.nbytes)},
            advice=f'pipe.to("{devices[0].device.partition(":")[0]}"), or pipe.enable_model_cpu_offload() if it does '
            "not fit.",
        )


def weights_moved_every_step(case: Case) -> Iterator[Finding]:
    """Sequential and group offloading carry the denoiser's weights to the device in each step."""
    steps = sum(len(stage.steps) for stage in case.with_steps())
    for name, part in case.components("denoiser").items():
        if part.offload not in ("sequential", "group") or part.module is None or part.module.nbytes is None:
            continue
        moved = part.module.nbytes * steps
        room = _room(case, [part])
        yield Finding(
            id="placement.weights_moved_every_step",
            severity="warning" if part.offload == "sequential" or room else "info",
            message=f"{part.offload.capitalize()} offloading moves {name}'s {units.mib(part.module.nbytes)} MB to the "
            f"device in every step: {units.mib(moved)} MB over {steps} steps.",
            evidence={"component": name, "offload": part.offload, "steps": steps, "moved_mb": mib(moved)},
            advice="It fits: keep the denoiser on the device (pipe.enable_model_cpu_offload() moves each model once a "
            "generation)." if room else "enable_model_cpu_offload() moves each model once a generation; if that does "
            "not fit, group offloading with use_stream=True hides part of the copying.",
        )  # fmt: skip


def offloaded_though_it_fits(case: Case) -> Iterator[Finding]:
    """Model offloading where all weights would fit on the device together."""
    parts = [part for part in (case.pipeline.components.values() if case.pipeline else ()) if part.module]
    if not any(part.offload == "model" for part in parts) or not _room(case, parts):
        return
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    yield Finding(
        id="placement.offloaded_though_it_fits",
        severity="info",
        message=f"Model offloading is on, though all weights together take {units.mib(needed)} MB of a device of "
        f"{units.mib(_largest(case))} MB.",
        evidence={"weights_mb": mib(needed), "device_mb": mib(_largest(case))},
        advice="Keep the pipeline on the device: pipe.remove_all_hooks(); pipe.to(device).",
    )


def loaded_again(case: Case) -> Iterator[Finding]:
    """The same model loaded more than once in a run, as where a text encoder is made anew for each image."""
    seconds: dict[tuple[object, ...], list[float]] = {}
    for stage in case.named("model_loading"):
        if "moves" in stage.facts:
            continue  # to another device: nothing is read
        source = tuple(str(stage.facts.get(name)) for name in ("source", "subfolder", "dtype"))
        for facts in stage.modules.values():
            seconds.setdefault((facts.class_name, facts.parameters, *source), []).append(stage.seconds)
    for (class_name, *_), loads in seconds.items():
        if len(loads) < 2:
            continue
        again = sum(loads[1:])
        yield Finding(
            id="placement.loaded_again",
            severity="warning",
            message=f"{class_name} was loaded {len(loads)} times; the loads after the first took {units.seconds(again)}.",
            evidence={"class": str(class_name), "times": len(loads), "gain_seconds": again},
            advice="Load it once and keep it; free memory by moving it to the CPU instead of deleting it.",
            stage="model_loading",
        )


def _room(case: Case, parts: list[ComponentFacts]) -> bool:
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    largest = _largest(case)
    return largest is not None and needed < _COMFORTABLE * largest


def _largest(case: Case) -> int | None:
    return max((one.total_bytes for one in case.accelerators() if one.total_bytes is not None), default=None)


PLACEMENT_RULES = (cpu_while_an_accelerator_is_free, weights_moved_every_step, offloaded_though_it_fits)
PLACEMENT_RUN_RULES = (loaded_again,)
