"""`REQUIRE_GPU=1`, as `make gpu-check` sets it: a run without a GPU is refused, and a skipped test of one is a failure."""

import os
from collections.abc import Generator
from typing import Final

import pytest
import torch

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport", "pytest_sessionstart"]

IS_REQUIRED: Final = os.environ.get("REQUIRE_GPU") == "1"
NO_GPU: Final = 3
"""The exit code where there is none."""


def why_no_gpu() -> str | None:
    """Why PyTorch can use no GPU here, and what to do; None: it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        release = torch.__version__.partition("+")[0]
        return (
            f"PyTorch {torch.__version__} is a CPU build, which can use no GPU. Install a build for this machine's "
            f"driver, as https://pytorch.org/get-started/locally says, such as: .venv/bin/python -m pip install "
            f"--force-reinstall torch=={release} --index-url https://download.pytorch.org/whl/cu130"
        )
    return (
        f"PyTorch {torch.__version__} sees no GPU. Does nvidia-smi (or rocm-smi) list one, and do "
        "CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES leave it visible?"
    )


def pytest_sessionstart() -> None:
    if IS_REQUIRED and (reason := why_no_gpu()) is not None:
        pytest.exit(f"REQUIRE_GPU=1: {reason}", returncode=NO_GPU)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file of such tests that is skipped whole, as `importorskip` does it, is a failure too."""
    report = yield
    is_file = IS_REQUIRED and report.skipped and isinstance(collector, pytest.Module)
    if is_file and "mark.gpu" in collector.path.read_text(encoding="utf-8"):
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_GPU=1: tests of the GPU must not be skipped. {_reason(report)}"
    return report


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if IS_REQUIRED and report.skipped and item.get_closest_marker("gpu") is not None:
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_GPU=1: a test of the GPU must not be skipped. {_reason(report)}"
    return report
