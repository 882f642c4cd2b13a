"""Checks that need a GPU: `make gpu-check` runs them, and nothing else does.

`CHECK_DEVICE=cpu pytest -m gpu tests/gpu` runs those of them that have a meaning on the CPU, so that they can be worked on
without a GPU. What was measured is printed at the end, and written to the file that `GPU_FIGURES` names.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from tests.gpu.figures import FIGURES, about_the_device, as_table
from tests.lbm.conftest import tiny_config, tiny_model, tiny_yaml
from tests.lbm.training.conftest import small_files, small_run
from tests.lora.conftest import make_factors, make_lora

__all__ = [  # fixtures
    "make_factors",
    "make_lora",
    "small_files",
    "small_run",
    "tiny_config",
    "tiny_model",
    "tiny_yaml",
]

CHECK_DEVICE: Final = os.environ.get("CHECK_DEVICE", "")
if CHECK_DEVICE not in ("", "cpu"):
    raise pytest.UsageError(
        f"CHECK_DEVICE={CHECK_DEVICE}: only cpu can be asked for; without it, the GPU is used."
    )
ON_CPU: Final = CHECK_DEVICE == "cpu"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before a fixture of a check has worked in vain."""
    if item.get_closest_marker("gpu") is not None and not ON_CPU and not torch.cuda.is_available():
        pytest.skip("no GPU that CUDA or HIP can use")


@pytest.fixture
def device() -> torch.device:
    """The GPU; the CPU for whoever works on the checks."""
    if ON_CPU:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The GPU, for what has no meaning on the CPU."""
    if device.type != "cuda":
        pytest.skip("has no meaning on the CPU")
    return device


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    """Let each check find the memory that the one before has used."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FIGURES:
        return
    device = about_the_device()
    terminalreporter.section(f"measured on {device['name']}")
    terminalreporter.write_line(as_table(FIGURES))
    if path := os.environ.get("GPU_FIGURES"):
        content = json.dumps({"device": device, "figures": FIGURES}, indent=1)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content, encoding="utf-8")
        terminalreporter.write_line(f"written to {path}")
