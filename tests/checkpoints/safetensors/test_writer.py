import errno
import json
import os
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from torch import Tensor

from sigmascope.checkpoints import (
    SizeWriter,
    StreamingWriter,
    open_checkpoint,
    read_header,
    safetensors,
    save_safetensors,
)
from sigmascope.checkpoints.safetensors import TORCH_DTYPES, write_all
from sigmascope.errors import WriteError

SameBytes = Callable[[Tensor, Tensor], bool]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of any bits (of 0 and 1 for bool)."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.reshape(-1).view(dtype).reshape(shape)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write(path: Path, tensors: dict[str, Tensor], header_bytes: int | None = None) -> bytes:
    with StreamingWriter(path, {"a": "b"}, header_bytes=header_bytes) as target:
        for name, tensor in tensors.items():
            target.write(name, tensor)
    return path.read_bytes()


def write_in_turn(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    with StreamingWriter(path) as target:
        for name, tensor in tensors:
            target.write(name, tensor)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), SHAPES), max_size=8),
    room=st.sampled_from([0, 100, 5000]),
    seed=st.integers(0, 2**31),
)
def test_every_type_and_shape_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, tuple[int, ...]]], room: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("trip") / "x.safetensors"
    tensors = {
        f"key {number} ü": random_tensor(TORCH_DTYPES[code], shape or (() if code != "F4" else (1,)), seed)
        for number, (code, shape) in enumerate(kinds)
    }
    write(path, tensors, header_bytes=room)
    theirs = load_file(path)
    with open_checkpoint(path) as ours:
        assert set(ours.keys()) == set(tensors) == set(theirs)
        for name, tensor in tensors.items():
            for found in (ours.tensor(name), theirs[name]):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert bits(found) == bits(tensor)


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_the_file_reads_the_same_through_the_safetensors_library(
    tmp_path: Path, weights: dict[str, Tensor], same_bytes: SameBytes
) -> None:
    save_safetensors(tmp_path / "x.safetensors", weights, {"format": "pt"})
    theirs = load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == weights.keys()
    assert all(same_bytes(theirs[name], weights[name]) for name in weights)


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write(tmp_path / "x.safetensors", weights)
    header = read_header(tmp_path / "x.safetensors")
    assert header.data_start % 8 == 0
    for name, entry in header.tensors.items():
        assert entry.begin % weights[name].element_size() == 0


