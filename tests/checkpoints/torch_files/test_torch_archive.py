"""The streamed file against what `torch.save` writes and what `torch.load` and `zipfile` make of it."""

import re
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import StreamingTorchWriter, TensorSpec, open_checkpoint
from sigmascope.errors import CheckpointError, WriteError

TENSORS: dict[str, Tensor] = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 2, 2),
    "half": torch.tensor([1.5, -2.0, 0.1], dtype=torch.float16),
    "brain.weight": torch.linspace(-3, 3, 35).reshape(5, 1, 7).to(torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "empty": torch.zeros(0, 3),
    "counts": torch.arange(5),
    "flags": torch.tensor([True, False]),
}


class InterruptingTensor(Tensor):
    """Ctrl-C while its bytes are read."""

    def detach(self) -> Tensor:
        raise KeyboardInterrupt


def specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    with StreamingTorchWriter(path, specs(tensors)) as writer:
        for name in reversed(tensors):  # any order
            writer.write(name, tensors[name])
    return path


@pytest.mark.parametrize("options", [{}, {"mmap": True}])
def test_torch_loads_what_was_written(tmp_path: Path, options: dict[str, Any]) -> None:
    loaded = torch.load(write(tmp_path / "model.ckpt", TENSORS), weights_only=True, **options)
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].stride() == tensor.stride()
        assert torch.equal(loaded[name], tensor), name


def test_the_description_is_the_one_that_torch_save_writes(tmp_path: Path) -> None:
    write(tmp_path / "ours.ckpt", TENSORS)
    torch.save(TENSORS, tmp_path / "theirs.ckpt")
    with zipfile.ZipFile(tmp_path / "ours.ckpt") as ours, zipfile.ZipFile(tmp_path / "theirs.ckpt") as theirs:
        assert ours.read("archive/data.pkl") == theirs.read("theirs/data.pkl")
        for number in range(len(TENSORS)):
            assert ours.read(f"archive/data/{number}") == theirs.read(f"theirs/data/{number}")


def test_the_archive_is_sound_and_its_tensors_aligned(tmp_path: Path) -> None:
    path = write(tmp_path / "model.ckpt", TENSORS)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert [tensor.data_ptr() % 64 for tensor in mapped.values()] == [0] * len(TENSORS)


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first.ckpt", TENSORS), write(tmp_path / "second.ckpt", TENSORS)
    assert first.read_bytes() == second.read_bytes()


def test_strided_tensors_are_written_by_their_elements(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    loaded = torch.load(write(tmp_path / "model.ckpt", {"turned": turned}), weights_only=True)
    assert torch.equal(loaded["turned"], turned)
    assert loaded["turned"].is_contiguous()


def test_an_error_inside_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write(path, TENSORS | {"empty": torch.zeros(0, 3).as_subclass(InterruptingTensor)})
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("model.ckpt", b"before")]


def test_a_tensor_that_was_not_written_is_an_error_and_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(WriteError, match=r"model\.ckpt.*6 tensors were not written, first 'brain\.weight'"),
        StreamingTorchWriter(tmp_path / "model.ckpt", specs(TENSORS)) as writer,
    ):
        writer.write("half", TENSORS["half"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("half", torch.zeros(3), r"'half' is torch\.float32 \[3\], but the list says torch\.float16 \[3\]"),
        ("half", torch.zeros(4, dtype=torch.float16), r"'half' is torch\.float16 \[4\], but the list says"),
        ("other", torch.zeros(3), "'other' was not in the list"),
    ],
)
def test_a_tensor_other_than_announced_is_refused(
    tmp_path: Path, name: str, tensor: Tensor, said: str
) -> None:
    with (
        pytest.raises(WriteError, match=said),
        StreamingTorchWriter(tmp_path / "model.ckpt", specs(TENSORS)) as writer,
    ):
        writer.write(name, tensor)
    assert not list(tmp_path.iterdir())


def test_a_type_that_is_not_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"'scales' is of torch\.complex64"):
        StreamingTorchWriter(tmp_path / "model.ckpt", {"scales": TensorSpec(torch.complex64, (2,))})


@pytest.mark.parametrize("place", range(6))
def test_a_name_that_is_no_utf_8_is_damage_or_nothing(tmp_path: Path, place: int) -> None:
    """Each member has its name twice: before its data and in the list at the end."""
    path = tmp_path / "model.ckpt"
    torch.save({"layer.weight": torch.ones(2, 2)}, path)
    data = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 7), (b"PK\x01\x02", 9)):  # where the bit says UTF-8
        for begin in [found.start() for found in re.finditer(re.escape(mark), data)]:
            data[begin + flags] |= 8
    names = [found.start() for found in re.finditer(rb"model/(byteorder|version|data.pkl)", data)]
    data[names[place]] = 0xFF
    path.write_bytes(data)
    is_read = True
    try:
        torch.load(path, weights_only=True, mmap=True)
        zipfile.ZipFile(path).close()
    except (RuntimeError, UnicodeDecodeError):
        is_read = False
    refused = nullcontext() if is_read else pytest.raises(CheckpointError, match="damaged")
    with refused, open_checkpoint(path) as checkpoint:
        assert checkpoint.tensor("layer.weight").sum() == 4
