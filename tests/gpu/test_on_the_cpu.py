"""The checks that have a meaning on the CPU pass there: they are not first tried where a GPU is at hand."""

import re
from pathlib import Path

import pytest
from tests.gpu.children import run_child

CODE = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.mark.slow
def test_the_checks_pass_on_the_cpu() -> None:
    folder = Path(__file__).parent
    flags = ["-q", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider"]
    done = run_child(CODE, *flags, folder, CHECK_DEVICE="cpu", REQUIRE_GPU="0", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 45