@pytest.mark.parametrize("room", [0, 8, 400, 10_000])
def test_the_bytes_do_not_depend_on_the_room_when_the_header_has_to_move(
    tmp_path: Path, weights: dict[str, Tensor], room: int
) -> None:
    save_safetensors(tmp_path / "whole.safetensors", weights, {"a": "b"})
    streamed = write(tmp_path / "streamed.safetensors", weights, header_bytes=room)
    assert streamed == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_moving_the_data_in_pieces_keeps_it(
    tmp_path: Path, weights: dict[str, Tensor], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(tmp_path / "x.safetensors", weights)
    monkeypatch.setattr(safetensors, "_COPY_BYTES", piece)
    assert write(tmp_path / "y.safetensors", weights, header_bytes=0) == whole
    assert write(tmp_path / "z.safetensors", weights, header_bytes=2000) == whole


def test_much_data_keeps_the_room_that_was_reserved(tmp_path: Path, same_bytes: SameBytes) -> None:
    tensor = torch.randn(1000, 100)
    write(tmp_path / "x.safetensors", {"x": tensor}, header_bytes=2000)
    assert read_header(tmp_path / "x.safetensors").data_start == 2008
    assert same_bytes(load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_expected_names_reserve_their_room(tmp_path: Path) -> None:
    keys = [f"layer.{number}" for number in range(50)]
    with StreamingWriter(tmp_path / "x.safetensors", expected=keys) as target:
        for key in keys:
            target.write(key, torch.zeros(64, 128))
    assert read_header(tmp_path / "x.safetensors").data_start > 50 * 100
    assert load_file(tmp_path / "x.safetensors").keys() == set(keys)


def test_tensors_that_wait_may_outgrow_memory(
    tmp_path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(tmp_path / "x.safetensors", weights)
    monkeypatch.setattr(safetensors, "_SPOOL_MEMORY_BYTES", 4)
    assert write(tmp_path / "y.safetensors", weights) == whole
    assert names(tmp_path) == ["x.safetensors", "y.safetensors"]


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    save_safetensors(tmp_path / "x.safetensors", {"a": tied, "b": tied[1:]})
    assert load_file(tmp_path / "x.safetensors")["b"].tolist() == [1.0, 2.0, 3.0]


def test_nothing_at_all_is_a_sound_file(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.safetensors", {})
    assert load_file(tmp_path / "x.safetensors") == {}


def test_metadata_comes_back(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.safetensors", {}, {"ss_title": "naïve <b>"})
    assert read_header(tmp_path / "x.safetensors").metadata == {"ss_title": "naïve <b>"}


def test_metadata_that_is_not_text_is_refused_before_writing(tmp_path: Path) -> None:
    metadata = json.loads('{"title": "x", "rank": 32}')
    with pytest.raises(WriteError, match=r"x\.safetensors: .*'rank': 32 is not a pair of strings"):
        StreamingWriter(tmp_path / "x.safetensors", metadata)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a", torch.zeros(1), "'a' is written twice"),
        ("__metadata__", torch.zeros(1), "__metadata__"),
        ("c", torch.zeros(2, dtype=torch.complex128), "cannot hold the tensor 'c'.*complex128"),
        ("d", torch.zeros(2, 2).to_sparse(), "cannot hold the tensor 'd'.*sparse"),
        ("e", torch.zeros(2, device="meta"), "cannot hold the tensor 'e'.*meta"),
    ],
)
def test_a_tensor_that_cannot_be_written_is_named_and_nothing_stays(
    tmp_path: Path, name: str, tensor: Tensor, message: str
) -> None:
    with pytest.raises(WriteError, match=message):
        write_in_turn(tmp_path / "x.safetensors", [("a", torch.zeros(2)), (name, tensor)])
    assert names(tmp_path) == []


def test_a_tensor_that_failed_leaves_no_trace_when_the_caller_goes_on(tmp_path: Path) -> None:
    with StreamingWriter(tmp_path / "x.safetensors") as target:
        for bad in (torch.zeros(3, dtype=torch.complex128), torch.zeros(2, device="meta")):
            with pytest.raises(WriteError):
                target.write("a", bad)
        target.write("a", torch.ones(3))
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [1.0, 1.0, 1.0]


def test_a_folder_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="is a folder"):
        save_safetensors(tmp_path, {"a": torch.zeros(1)})


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "new" / "x.safetensors", {"a": torch.zeros(1)})
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.safetensors"]


def test_too_small_a_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: FreeSpace(1000))
    with pytest.raises(WriteError, match=r"x\.safetensors.*disk is full: \d+ more bytes.*1000 are free"):
        save_safetensors(tmp_path / "x.safetensors", {"a": torch.zeros(1000)})
    assert names(tmp_path) == []


def test_a_disk_that_does_not_say_what_is_free_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(_path: object) -> FreeSpace:
        raise PermissionError(13, "not told")

    monkeypatch.setattr("shutil.disk_usage", unknown)
    save_safetensors(tmp_path / "x.safetensors", {"a": torch.zeros(1000)})
    assert names(tmp_path) == ["x.safetensors"]


