"""What a pickle asks for beyond tensors is named when it is refused, and nothing of it is run."""

import collections
import pickle
import re
import zipfile
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import CheckpointError, UnsafeCheckpointError


def named(path: Path) -> list[str]:
    """The names in the refusal; none where it is refused for another reason."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    names = re.search(r"no part of tensors: (.*)\. Nothing was run", str(caught.value))
    assert isinstance(caught.value, UnsafeCheckpointError) == (names is not None)
    return names[1].split(", ") if names else []


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_names_are_found_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(pickle.dumps([Path, collections.Counter, Path], protocol))
    assert named(path) == [f"{Path.__module__}.Path", "collections.Counter"]


def test_what_tensors_need_is_not_foreign(tmp_path: Path) -> None:
    content = collections.OrderedDict(
        a=torch.zeros(2).half(), b=torch.nn.Parameter(torch.zeros(1)), c=torch.Size([2]), d=torch.bfloat16
    )
    content["e"] = Fraction(1, 2)
    for zipped in (True, False):
        torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        assert named(tmp_path / "x.pt") == ["fractions.Fraction"]


def test_a_damaged_pickle_is_named_for_what_stands_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(pickle.dumps([Path, "x" * 100], 2)[:-50])
    assert named(path) == [f"{Path.__module__}.Path"]
    path.write_bytes(b"\xff\xfe")
    assert named(path) == []


def test_an_archive_with_an_undecodable_list_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("é.pkl", pickle.dumps(Path))
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xff"))
    assert named(path) == []
