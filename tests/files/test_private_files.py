"""What may hold a prompt is for its owner alone; what a user makes has the mode that the umask gives."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import sigmascope
from sigmascope.checkpoints import save_safetensors
from sigmascope.monitor import Recorder
from sigmascope.records.run import Run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX permission bits")


@pytest.fixture(params=[0o022, 0o000], ids=["022", "000"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    mask: int = request.param
    before = os.umask(mask)
    yield mask
    os.umask(before)


def run() -> Run:
    recorder = Recorder(sample_hz=None)
    with recorder.stage("denoising"):
        pass
    return recorder.run()


PRIVATE: dict[str, Callable[[Path], object]] = {
    "a run": lambda path: run().save(path),
    "a trace": lambda path: run().to_trace(path),
    "a dump": lambda path: sigmascope.save_tensors(path, torch.ones(1)),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_what_may_hold_a_prompt_is_private(kind: str, umask: int, tmp_path: Path) -> None:
    for _ in range(2):
        PRIVATE[kind](tmp_path / "file")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
        (tmp_path / "file").chmod(0o644)


def test_a_folder_of_dumps_has_private_files(umask: int, tmp_path: Path) -> None:
    sigmascope.TensorDumps(tmp_path).save("positive", torch.ones(1), prompt="a red fox")
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert len(modes) == 2
    assert set(modes.values()) == {0o600}


def test_weights_keep_the_umask_s_mode(umask: int, tmp_path: Path) -> None:
    save_safetensors(tmp_path / "lora.safetensors", {"a": torch.ones(1)})
    assert (tmp_path / "lora.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
