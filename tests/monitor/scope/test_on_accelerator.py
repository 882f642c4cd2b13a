"""On a real device: times by events, peaks of the real allocator, outputs left alone."""

import time

import pytest
import torch

from sigmascope.monitor import Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]

MIB = 2**20


def test_event_times_agree_with_a_synchronised_wall_clock() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    work()
    torch.cuda.synchronize()
    recorder = Recorder(sample_hz=None)
    wall = []
    with recorder.stage("denoising"):
        for _ in range(5):
            began = time.perf_counter()
            with recorder.step():
                work()
            torch.cuda.synchronize()
            wall.append(time.perf_counter() - began)
    measured = recorder.run().stages[0].steps.gpu_seconds
    for on_device, by_wall in zip(measured, wall, strict=True):
        assert on_device is not None
        assert 0.8 * by_wall < on_device <= by_wall + 2e-4


def test_a_step_does_not_wait_for_the_device() -> None:
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    recorder = Recorder(sample_hz=None)
    with recorder.stage("denoising"), recorder.step():
        for _ in range(50):
            torch.mm(matrix, matrix)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    steps = recorder.run().stages[0].steps
    assert steps.gpu_seconds[0] is not None
    assert steps.gpu_seconds[0] > steps.seconds[0]


def test_a_stage_that_the_host_only_queued_has_the_time_of_the_device() -> None:
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    recorder = Recorder(sample_hz=None)
    began = time.perf_counter()
    with recorder.stage("latent_decoding"):
        for _ in range(50):
            torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    stage = recorder.run().stages[0]
    assert stage.seconds < stage.facts["device_seconds"] <= wall


def test_nested_peaks_of_the_real_allocator_are_true() -> None:
    torch.cuda.empty_cache()
    recorder = Recorder(sample_hz=None)

    def pulse(mib: int) -> None:
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    base = torch.cuda.memory_allocated()
    with recorder.stage("outer"):
        pulse(64)
        with recorder.stage("inner"):
            pulse(16)
            with recorder.stage("innermost"):
                pulse(32)
        with recorder.stage("second"), recorder.step():
            pulse(8)
    peaks = {}
    for stage in recorder.run().walk():
        assert stage.peak is not None
        peak = stage.peak.accelerator(f"cuda:{torch.cuda.current_device()}")
        assert peak.allocated_bytes is not None
        assert peak.reserved_bytes is not None
        assert peak.reserved_bytes >= peak.allocated_bytes
        peaks[stage.name] = (peak.allocated_bytes - base) // MIB
    assert peaks == {"outer": 64, "inner": 32, "innermost": 32, "second": 8}


def test_outputs_are_bit_identical_with_and_without_a_recorder() -> None:
    module = torch.nn.Conv2d(4, 4, 3, padding=1).cuda()
    latent = torch.randn(1, 4, 64, 64, device="cuda")
    plain = module(latent)
    recorder = Recorder(sample_hz=10.0)
    with recorder, recorder.stage("denoising") as stage, recorder.hook_steps(module):
        watched = module(latent)
        stage.tensor("latent", watched, statistics=True)
    assert torch.equal(plain, watched)


def test_steps_may_surround_the_capture_and_the_replay_of_a_graph() -> None:
    latent = torch.randn(1, 4, 64, 64, device="cuda")
    torch.relu(latent)
    recorder = Recorder(sample_hz=10.0)
    graph = torch.cuda.CUDAGraph()
    with recorder.stage("denoising") as stage:
        with torch.cuda.graph(graph), recorder.step():
            output = torch.relu(latent)
            stage.tensor("output", output, statistics=True)
        for _ in range(3):
            with recorder.step():
                graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, torch.relu(latent))
    assert len(recorder.run().stages[0].steps) == 4
    assert "graph" in recorder.run().stages[0].tensors["output"].unavailable["mean"]