class FreeSpace:
    def __init__(self, free: int) -> None:
        self.free = free


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_disk_that_fills_up_leaves_the_old_file(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    calls = 0

    def failing(stream: object, data: memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(stream, data)  # type: ignore[arg-type]  # the writer's own file

    monkeypatch.setattr(safetensors, "write_all", failing)
    tensors = {"a": torch.zeros(2), "b": torch.zeros(4)}
    with pytest.raises(WriteError, match=r"x\.safetensors: the disk is full.*Free some space"):
        save_safetensors(path, tensors)
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["x.safetensors"])


def test_a_write_that_takes_only_a_part_goes_on(tmp_path: Path) -> None:
    class Slow(FileIO):
        def write(self, data: Any, /) -> int:
            return super().write(memoryview(data)[:3])

    with Slow(tmp_path / "x", "w") as stream:
        write_all(stream, memoryview(b"0123456789"))
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_really_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    path = small_disk / "x.safetensors"
    save_safetensors(path, {"a": torch.ones(1000)})
    old = path.read_bytes()
    much = ((str(number), torch.zeros(25_000)) for number in range(64))
    with pytest.raises(WriteError, match=r"disk is full: \d+ more bytes are needed"):
        write_in_turn(path, much)
    assert (path.read_bytes(), names(small_disk)) == (old, ["x.safetensors"])
    with pytest.raises(WriteError, match="disk is full"):
        save_safetensors(path, {"a": torch.ones(1_000_000)})
    assert path.read_bytes() == old


UNDECODED = os.fsdecode(b"caf\xe9")  # the name of a file that is not UTF-8


@pytest.mark.parametrize("metadata", [{"base": UNDECODED}, {UNDECODED: "x"}])
def test_metadata_that_is_not_unicode_is_a_write_error(tmp_path: Path, metadata: dict[str, str]) -> None:
    with pytest.raises(WriteError, match=r"the metadata 'caf\\udce9' cannot be written as UTF-8"):
        save_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(1)}, metadata)
    with pytest.raises(WriteError, match="the metadata"):
        StreamingWriter(tmp_path / "x.safetensors", metadata, expected=["a"])
    assert names(tmp_path) == []


def test_a_tensor_s_name_that_is_not_unicode_is_a_write_error(tmp_path: Path) -> None:
    message = r"the tensor 'caf\\udce9' cannot be written as UTF-8"
    with pytest.raises(WriteError, match=message):
        save_safetensors(tmp_path / "x.safetensors", {UNDECODED: torch.ones(1)})
    with pytest.raises(WriteError, match=message):
        write_in_turn(tmp_path / "x.safetensors", [(UNDECODED, torch.ones(1))])
    assert names(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="names are bytes on POSIX only")
def test_a_target_may_have_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    save_safetensors(tmp_path / UNDECODED, {"a": torch.ones(1)})
    with open_checkpoint(tmp_path / UNDECODED) as checkpoint:
        assert checkpoint.keys() == ["a"]


def test_a_tensor_is_written_again_in_its_place_wherever_it_waits(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    three = torch.tensor(
        [1.0, 2.0, 3.0], dtype=torch.float16
    )  # six bytes, which wait for the end of the file
    four = torch.tensor([1.0, 2.0, 3.0, 4.0])
    with StreamingWriter(path) as writer:
        writer.write("three", three)
        writer.write("four", four)
        writer.write("other three", three)
        for name in ("three", "four"):
            writer.rewrite(name, lambda old: old * 2)
        writer.rewrite("four", lambda old: old + 1)
        writer.write("last", four)
        writer.write("last three", three)
    expected = {
        "three": three * 2,
        "four": four * 2 + 1,
        "other three": three,
        "last": four,
        "last three": three,
    }
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("header_bytes", [None, 0])
def test_a_size_is_told_before_anything_is_written(tmp_path: Path, header_bytes: int | None) -> None:
    tensors = {
        "odd": torch.zeros(3, dtype=torch.float16),
        "even": torch.zeros(8, 5),
        "byte": torch.zeros(5, dtype=torch.uint8),
        "number": torch.tensor(2.0),
    }

    def size(kind: type[StreamingWriter], path: Path) -> int:
        with kind(path, {"a": "b"}, tensors, header_bytes) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.rewrite("odd", torch.ones_like)
            writer.update_metadata({"late": "ü" * 3000})
        return writer.file_bytes

    written, measured = tmp_path / "written.safetensors", tmp_path / "measured.safetensors"
    assert size(SizeWriter, measured) == size(StreamingWriter, written) == written.stat().st_size
    assert list(tmp_path.iterdir()) == [written]
