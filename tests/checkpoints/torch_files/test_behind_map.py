"""Tensors of a mapped file are read beside the mapping, with the same bits."""

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.checkpoints.torch_files import Area, PickleCheckpoint, areas_of

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def with_byte_order(path: Path, order: str | None) -> Path:
    """The same archive, under another name for its byte order, or without one."""
    changed = path.with_name(f"changed {path.name}")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if not member.filename.endswith("/byteorder"):
                new.writestr(member, content)
            elif order is not None:
                new.writestr(member, order.encode())
    return changed


@pytest.mark.parametrize("name", ["x.ckpt", "a b\nü 🜚.ckpt", "x (deleted)"])
def test_every_kind_of_tensor_is_read_with_the_same_bits(
    tmp_path: Path, same_bytes: Callable[[Tensor, Tensor], bool], name: str
) -> None:
    shared = torch.arange(60.0).reshape(6, 10)
    state = {
        "whole": shared,
        "a row of it": shared[3],
        "columns": shared[:, 2:5],
        "turned": shared.T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "bf16": torch.randn(7).bfloat16(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "imaginary": torch.randn(3, dtype=torch.complex64).conj().imag,
        "expanded": torch.tensor([4]).expand(5),
    }
    path = tmp_path / name
    torch.save(state, path)
    with PickleCheckpoint(path) as checkpoint:
        for key, tensor in state.items():
            assert same_bytes(checkpoint.tensor(key), tensor.resolve_conj().resolve_neg()), key


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("order", ["big", "little", None])
def test_bytes_that_pytorch_turns_round_are_turned_round(tmp_path: Path, order: str | None) -> None:
    torch.save({"a": torch.arange(9.0), "b": torch.arange(9, dtype=torch.int16)}, tmp_path / "x.ckpt")
    path = with_byte_order(tmp_path / "x.ckpt", order)
    expected = torch.load(path, weights_only=True)
    with open_checkpoint(path) as checkpoint:
        for key, tensor in expected.items():
            assert torch.equal(checkpoint.tensor(key), tensor)


@linux_only
@pytest.mark.parametrize("into", [False, True])
def test_reading_leaves_the_mapping_untouched(tmp_path: Path, into: bool) -> None:
    path = tmp_path / "x.ckpt"
    state = {str(number): torch.full((1 << 20,), float(number)) for number in range(8)}
    torch.save(state, path)
    buffer = torch.empty(1 << 22, dtype=torch.uint8)
    with open_checkpoint(path) as checkpoint:
        for key, tensor in state.items():
            read = checkpoint.tensor_into(key, buffer) if into else checkpoint.tensor(key)
            assert torch.equal(read, tensor)
        assert resident_bytes(path) < path.stat().st_size / 8
        assert sorted(checkpoint) == sorted(state)


@linux_only
def test_a_file_that_took_its_place_is_not_read_for_it(tmp_path: Path) -> None:
    path, other = tmp_path / "x.ckpt", tmp_path / "other.ckpt"
    torch.save({"a": torch.ones(2000)}, path)
    torch.save({"a": torch.zeros(2000)}, other)
    with open_checkpoint(path) as checkpoint:
        other.replace(path)
        assert torch.equal(checkpoint.tensor("a"), torch.ones(2000))


def test_only_lines_of_the_file_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a b"
    path.touch()
    name = bytes(path.resolve())
    lines = [
        b"1000-3000 rw-p 00000000 00:00 0\n",
        b"4000-6000 r--p 00002000 fe:00 77     " + name + b"\n",
        b"7000-8000 r--p 00000000 fe:00 78     " + name + b" (deleted)\n",
        b"9000-a000 r--p 00000000 fe:00 79     /other" + name + b"\n",
    ]
    assert list(areas_of(path, lines)) == [Area(0x4000, 0x6000, 0x2000)]


def resident_bytes(path: Path) -> int:
    """How much of a mapped file is in memory, as the system tells."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            inside = line.endswith(str(path.resolve()))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
