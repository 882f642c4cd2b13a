import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import TensorInfo, open_checkpoint, save_safetensors
from sigmascope.errors import CheckpointError

SameBytes = Callable[[Tensor, Tensor], bool]
WriteRaw = Callable[..., Path]


@pytest.fixture
def path(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    """A file that the safetensors library wrote."""
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(contiguous, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def test_tensors_are_those_that_the_safetensors_library_wrote(
    path: Path, weights: dict[str, Tensor], same_bytes: SameBytes
) -> None:
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) == set(weights)
        assert all(same_bytes(checkpoint.tensor(name), weights[name]) for name in weights)


def test_what_a_checkpoint_says_of_itself(path: Path, weights: dict[str, Tensor]) -> None:
    with open_checkpoint(str(path)) as checkpoint:
        assert (checkpoint.path, checkpoint.format, checkpoint.metadata) == (
            path,
            "safetensors",
            {"format": "pt"},
        )
        assert len(checkpoint) == len(checkpoint.keys()) == len(weights)
        assert "num_iterations" in checkpoint
        assert "x" not in checkpoint
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in weights.values())
        assert checkpoint.skipped == {}
        expected = TensorInfo("denoiser.to_q.weight", (6, 4), torch.float32, 96)
        assert checkpoint.info("denoiser.to_q.weight") == expected


def test_each_read_gives_memory_of_its_own(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        checkpoint.tensor("num_iterations").fill_(99)
        assert checkpoint.tensor("num_iterations").item() == 7


def test_tensors_outlive_the_file(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        tensor = checkpoint.tensor("num_iterations")
    path.unlink()
    assert tensor.item() == 7


def test_threads_may_read_at_once(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.safetensors", {str(i): torch.full((1000,), float(i)) for i in range(50)})
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: checkpoint.tensor(str(i)).tolist(), range(50)))
    assert found == [[float(i)] * 1000 for i in range(50)]


def test_a_missing_key_is_told_with_the_nearest(path: Path) -> None:
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(
            CheckpointError, match=r"x\.safetensors: has no key 'denoiser.to_k.weight'.*to_q\.weight"
        ),
    ):
        checkpoint.tensor("denoiser.to_k.weight")


def test_reading_after_closing_is_an_error(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        pass
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed already"):
        checkpoint.tensor("num_iterations")


def test_a_file_cut_short_while_open_is_an_error_and_no_crash(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        last = checkpoint.keys()[-1]
        os.truncate(path, path.stat().st_size - 2)
        with pytest.raises(CheckpointError, match="cut short while it was open"):
            checkpoint.tensor(last)


def test_a_disk_that_fails_is_a_checkpoint_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("sigmascope.checkpoints.checkpoint._read_at", failing)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(CheckpointError, match=r"'num_iterations' cannot be read \(Input/output error\)"),
    ):
        checkpoint.tensor("num_iterations")


def test_reading_works_without_pread(
    path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, same_bytes: SameBytes
) -> None:
    monkeypatch.delattr("os.preadv")
    with open_checkpoint(path) as checkpoint:
        assert all(same_bytes(checkpoint.tensor(name), weights[name]) for name in weights)


def test_large_tensors_are_read_in_several_calls(
    path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, same_bytes: SameBytes
) -> None:
    monkeypatch.setattr("sigmascope.checkpoints.checkpoint._MAX_READ_BYTES", 5)
    with open_checkpoint(path) as checkpoint:
        assert all(same_bytes(checkpoint.tensor(name), weights[name]) for name in weights)


def test_a_tensor_at_an_odd_offset_is_read(write_raw: WriteRaw) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    path = write_raw(header, b"\x01" + torch.tensor([2.5]).numpy().tobytes())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("b").item() == 2.5


def test_a_type_that_pytorch_lacks_is_skipped_with_the_reason(write_raw: WriteRaw) -> None:
    header = {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    with open_checkpoint(write_raw(header, b"123")) as checkpoint:
        assert checkpoint.keys() == []
        assert checkpoint.skipped["a"].startswith("is of type F6_E2M3")
        with pytest.raises(CheckpointError, match="'a' cannot be read: it is of type F6_E2M3"):
            checkpoint.tensor("a")


def test_the_loss_network_of_a_training_checkpoint_is_left_out(tmp_path: Path) -> None:
    tensors = {"lpips_loss.net.weight": torch.zeros(2), "denoiser.weight": torch.zeros(2)}
    save_safetensors(tmp_path / "x.safetensors", tensors)
    with open_checkpoint(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.keys() == ["denoiser.weight"]
        assert list(checkpoint.skipped) == ["lpips_loss.net.weight"]
