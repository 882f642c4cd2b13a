"""Rules on memory and on where weights are: fragmentation, limits, what is kept, NaN, offloading, reloading."""

from collections.abc import Iterator
from typing import Final

from sigmascope import units
from sigmascope.analysis.generations import Case
from sigmascope.records.memory import mib
from sigmascope.records.run import ComponentFacts, Finding, Stage

_MIB: Final = 2**20
_FRAGMENTED_SHARE: Final = 0.25
_FRAGMENTED_BYTES: Final = 1024 * _MIB
_SHORT_SHARE: Final = 0.8  # of a device: when more is held, memory is short
_NEAR_LIMIT_SHARE: Final = 0.95
_KEPT_BYTES: Final = 256 * _MIB
_KEPT_SHARE: Final = 0.5
_LOADS: Final = frozenset({"model_loading", "lora_application"})
"""Stages whose purpose is to leave more memory in use."""
_COMFORTABLE_SHARE: Final = 0.7
"""Weights that take less of a device than this leave room for activations at usual sizes."""


def near_the_limit(case: Case) -> Iterator[Finding]:
    """A peak so near the device's size that a slightly larger image will not fit."""
    for device in case.accelerators():
        highest, name = _most_reserved(case, device.device)
        if device.total_bytes and highest > _NEAR_LIMIT_SHARE * device.total_bytes:
            yield Finding(
                id="memory.near_the_limit",
                severity="warning",
                message=f"{name} held {units.mib(highest)} MB of {device.device}'s {units.mib(device.total_bytes)} MB.",
                evidence={
                    "device": device.device,
                    "peak_mb": mib(highest),
                    "total_mb": mib(device.total_bytes),
                },
                advice="Next to no room: VAE tiling, half precision, or offloading (pipe.enable_model_cpu_offload()).",
                stage=name,
            )


def _most_reserved(case: Case, device: str) -> tuple[int, str | None]:
    """The most that the allocator held, and the first stage that saw it, the innermost of those around it."""
    highest, at = 0, None
    for stage in case.stages:  # outer ones before those in them
        held = None if stage.peak is None else stage.peak.accelerator(device).reserved_bytes
        if held and (held > highest or (held == highest and at is not None and _is_in(stage, at))):
            highest, at = held, stage
    return highest, None if at is None else at.name


def _is_in(stage: Stage, outer: Stage) -> bool:
    return any(inner is stage for inner in outer.walk())


def kept_after_a_stage(case: Case) -> Iterator[Finding]:
    """Most of what a stage took is still in use at its end, and at that of those around it, though it loads nothing.

    What a stage gives to the next, or weights that are offloaded again after the generation, are kept by none.
    """
    for stage in _leaves(case):
        if stage.name in _LOADS or stage.memory is None or stage.peak is None or not stage.success:
            continue
        for memory in stage.memory.current.accelerators:
            baseline = stage.memory.baseline.accelerator(memory.device).allocated_bytes
            peak = stage.peak.accelerator(memory.device).allocated_bytes
            if baseline is None or peak is None or memory.allocated_bytes is None or peak <= baseline:
                continue
            kept = memory.allocated_bytes - baseline
            is_much = kept > max(_KEPT_BYTES, _KEPT_SHARE * (peak - baseline))
            if is_much and _is_kept_around(case, stage, memory.device, kept):
                yield Finding(
                    id="memory.kept_after_stage",
                    severity="warning",
                    message=f"{stage.name} left {units.mib(kept)} MB more in use on {memory.device} than it found.",
                    evidence={
                        "device": memory.device,
                        "kept_mb": mib(kept),
                        "peak_growth_mb": mib(peak - baseline),
                    },
                    advice="Look for outputs, hidden states or graphs that are kept: torch.no_grad(), del, and no lists "
                    "of latents.",
                    stage=stage.name,
                )


def _leaves(case: Case) -> Iterator[Stage]:
    """Stages without others inside: what an inner one keeps is said there."""
    return (stage for stage in case.stages if not stage.children)


def _is_kept_around(case: Case, stage: Stage, device: str, kept: int) -> bool:
    """Whether all stages that hold this one leave at least half as much, as far as that is known."""
    for outer in case.stages:
        if outer is stage or outer.memory is None or not _is_in(stage, outer):
            continue
        before = outer.memory.baseline.accelerator(device).allocated_bytes
        after = outer.memory.current.accelerator(device).allocated_bytes
        if before is not None and after is not None and after - before < kept / 2:
            return False
    return True


