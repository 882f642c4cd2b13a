import collections
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from sigmascope.checkpoints.torch_files import foreign_globals


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_names_are_found_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps([Path, collections.Counter, Path], protocol))
    assert foreign_globals(path) == [f"{Path.__module__}.Path", "collections.Counter"]


@pytest.mark.parametrize("zipped", [True, False])
def test_what_tensors_need_is_not_foreign(tmp_path: Path, zipped: bool) -> None:
    content = collections.OrderedDict(
        a=torch.zeros(2).half(), b=torch.nn.Parameter(torch.zeros(1)), c=torch.Size([2]), d=torch.bfloat16
    )
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert foreign_globals(tmp_path / "x.pt") == []


def test_damage_ends_the_search_quietly(tmp_path: Path) -> None:
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps([Path, "x" * 100], 2)[:-50])
    assert foreign_globals(path) == [f"{Path.__module__}.Path"]
    path.write_bytes(b"\xff\xfe")
    assert foreign_globals(path) == []
    assert foreign_globals(tmp_path / "none") == []


def test_names_are_found_in_files_of_the_older_format(tmp_path: Path) -> None:
    torch.save(
        {"a": torch.zeros(1), "b": collections.Counter()},
        tmp_path / "x.pt",
        _use_new_zipfile_serialization=False,
    )
    assert foreign_globals(tmp_path / "x.pt") == ["collections.Counter"]


def test_an_archive_with_an_undecodable_list_ends_the_search_quietly(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("é.pkl", pickle.dumps(Path))
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    assert foreign_globals(path) == []
