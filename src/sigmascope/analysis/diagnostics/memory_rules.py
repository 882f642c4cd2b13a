"""Rules on memory: fragmentation, limits, what is kept, and what values it holds."""

from collections.abc import Iterator
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.arithmetic import mib
from sigmascope.records.finding import Finding
from sigmascope.records.run import Stage

_MIB: Final = 2**20
_FRAGMENTED_SHARE: Final = 0.25
_FRAGMENTED_BYTES: Final = 1024 * _MIB
_NEAR_LIMIT: Final = 0.95
_KEPT_BYTES: Final = 256 * _MIB
_KEPT_SHARE: Final = 0.5
_LOADS: Final = frozenset({"model_loading", "lora_application"})
"""Stages whose purpose is to leave more memory in use."""


def fragmented(case: Case) -> Iterator[Finding]:
    """Memory that the allocator holds and nobody uses."""
    worst: tuple[int, str, str, float] | None = None
    for stage in case.stages:
        for memory in stage.memory.current.accelerators if stage.memory else ():
            share = memory.fragmentation()
            if share is None or memory.reserved_bytes is None or memory.allocated_bytes is None:
                continue
            idle = memory.reserved_bytes - memory.allocated_bytes
            if share > _FRAGMENTED_SHARE and idle > _FRAGMENTED_BYTES and (worst is None or idle > worst[0]):
                worst = (idle, stage.name, memory.device, share)
    if worst is None:
        return
    idle, name, device, share = worst
    yield Finding(
        id="memory.fragmented",
        severity="warning",
        message=f"At the end of {name}, {units.mib(idle)} MB of what PyTorch holds on {device} were in no tensor "
        f"({100 * share:.0f} %).",
        evidence={"device": device, "idle_mb": mib(idle), "fragmentation": share},
        advice="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets it use such gaps; torch.cuda.empty_cache() between "
        "stages gives them back to others.",
        stage=name,
    )


def near_the_limit(case: Case) -> Iterator[Finding]:
    """A peak so near the device's size that a slightly larger image will not fit."""
    for device in case.accelerators():
        peaks = [
            (peak.reserved_bytes, stage.name)
            for stage in case.stages
            for peak in (stage.peak.accelerators if stage.peak else ())
            if peak.device == device.device and peak.reserved_bytes is not None
        ]
        if not peaks or not device.total_bytes:
            continue
        highest, name = max(peaks)
        if highest > _NEAR_LIMIT * device.total_bytes:
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


def kept_after_a_stage(case: Case) -> Iterator[Finding]:
    """Most of what a stage took on its way is still in use at its end, though it loads nothing."""
    for stage in _leaves(case):
        if stage.name in _LOADS or stage.memory is None or stage.peak is None or not stage.success:
            continue
        for memory in stage.memory.current.accelerators:
            baseline = stage.memory.baseline.accelerator(memory.device).allocated_bytes
            peak = stage.peak.accelerator(memory.device).allocated_bytes
            if baseline is None or peak is None or memory.allocated_bytes is None or peak <= baseline:
                continue
            kept = memory.allocated_bytes - baseline
            if kept > _KEPT_BYTES and kept > _KEPT_SHARE * (peak - baseline):
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


def values_not_finite(case: Case) -> Iterator[Finding]:
    """The first tensor that holds NaN or infinity: what comes after it is lost.

    A stage's tensors are mostly what it made, so that those of the stages inside it come before its own.
    """
    for stage in sorted(case.stages, key=lambda one: one.started_seconds + one.seconds):
        for name, facts in stage.tensors.items():
            nans, infinities = facts.nan_count or 0, facts.inf_count or 0
            if not nans and not infinities:
                continue
            half = facts.dtype.removeprefix("torch.") == "float16"  # bfloat16 has the range of float32
            yield Finding(
                id="values.not_finite",
                severity="error",
                message=f"{name} of {stage.name} is the first tensor with {_what(nans, infinities)}, of "
                f"{facts.num_elements:,} elements.",
                evidence={"tensor": name, "nan": nans, "inf": infinities, "dtype": facts.dtype},
                advice="float16 overflows at 65,504: run this part in bfloat16 or float32 (SDXL's VAE: force_upcast or a "
                "mended one)." if half else "Look at the stage before: its weights, the LoRA's strength, the input.",
                stage=stage.name,
            )  # fmt: skip
            return


def _leaves(case: Case) -> Iterator[Stage]:
    """Stages without others inside: what an inner one keeps is said there."""
    return (stage for stage in case.stages if not stage.children)


def _what(nans: int, infinities: int) -> str:
    parts = [f"{nans:,} NaN"] * bool(nans) + [f"{infinities:,} infinite values"] * bool(infinities)
    return " and ".join(parts)


RULES = (fragmented, near_the_limit, kept_after_a_stage, values_not_finite)
