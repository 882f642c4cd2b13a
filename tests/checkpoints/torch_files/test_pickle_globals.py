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
    names = re.search(r"tensors do not need: (.*)\. Nothing was run", str(caught.value))
    assert isinstance(caught.value, UnsafeCheckpointError) == (names is not None)
    return names[1].split(", ") if names else []


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_names_are_found_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(pickle.dumps([Path, collections.Counter, Path], protocol))
    assert named(path) == [f"{Path.__module__}.Path", "collections.Counter"]


def test_a_bytearray_that_promises_more_than_there_is_makes_no_room_for_it(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"\x80\x05" + pickle.BYTEARRAY8 + (1 << 50).to_bytes(8, "little") + b"few.")
    assert named(path) == []


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


def _nested_key(depth: int) -> bytes:
    """Opcodes of [((…), 1)], a key of 2**depth parts in a few bytes: each tuple holds the one before it twice."""
    return b"])q\x00" + b"h\x00\x86q\x00" * depth + b"K\x01\x86a"


@pytest.mark.parametrize(
    "opcodes",
    [
        pytest.param(b"ccollections\nOrderedDict\n%b\x85R", id="made of items"),
        pytest.param(b"ccollections\nOrderedDict\n)R%bb", id="attributes"),
        pytest.param(b"cdiffusers.configuration_utils\nFrozenDict\n%b\x85R", id="settings made of items"),
        pytest.param(b"cargparse\nNamespace\n)\x81%bb", id="attributes of settings"),
    ],
)
def test_a_dictionary_whose_key_takes_years_to_hash_is_refused_unhashed(
    tmp_path: Path, opcodes: bytes
) -> None:
    path = tmp_path / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + opcodes % _nested_key(18) + b".")
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError, match="would take more memory or time than weights do"):
        open_checkpoint(path)