def values_not_finite(case: Case) -> Iterator[Finding]:
    """The first tensor that holds NaN or infinity: what comes after it is lost.

    A stage's tensors are mostly what it made, so that those of the stages inside it come before its own.
    """
    for stage in sorted(case.stages, key=lambda stage: stage.started_seconds + stage.seconds):
        for name, facts in stage.tensors.items():
            nans, infinities = facts.nan_count or 0, facts.inf_count or 0
            if not nans and not infinities:
                continue
            half = facts.dtype.removeprefix("torch.") == "float16"  # bfloat16 has the range of float32
            yield Finding(
                id="values.not_finite",
                severity="error",
                message=f"{name} of {stage.name} is the first tensor with {_not_finite_words(nans, infinities)}, of "
                f"{facts.num_elements:,} elements.",
                evidence={"tensor": name, "nan": nans, "inf": infinities, "dtype": facts.dtype},
                advice="float16 overflows at 65,504: run this part in bfloat16 or float32 (SDXL's VAE: force_upcast or a "
                "mended one)." if half else "Look at the stage before: its weights, the LoRA's strength, the input.",
                stage=stage.name,
            )  # fmt: skip
            return


def _not_finite_words(nans: int, infinities: int) -> str:
    parts = [f"{nans:,} NaN"] * bool(nans) + [f"{infinities:,} infinite values"] * bool(infinities)
    return " and ".join(parts)


def fragmented(case: Case) -> Iterator[Finding]:
    """Memory that the allocator had to take from the device though what its tensors needed would have fitted.

    What it keeps of one stage for the next is no fragmentation, however little is in use at a stage's end: so the most
    that it ever held is set beside the most that was ever in tensors. Some is usual; it matters where memory is short.
    """
    sizes = {accelerator.device: accelerator.total_bytes for accelerator in case.accelerators()}
    for device in _devices(case):
        reserved, name = _most_reserved(case, device)
        allocated = max(
            (stage.peak.accelerator(device).allocated_bytes or 0 for stage in case.stages if stage.peak),
            default=0,
        )
        idle = reserved - max(allocated, _held_before(case, device))
        if not allocated or idle <= max(_FRAGMENTED_BYTES, _FRAGMENTED_SHARE * reserved):
            continue
        yield Finding(
            id="memory.fragmented",
            severity="warning" if reserved > _SHORT_SHARE * (sizes.get(device) or 0) > 0 else "info",
            message=f"PyTorch came to hold {units.mib(reserved)} MB on {device} in {name}, {units.mib(idle)} MB "
            f"({100 * idle / reserved:.0f} %) more than was ever in tensors: its free blocks were too small for what "
            "was asked.",
            evidence={"device": device, "idle_mb": mib(idle), "fragmentation": idle / reserved},
            advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it use such gaps; so does making the largest "
            "images first. torch.cuda.empty_cache() gives them back to others.",
            stage=name,
        )  # fmt: skip


def _devices(case: Case) -> list[str]:
    devices = (
        peak.device for stage in case.stages for peak in (stage.peak.accelerators if stage.peak else ())
    )
    return list(dict.fromkeys(devices))


def _held_before(case: Case, device: str) -> int:
    """What the allocator held when the first stage began; 0 where that is not known."""
    for stage in sorted(case.stages, key=lambda stage: stage.started_seconds):
        if stage.memory is not None:
            return stage.memory.baseline.accelerator(device).reserved_bytes or 0
    return 0


MEMORY_RULES = (near_the_limit, kept_after_a_stage, values_not_finite)
MEMORY_RUN_RULES = (fragmented,)


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
        room = _is_there_room(case, [part])
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


def _is_there_room(case: Case, parts: list[ComponentFacts]) -> bool:
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    largest = _largest_device_bytes(case)
    return largest is not None and needed < _COMFORTABLE_SHARE * largest


def _largest_device_bytes(case: Case) -> int | None:
    return max(
        (device.total_bytes for device in case.accelerators() if device.total_bytes is not None), default=None
    )


def offloaded_though_it_fits(case: Case) -> Iterator[Finding]:
    """Model offloading where all weights would fit on the device together."""
    parts = [part for part in (case.pipeline.components.values() if case.pipeline else ()) if part.module]
    if not any(part.offload == "model" for part in parts) or not _is_there_room(case, parts):
        return
    needed = sum(part.module.nbytes or 0 for part in parts if part.module is not None)
    yield Finding(
        id="placement.offloaded_though_it_fits",
        severity="info",
        message=f"Model offloading is on, though all weights together take {units.mib(needed)} MB of a device of "
        f"{units.mib(_largest_device_bytes(case))} MB.",
        evidence={"weights_mb": mib(needed), "device_mb": mib(_largest_device_bytes(case))},
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


PLACEMENT_RULES = (cpu_while_an_accelerator_is_free, weights_moved_every_step, offloaded_though_it_fits)
PLACEMENT_RUN_RULES = (loaded_again,)
