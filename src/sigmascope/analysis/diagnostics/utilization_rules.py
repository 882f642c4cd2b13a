"""Rules on how busy the accelerators were, and on what held them back."""

from collections.abc import Iterator
from typing import Final

from sigmascope import units
from sigmascope.analysis.diagnostics.case import Case
from sigmascope.records.finding import Finding
from sigmascope.records.run import Stage
from sigmascope.records.utilization import DeviceUtilization, utilization_of

_FEWEST_SAMPLES: Final = 5
_IDLE_BELOW: Final = 70.0
_IN_USE_FROM: Final = 5.0
"""Below this nothing of the pipeline runs on a device; it is another one's, or nobody's."""
_HEAT_FROM: Final = 5.0
_POWER_CAP_FROM: Final = 50.0


def device_idle(case: Case) -> Iterator[Finding]:
    """A device on which no kernel ran for a good part of the denoising: the host, or copying, keeps it waiting."""
    for stage, device in _sampled(case):
        busy = device.busy_percent
        if busy is None or not _IN_USE_FROM <= busy.mean < _IDLE_BELOW:
            continue
        idle = stage.seconds * (1 - busy.mean / 100)
        yield Finding(
            id="utilization.device_idle",
            severity="warning" if busy.mean < _IDLE_BELOW / 2 else "info",
            message=f"{device.device} was busy for {busy.mean:.0f} % of {stage.name}; it waited for about "
            f"{units.seconds(idle)} of {units.seconds(stage.seconds)}.",
            evidence={
                "device": device.device,
                "busy_percent": busy.mean,
                "samples": device.samples,
                "idle_seconds": idle,
            },
            advice="That is the most there is to gain. Compile the denoiser (pipe.transformer."
            "compile_repeated_blocks(fullgraph=True), or torch.compile with mode='reduce-overhead'), make several "
            "images at once, take .item() and .cpu() out of callbacks, and keep offloaded weights on the device.",
            stage=stage.name,
        )  # fmt: skip


def slowed_by_heat(case: Case) -> Iterator[Finding]:
    """A device that lowered its clocks because it was too hot: its times are not those of a cool one."""
    for stage, device in _sampled(case):
        share, warmth = device.heat_percent, device.temperature_celsius
        if share is None or share < _HEAT_FROM:
            continue
        highest = None if warmth is None else warmth.highest
        how_hot = "" if highest is None else f" It reached {highest:.0f} °C."
        yield Finding(
            id="utilization.slowed_by_heat",
            severity="warning",
            message=f"Heat lowered the clocks of {device.device} for {share:.0f} % of {stage.name}.{how_hot}",
            evidence={"device": device.device, "share_percent": share, "highest_celsius": highest},
            advice="Improve the cooling or lower the limit on power (nvidia-smi -pl); compare runs only at the same "
            "temperature.",
            stage=stage.name,
        )


def held_by_power_cap(case: Case) -> Iterator[Finding]:
    """A device at its limit on power most of the time, as is usual for large models on full load."""
    for stage, device in _sampled(case):
        share, power = device.power_cap_percent, device.power_watts
        if share is None or share < _POWER_CAP_FROM:
            continue
        mean = None if power is None else power.mean
        yield Finding(
            id="utilization.held_by_power_cap",
            severity="info",
            message=f"The limit on power lowered the clocks of {device.device} for {share:.0f} % of {stage.name}"
            + ("." if mean is None else f", at {mean:.0f} W."),
            evidence={"device": device.device, "share_percent": share, "mean_watts": mean},
            advice="It does what it may: narrower types (bf16, fp8) do the same work for less power.",
            stage=stage.name,
        )


def _sampled(case: Case) -> Iterator[tuple[Stage, DeviceUtilization]]:
    """Stages with steps, and their devices, with enough samples to tell."""
    for stage in case.with_steps():
        for device in utilization_of(stage).values():
            if device.samples >= _FEWEST_SAMPLES:
                yield stage, device


UTILIZATION_RULES = (device_idle, slowed_by_heat, held_by_power_cap)
