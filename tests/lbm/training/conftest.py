"""A training at the smallest size, in a folder of the test's own."""

import shutil
from pathlib import Path

import pytest
from tests.lbm.training.small_run import SmallRun, write_small_run


@pytest.fixture(scope="session")
def small_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_run(tmp_path_factory.mktemp("small")).folder


@pytest.fixture
def small_run(small_files: Path, tmp_path: Path) -> SmallRun:
    shutil.copytree(small_files, tmp_path / "run")
    return SmallRun(tmp_path / "run")
