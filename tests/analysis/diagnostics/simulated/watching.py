"""`sigmascope.watch` on a simulated GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import sigmascope
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.integrations.diffusers import watch_session
from sigmascope.monitor import Recorder
from sigmascope.records.run import Finding, Run

from .gpu import SimulatedGpu

CALL = {"num_inference_steps": 4, "height": 32, "width": 32, "guidance_scale": 1.0, "output_type": "pt"}


@contextmanager
def on_this_gpu(gpu: SimulatedGpu) -> Iterator[None]:
    """Let watches that are opened in the block read this device and this clock."""

    def recorder(name: str, sample_hz: float | None, **choices: Any) -> Recorder:
        return Recorder(name, sample_hz, gpu, gpu, **choices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_session, "Recorder", recorder)
        yield


def watched(pipe: Any, gpu: SimulatedGpu, *calls: dict[str, Any], sample_hz: float | None = None) -> Run:
    """The run of a pipeline's calls on the device, which is waited for after each.

    Args:
        pipe: Its weights count as lying on the device.
        gpu: The device.
        calls: What each call has beyond `CALL`; none: one call.
        sample_hz: As `watch` takes it.
    """
    gpu.put(*(part for part in pipe.components.values() if isinstance(part, nn.Module)))
    with on_this_gpu(gpu), sigmascope.watch(pipe, sample_hz=sample_hz) as run, torch.no_grad(), gpu:
        for call in calls or ({},):
            pipe(**{"prompt": "a fox", **CALL, **call})
            gpu.synchronize()
    return run.record()


def found(run: Run) -> dict[str, Finding]:
    """What the rules say of a run, by their names."""
    return {finding.id: finding for finding in diagnose(run)}


def number(finding: Finding, name: str) -> float:
    """A number of a finding's evidence."""
    value = finding.evidence[name]
    assert isinstance(value, float)
    return value
