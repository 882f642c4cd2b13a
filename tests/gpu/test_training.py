"""Three steps of a training on the GPU, beside those of the CPU and what the dry run expects."""

from pathlib import Path

import pytest
import torch
from tests.gpu.conftest import ON_CPU
from tests.gpu.figures import measured
from tests.gpu.memory import MIB
from tests.lbm.training.small_run import SmallRun

from sigmascope.lbm.training.metrics import TRAINING
from sigmascope.lbm.training.train import dry_run, train

pytestmark = pytest.mark.gpu

STEPS = 3
SIDE = 64 if ON_CPU else 512
SAMPLES = 2 if ON_CPU else 4
WORKSPACES = 256 * MIB
"""What cuBLAS and cuDNN take for themselves through PyTorch's allocator, which no estimate holds."""


KEYS = {
    "max_steps": STEPS,
    "image_size": [SIDE, SIDE],
    "batch_size": SAMPLES,
    "shuffle_buffer": 1,
    "seed": 3,
}


@pytest.fixture(scope="module")
def losses_on_cpu(small_files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    out = str(tmp_path_factory.mktemp("on_cpu"))
    report = train(SmallRun(small_files).settings(**KEYS, device="cpu", save_ckpt_path=out))
    return [log.loss for log in report.logs]


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("no", 1e-2), ("bf16", 5e-2), ("fp16", 5e-2)], ids=["fp32", "bf16", "fp16"]
)
def test_losses_are_near_the_cpus_and_the_peak_within_the_estimate(
    precision: str,
    tolerance: float,
    device: torch.device,
    small_run: SmallRun,
    losses_on_cpu: list[float | None],
) -> None:
    if ON_CPU and precision == "fp16":
        pytest.skip("float16 is not for training on the CPU")
    settings = small_run.settings(**KEYS, device=str(device), mixed_precision=precision)
    expected = dry_run(settings).memory.total
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
    report = train(settings)
    losses, theirs = [log.loss for log in report.logs], losses_on_cpu
    assert len(losses) == len(theirs) == STEPS
    for loss, other in zip(losses, theirs, strict=True):
        assert loss == pytest.approx(other, rel=tolerance)
    peaks = [
        stage.peak.accelerator(str(device)).allocated_bytes
        for stage in report.run.walk()
        if stage.name == TRAINING and stage.peak is not None
    ]
    assert len(peaks) == 1
    if device.type == "cpu":
        return
    assert peaks[0] is not None
    peak = peaks[0] - before
    measured(f"training, {precision}", peak_mib=peak / MIB, estimate_mib=expected / MIB)
    assert peak <= expected + WORKSPACES
