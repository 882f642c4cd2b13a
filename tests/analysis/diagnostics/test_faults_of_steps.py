"""Pipelines whose steps are uneven, or keep the device waiting, and devices that hold themselves back."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.analysis.diagnostics.simulated import Nvml, SimulatedGpu, asked_through, found, number, watched

from sigmascope.records.merge import merge_runs

STEPS = 6


class Loading:
    """Weights that are read when they are needed first."""

    def __call__(self, gpu: SimulatedGpu, step: int, latents: torch.Tensor) -> None:
        gpu.host_works(2.0 if step == 0 else 0.0)


class Previews:
    """A preview after every fifth step, within the next one."""

    def __call__(self, gpu: SimulatedGpu, step: int, latents: torch.Tensor) -> None:
        gpu.host_works(0.5 if step in (5, 10) else 0.0)


class Accumulating:
    """All latents so far, looked at again in each step."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def __call__(self, gpu: SimulatedGpu, step: int, latents: torch.Tensor) -> None:
        self._kept.append(latents.flatten())
        every = torch.stack(self._kept)
        every.T @ every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "steps", "rule", "told"),
    [
        (Loading(), 4, "time.first_step_compiles", {"compiled": False}),
        (Previews(), 12, "time.steps_stand_out", {"steps": "6, 11"}),
        (Accumulating(), 14, "time.steps_slow_down", {"steps": 13}),
    ],
)
def test_steps_that_are_not_even(
    pipe: Any,
    fault: Callable[[SimulatedGpu, int, torch.Tensor], None],
    steps: int,
    rule: str,
    told: dict[str, object],
) -> None:
    gpu, calls = SimulatedGpu(), itertools.count()
    hook = pipe.unet.register_forward_pre_hook(lambda _, args: fault(gpu, next(calls), args[0]))
    findings = found(watched(pipe, gpu, {"num_inference_steps": steps}))
    hook.remove()
    beside_others = "time.waited_for_processor"  # of the machine that this runs on
    assert {name for name in findings if name.startswith("time.") and name != beside_others} == {rule}
    assert findings[rule].evidence.items() >= told.items()


@pytest.mark.slow
def test_a_preview_between_the_steps_keeps_the_device_waiting(pipe: Any) -> None:
    gpu = SimulatedGpu()

    def preview(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs["latents"].sum().item()  # waits for the step
        gpu.host_works(0.05)
        return kwargs

    call = {"num_inference_steps": STEPS}
    finding = found(watched(pipe, gpu, call | {"callback_on_step_end": preview}))
    waits = finding["time.device_waits"]
    assert number(waits, "seconds") - number(waits, "busy_seconds") == pytest.approx(
        0.05 * (STEPS - 1), rel=0.05
    )
    assert "time.device_waits" not in found(watched(pipe, SimulatedGpu(), call))


def test_small_kernels_that_wait_for_python_leave_the_device_idle(pipe: Any) -> None:
    gpu = SimulatedGpu(gflops=1e6, launch_us=400.0, shortest_us=80.0)
    with asked_through(Nvml(gpu), gpu):
        findings = found(watched(pipe, gpu, {"num_inference_steps": 7}, sample_hz=10.0))
    assert 10 < number(findings["utilization.device_idle"], "busy_percent") < 30
    assert "time.device_waits" not in findings  # what is idle is so within the steps


@pytest.mark.parametrize(
    ("nvml", "rule"),
    [
        ({"celsius": lambda ns: 70.0 + ns / 5e7}, "utilization.slowed_by_heat"),
        ({"watts": 900.0}, "utilization.held_by_power_cap"),
        ({}, None),
    ],
)
def test_a_device_that_holds_itself_back(pipe: Any, nvml: dict[str, Any], rule: str | None) -> None:
    gpu = SimulatedGpu(gflops=0.03, launch_us=200.0)
    with asked_through(Nvml(gpu, **nvml), gpu):
        findings = found(watched(pipe, gpu, {"num_inference_steps": 6}, sample_hz=10.0))
    assert {name for name in findings if name.startswith("utilization.")} == ({rule} if rule else set())


@pytest.mark.slow
def test_a_rank_on_a_slower_device(pipe: Any) -> None:
    call = {"num_inference_steps": 3}
    ranks = [watched(pipe, SimulatedGpu(gflops=gflops), call) for gflops in (1.0, 1.0, 0.5)]
    finding = found(merge_runs(ranks))["ranks.slow_rank"]
    assert finding.evidence["rank"] == "rank 2"
    assert number(finding, "step_seconds") > 1.3 * number(finding, "others_seconds")
    assert "ranks.slow_rank" not in found(merge_runs(ranks[:2]))
