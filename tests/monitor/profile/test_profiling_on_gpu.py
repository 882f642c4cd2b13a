"""On a real device: kernels by block, and how busy the driver says that it is."""

import time

import pytest
import torch
from torch import nn

from sigmascope.monitor import Recorder
from sigmascope.monitor.profile import profile_steps
from sigmascope.records.performance import utilization_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or HIP device"),
]


class Denoiser(nn.Module):
    """A heavy block and a light one."""

    def __init__(self) -> None:
        super().__init__()
        heavy = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(16)))
        self.blocks = nn.ModuleList([heavy, nn.Linear(4096, 4096)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_have_the_time_of_their_kernels() -> None:
    denoiser, x = Denoiser().cuda(), torch.ones(2048, 4096, device="cuda")
    with torch.no_grad(), profile_steps(None, denoiser, (3,)) as profiling:
        for _ in range(3):
            denoiser(x)
    found = profiling.profile
    assert found is not None
    assert found.whole is not None
    assert found.whole.device_seconds is not None
    heavy, light = (block.device_seconds for block in found.blocks)
    assert heavy is not None
    assert light is not None
    assert 8 * light < heavy < 32 * light  # sixteen layers of the same size
    assert heavy + light == pytest.approx(found.whole.device_seconds, rel=0.02)
    assert found.blocks[1].allocated_bytes == 2048 * 4096 * 4


def test_a_device_that_works_is_seen_to_be_busy() -> None:
    pytest.importorskip("pynvml")
    matrix = torch.randn(8192, 8192, device="cuda")
    recorder = Recorder()
    with recorder.stage("denoising"):
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            torch.mm(matrix, matrix)
            torch.cuda.synchronize()
    figures = utilization_of(recorder.run().stages[0])[f"cuda:{torch.cuda.current_device()}"]
    assert figures.samples >= 8
    assert figures.busy_percent is not None
    assert figures.busy_percent.highest >= 80.0
