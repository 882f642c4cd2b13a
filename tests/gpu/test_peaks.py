"""Peaks of memory are true or have a reason, whatever allocator the host chose; and a watch adds little to them."""

from typing import Any

import pytest
import torch
from tests.gpu.children import run_child, told_by
from tests.gpu.figures import measured
from tests.gpu.memory import MIB
from tests.pocket_pipelines.pipelines import load_pocket

import sigmascope
from sigmascope.monitor.output_hashes import HELD_BYTES_ON_DEVICE

pytestmark = pytest.mark.gpu

CHILD = """
import json, sys, torch
from sigmascope.monitor import Recorder
MIB, device = 2**20, sys.argv[1]
torch.ones(1, device=device)
recorder = Recorder(sample_hz=10.0)
with recorder, recorder.stage("outer"):
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    with recorder.stage("inner"):
        passing = torch.empty(96 * MIB, dtype=torch.uint8, device=device)
        del passing
    with recorder.step():
        passing = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
        del passing
    name = "cuda:0" if device == "cuda" else device
found = {}
for stage in recorder.run().walk():
    peak = None if stage.peak is None else stage.peak.accelerator(name)
    found[stage.name] = None if peak is None else [peak.allocated_bytes, peak.reserved_bytes, dict(peak.unavailable)]
steps = recorder.run().stages[0].steps
backend = torch.cuda.get_allocator_backend() if device == "cuda" else None
print(json.dumps({"peaks": found, "steps": [list(steps.allocated_bytes), dict(steps.unavailable)], "backend": backend}))
"""
ALLOCATORS = {
    "native": {},
    "cudaMallocAsync": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "no caching": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}
TRUE = {"outer": 160, "inner": 160}
"""MiB that are held at once."""


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_peak_is_true_or_unavailable_and_never_a_false_0(allocator: str, device: torch.device) -> None:
    environment = dict(ALLOCATORS[allocator])
    if conf := environment.get("PYTORCH_CUDA_ALLOC_CONF"):
        environment["PYTORCH_ALLOC_CONF"] = conf  # its name since PyTorch 2.9
    told = told_by(run_child(CHILD, device.type, **environment))
    if device.type == "cuda":
        assert told["backend"] == ("cudaMallocAsync" if allocator == "cudaMallocAsync" else "native")
    for stage, mib in TRUE.items():
        if device.type == "cpu":
            continue
        allocated, reserved, unavailable = told["peaks"][stage]
        if allocated is None:
            assert unavailable.get("allocated_bytes"), told
            assert allocator != "native"
        else:
            assert mib * MIB <= allocated < (mib + 4) * MIB, told
        if reserved is None:
            assert unavailable.get("reserved_bytes"), told
            assert allocator != "native"
        else:
            assert reserved >= mib * MIB, told
    of_steps, unavailable = told["steps"]
    if device.type == "cuda":
        assert of_steps or unavailable.get("allocated_bytes"), told
        assert all(held is None or 64 * MIB <= held < 68 * MIB for held in of_steps), told


def _peak_of_bare_call(pipeline: Any, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _call(pipeline)
    return torch.cuda.max_memory_allocated(device)


def _call(pipeline: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    pipeline(
        "a red cube", num_inference_steps=3, height=256, width=256, output_type="pt", generator=generator
    )


def test_a_watched_call_takes_little_more_memory(cuda: torch.device) -> None:
    """It holds what stages gave, of each output up to 64 MiB, until the call is over, and a sample of the weights."""
    pipeline = load_pocket("unet", "base").to(cuda)
    pipeline.set_progress_bar_config(disable=True)
    _call(pipeline)
    bare = _peak_of_bare_call(pipeline, cuda)
    torch.cuda.empty_cache()
    with sigmascope.watch(pipeline) as run:
        _call(pipeline)
    generation = next(stage for stage in run.record().stages if stage.name == "generation")
    assert generation.peak is not None
    watched = generation.peak.accelerator(str(cuda)).allocated_bytes
    assert watched is not None
    assert watched >= bare - MIB  # the record's figure is a true one
    outputs = (3 * 256 * 256 + 2 * 4 * 64 * 64) * 4
    measured("a watched call beside a bare one", peak_mib=bare / MIB, more_mib=(watched - bare) / MIB)
    assert watched - bare <= min(HELD_BYTES_ON_DEVICE, 2 * outputs + 2 * MIB)
