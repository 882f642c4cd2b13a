import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_index(folder: Path, weight_map: object, **more: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map, **more}))
    return path


@pytest.fixture
def weight_map(tmp_path: Path, weights: dict[str, Tensor]) -> dict[str, str]:
    """Two shards that the safetensors library wrote, and which key is where."""
    where = {name: SHARDS[number % 2] for number, name in enumerate(weights)}
    for shard in SHARDS:
        save_file({n: t.contiguous() for n, t in weights.items() if where[n] == shard}, tmp_path / shard)
    return where


def test_shards_read_as_one(
    tmp_path: Path,
    weights: dict[str, Tensor],
    weight_map: dict[str, str],
    same_bytes: Callable[[Tensor, Tensor], bool],
) -> None:
    index = write_index(tmp_path, weight_map, metadata={"total_size": 123, "format": "pt"})
    for path in (index, tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.path == index
            assert checkpoint.format == "safetensors"
            assert checkpoint.metadata == {"total_size": "123", "format": "pt"}
            assert checkpoint.keys() == list(weight_map)
            assert all(same_bytes(checkpoint.tensor(name), weights[name]) for name in weights)


def test_a_missing_shard_is_named(tmp_path: Path, weight_map: dict[str, str]) -> None:
    index = write_index(tmp_path, weight_map)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(
        CheckpointError, match=r"index\.json: names the shard 'model-00002-of-00002.*not there"
    ):
        open_checkpoint(index)


def test_an_index_that_names_no_possible_file_is_refused_by_its_own_name(tmp_path: Path) -> None:
    index = write_index(tmp_path, {"a": "x" * 5000})
    with pytest.raises(CheckpointError, match=r"index\.json: names the shard 'x+….* not there") as caught:
        open_checkpoint(index)
    assert len(str(caught.value)) < 1000


def test_a_damaged_shard_is_named(tmp_path: Path, weight_map: dict[str, str]) -> None:
    index = write_index(tmp_path, weight_map)
    content = (tmp_path / SHARDS[1]).read_bytes()
    (tmp_path / SHARDS[1]).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: is truncated"):
        open_checkpoint(index)


def test_a_key_that_its_shard_lacks_is_named(tmp_path: Path, weight_map: dict[str, str]) -> None:
    index = write_index(tmp_path, {**weight_map, "gone": SHARDS[0]})
    with pytest.raises(CheckpointError, match="lists 'gone' in model-00001-of-00002"):
        open_checkpoint(index)


def test_a_key_that_the_index_lacks_is_listed_as_skipped(tmp_path: Path, weight_map: dict[str, str]) -> None:
    del weight_map["num_iterations"]
    with open_checkpoint(write_index(tmp_path, weight_map)) as checkpoint:
        assert list(checkpoint.skipped) == ["num_iterations"]


def test_the_loss_network_is_left_out_of_shards_too(tmp_path: Path) -> None:
    save_file({"lpips_loss.x": torch.zeros(1), "a": torch.zeros(1)}, tmp_path / SHARDS[0])
    index = write_index(tmp_path, {"lpips_loss.x": SHARDS[0], "a": SHARDS[0]})
    with open_checkpoint(index) as checkpoint:
        assert (checkpoint.keys(), list(checkpoint.skipped)) == (["a"], ["lpips_loss.x"])


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "C:\\x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
    ],
)
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"puts 'a' in .* which is not a file in this folder"):
        open_checkpoint(write_index(folder, {"a": name}))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"weight_map": 3}', b'{"weight_map": {}}', b"\xff", b"[" * 100_000]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [3, None, ["x"], {}])
def test_a_shard_name_must_be_text(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="puts 'a' in"):
        open_checkpoint(write_index(tmp_path, {"a": value}))


def test_shards_are_closed_with_the_index(tmp_path: Path, weight_map: dict[str, str]) -> None:
    with open_checkpoint(write_index(tmp_path, weight_map)) as checkpoint:
        pass
    with pytest.raises(CheckpointError, match="closed already"):
        checkpoint.tensor("num_iterations")
