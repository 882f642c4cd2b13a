import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import TensorEntry, read_header
from sigmascope.errors import CheckpointError

WriteRaw = Callable[..., Path]


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_a_file_of_the_safetensors_library_is_described_as_it_describes_itself(
    tmp_path: Path, weights: dict[str, Tensor]
) -> None:
    path = tmp_path / "x.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    header = read_header(path)
    with safe_open(path, "pt") as theirs:
        assert set(header.tensors) == set(theirs.keys())
        assert header.metadata == theirs.metadata()
        for name, found in header.tensors.items():
            view = theirs.get_slice(name)
            assert (found.dtype, list(found.shape)) == (view.get_dtype(), view.get_shape())
    assert header.file_bytes == path.stat().st_size
    assert header.parameters == sum(tensor.numel() for tensor in weights.values())


def test_a_header_that_was_read_before_is_as_the_file_has_it_now(write_raw: WriteRaw) -> None:
    path = write_raw({"__metadata__": {"by": "x"}, "a": entry(0, 4)}, b"1234")
    first = read_header(path)
    first.metadata["by"] = "a caller"  # type: ignore[index]
    first.tensors.clear()  # type: ignore[attr-defined]
    again = read_header(path)
    assert (dict(again.metadata), list(again.tensors)) == ({"by": "x"}, ["a"])
    write_raw({"__metadata__": {"by": "y"}, "b": entry(0, 4)}, b"1234")
    assert (dict(read_header(path).metadata), list(read_header(path).tensors)) == ({"by": "y"}, ["b"])
    write_raw({"__metadata__": {"by": "y"}, "b": entry(0, 4)}, b"123")
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)


def test_entries_come_in_the_order_of_their_bytes(write_raw: WriteRaw) -> None:
    header = read_header(write_raw({"b": entry(4, 6), "a": entry(0, 4)}, b"123456"))
    assert list(header.tensors.values()) == [
        TensorEntry("a", "U8", (4,), 0, 4),
        TensorEntry("b", "U8", (2,), 4, 6),
    ]


def test_a_header_may_end_in_spaces(write_raw: WriteRaw) -> None:
    text = json.dumps({"a": entry(0, 1)}).encode() + b" " * 1000
    assert read_header(write_raw(text, b"1")).data_start == 8 + len(text)


def test_a_file_without_tensors_is_sound(write_raw: WriteRaw) -> None:
    assert read_header(write_raw({"__metadata__": {"a": "b"}})).metadata == {"a": "b"}


def test_truncation_is_told_with_both_sizes_and_what_to_do(write_raw: WriteRaw) -> None:
    path = write_raw({"a": entry(0, 100)}, b"x" * 60)
    with pytest.raises(
        CheckpointError, match=r"made.safetensors: .*promises 100 bytes.*has 60\. Download it again"
    ):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 2), "b": entry(1, 3)}, b"123", "'b' overlaps 'a'"),
        ({"a": entry(0, 1), "b": entry(2, 3)}, b"123", "1 bytes between 'a' and 'b'"),
        ({"a": entry(1, 3)}, b"123", "1 bytes between the header and 'a'"),
        ({"a": entry(0, 2)}, b"123", "1 bytes after the last tensor"),
        ({"a": entry(0, 4, [2], "F32")}, b"1234", r"'a': F32 of shape \[2\] takes 8 bytes, its range has 4"),
        ({"a": entry(0, 4, [-4])}, b"1234", r"'a': the shape \[-4\]"),
        ({"a": entry(0, 4, dtype="F128")}, b"1234", "'a': unknown dtype 'F128'"),
        ({"a": entry(4, 0, [4])}, b"1234", r"'a': data_offsets \[4, 0\]"),
        ({"a": {"dtype": "U8", "shape": [1]}}, b"1", "'a': the header must give exactly"),
        ({"__metadata__": {"epoch": 3}}, b"", "metadata 'epoch' is not a text but 3"),
        (b'{"a": {}, "a": {}}', b"", "names 'a' twice"),
        (b'{"a": ', b"", "not valid JSON"),
    ],
)
def test_each_fault_is_named_with_its_key(
    write_raw: WriteRaw, header: object, data: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_header(write_raw(header, data))


def test_a_shape_beyond_the_file_is_refused_without_allocating(write_raw: WriteRaw) -> None:
    path = write_raw({"a": entry(0, 2**62, [2**62])}, b"1234")
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="truncated"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 4096])
def test_a_header_length_beyond_the_file_is_refused(write_raw: WriteRaw, length: int) -> None:
    with pytest.raises(CheckpointError, match=r"truncated|limit"):
        read_header(write_raw({"a": entry(0, 1)}, b"1", length=length))


def test_deeply_nested_json_is_refused(write_raw: WriteRaw) -> None:
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_header(write_raw(b'{"a":' + b"[" * 200_000))


def test_an_endless_key_does_not_fill_the_message(write_raw: WriteRaw) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(write_raw({"k" * 100_000: 1}))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc\0", "only 4 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer.*git lfs pull"),
        (b"<!doctype html><title>Log in</title>", "web page.*direct link"),
        (b"Repository not found", "text file"),
        (b"PK\x03\x04" + b"\0" * 60, "zip archive.*name it .ckpt"),
        (b"\0" * 64, "no JSON header"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_a_missing_file_and_a_folder_are_checkpoint_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


def test_no_tensor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(2**20)}, path)
    tracemalloc.start()
    read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**18
