"""What `REQUIRE_GPU=1` refuses, in runs of pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.require_gpu import NO_GPU, why_no_gpu

HERE = Path(__file__).parent
MADE = """
import pytest
import torch

{has_gpu}
from tests.require_gpu import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart
"""
TESTS = """
import pytest

@pytest.mark.gpu
def test_of_a_gpu():
    pytest.skip("there is no pynvml")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="by its mark")
def test_marked():
    pass

def test_of_no_gpu():
    pytest.skip("needs a browser")

@pytest.mark.gpu
def test_that_runs():
    pass
"""


LACKING = """
import pytest

pytest.importorskip("no_such_package")
pytestmark = pytest.mark.gpu
"""


def run_pytest(folder: Path, *, has_gpu: bool, require: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a few made tests, on a machine with or without a GPU."""
    pretended = f"torch.cuda.is_available = lambda: {has_gpu}"
    (folder / "conftest.py").write_text(MADE.format(has_gpu=pretended))
    (folder / "test_made.py").write_text(TESTS)
    (folder / "test_lacking.py").write_text(LACKING)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "REQUIRE_GPU": str(int(require))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-ra"]
    command += ["--continue-on-collection-errors", str(folder)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="no CPU build")
def test_a_cpu_build_of_pytorch_is_refused_by_name_and_with_what_to_install(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, has_gpu=False)
    assert done.returncode == NO_GPU
    told = " ".join((done.stdout + done.stderr).split())
    assert f"PyTorch {torch.__version__} is a CPU build" in told
    assert "pip install --force-reinstall torch==" in told
    assert "passed" not in told


def test_a_build_with_cuda_that_sees_no_gpu_is_told_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = why_no_gpu()
    assert told is not None
    assert "sees no GPU" in told
    assert "CUDA_VISIBLE_DEVICES" in told


@pytest.mark.slow
def test_a_skipped_test_of_a_gpu_is_a_failure_and_any_other_is_not(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, has_gpu=True)
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 2 errors" in done.stdout
    assert "must not be skipped. Skipped: there is no pynvml" in done.stdout
    assert "must not be skipped. Skipped: by its mark" in done.stdout
    assert "must not be skipped. Skipped: could not import 'no_such_package'" in done.stdout


@pytest.mark.slow
def test_where_no_gpu_is_required_tests_of_it_may_be_skipped(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, has_gpu=False, require=False)
    assert done.returncode == 0
    assert "1 passed, 4 skipped" in done.stdout
