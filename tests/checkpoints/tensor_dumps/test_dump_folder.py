import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sigmascope import TensorDumps
from sigmascope.checkpoints.tensor_dumps import INDEX_NAME
from sigmascope.errors import CheckpointError, ConfigError, WriteError


def one(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


def save_many(folder: Path, values: range) -> None:
    for value in values:
        TensorDumps(folder).save("positive", one(float(value)))


def test_a_saved_dump_is_listed_and_read(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path / "run" / "dumps", run_id="r7")
    path = dumps.save("positive", one(3), encoder="CLIP-L")
    assert path == tmp_path / "run" / "dumps" / "positive.safetensors"
    [entry] = dumps.index
    assert (entry.name, entry.file, dict(entry.tensors)) == ("positive", path.name, {"x": (1,)})
    assert entry.saved_at is not None
    assert dumps["positive"]["x"].item() == 3
    assert (dumps.metadata("positive").run_id, dumps.metadata("positive").encoder) == ("r7", "CLIP-L")


def test_a_name_used_again_gets_a_number(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    for value in range(3):
        dumps.save("positive", one(float(value)))
    assert list(dumps) == ["positive", "positive-2", "positive-3"]
    assert dumps["positive-3"]["x"].item() == 2


@pytest.mark.parametrize("name", ["a/b", "../up", "ü ber", "", ".", "x" * 300])
def test_any_name_is_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    dumps = TensorDumps(tmp_path / "d")
    assert dumps.save(name, one(1)).parent == tmp_path / "d"
    assert list(dumps) == [name]


def test_the_order_is_that_of_saving(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    for name in ("z", "a", "m"):
        dumps.save(name, one(0))
    assert [entry.name for entry in dumps.index] == ["z", "a", "m"]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert len(TensorDumps(tmp_path / "none")) == 0
    assert not (tmp_path / "none").exists()


def test_a_dump_that_the_index_lacks_is_read_from_its_header(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    dumps.save("a/b", one(5))
    (tmp_path / INDEX_NAME).unlink()
    [entry] = dumps.index
    assert (entry.name, entry.saved_at, dict(entry.tensors)) == ("a/b", None, {"x": (1,)})


@pytest.mark.parametrize("size", ["Infinity", "1e999", "[" * 100_000])
def test_a_line_with_an_impossible_size_costs_only_its_time(size: str, tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    dumps.save("first", torch.ones(2))
    line = f'{{"name": "first", "file": "first.safetensors", "saved_at": "", "tensors": {{"x": [{size}]}}}}'
    (tmp_path / INDEX_NAME).write_text(line)
    [entry] = dumps.index
    assert (entry.name, entry.saved_at, list(entry.tensors.values())) == ("first", None, [(2,)])


def test_a_torn_line_of_the_index_costs_only_its_time(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    dumps.save("first", one(1))
    index = tmp_path / INDEX_NAME
    index.write_bytes(index.read_bytes()[:-20])
    dumps.save("second", one(2))
    assert {entry.name: entry.saved_at is None for entry in dumps.index} == {"second": False, "first": True}


def test_a_name_that_a_killed_process_reserved_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "positive.safetensors").touch()
    dumps = TensorDumps(tmp_path)
    dumps.save("positive", one(1))
    assert list(dumps) == ["positive-2"]


def test_a_dump_that_cannot_be_written_leaves_no_name_behind(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    with pytest.raises(WriteError):
        dumps.save("x", {"x": torch.eye(2).to_sparse()})
    with pytest.raises(ConfigError):
        dumps.save("x", {})
    assert list(tmp_path.iterdir()) == []


def test_a_deleted_dump_is_not_listed(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    dumps.save("x", one(1)).unlink()
    assert len(dumps) == 0


def test_threads_save_side_by_side(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda start: save_many(tmp_path, range(start, start + 4)), range(0, 32, 4)))
    dumps = TensorDumps(tmp_path)
    assert sorted(dumps[name]["x"].item() for name in dumps) == list(range(32))
    assert all(entry.saved_at for entry in dumps.index)


def test_processes_save_side_by_side(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork") if hasattr(__import__("os"), "fork") else None
    if context is None:
        pytest.skip("no fork here")
    workers = [context.Process(target=save_many, args=(tmp_path, range(k, k + 4))) for k in (0, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    dumps = TensorDumps(tmp_path)
    assert sorted(dumps[name]["x"].item() for name in dumps) == list(range(8))


def test_files_from_elsewhere_are_named_by_their_files(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "theirs.safetensors")
    assert list(TensorDumps(tmp_path)) == ["theirs"]


def test_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path)
    dumps.save("positive", one(1))
    with pytest.raises(CheckpointError, match="positive"):
        dumps.load("negative")
    with pytest.raises(KeyError):
        dumps["negative"]


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        _ = TensorDumps(tmp_path / "file").index
    with pytest.raises(WriteError):
        TensorDumps(tmp_path / "file").save("x", one(1))


def test_prompts_of_a_folder_are_private_as_it_says(tmp_path: Path) -> None:
    dumps = TensorDumps(tmp_path, prompt_privacy="none")
    path = dumps.save("x", one(1), prompt="a vermilion macaw")
    assert dumps.metadata("x").prompts == {}
    assert b"macaw" not in path.read_bytes() + (tmp_path / INDEX_NAME).read_bytes()


def test_a_dump_saved_and_deleted_later_is_seen(tmp_path: Path) -> None:
    dumps, other = TensorDumps(tmp_path), TensorDumps(tmp_path)
    first = other.save("a", {"x": torch.ones(1)})
    assert dumps["a"]["x"] == 1
    other.save("b", {"x": torch.zeros(1)})
    assert dumps["b"]["x"] == 0
    first.unlink()
    with pytest.raises(KeyError):
        dumps["a"]


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next_that_saves(tmp_path: Path) -> None:
    code = """
import os, sys, torch
from sigmascope import TensorDumps
from sigmascope.checkpoints import tensor_dumps

def killed(path, tensors, header, **options):
    from sigmascope.files import temporary_name
    path.with_name(temporary_name(path)).write_bytes(b"half")
    os._exit(9)

tensor_dumps.save_safetensors = killed
TensorDumps(sys.argv[1]).save("a", torch.ones(2))
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert any(file.suffixes[-2:] == [".tmp", ".safetensors"] for file in tmp_path.iterdir())
    dumps = TensorDumps(tmp_path)
    dumps.save("a", torch.ones(2))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "a-2.safetensors",
        "a.safetensors",
        INDEX_NAME,
    ]
    assert list(dumps) == ["a-2"]


def test_a_folder_that_no_system_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="dumps cannot be written"):
        TensorDumps(tmp_path / "nul\0").save("first", torch.ones(2))
