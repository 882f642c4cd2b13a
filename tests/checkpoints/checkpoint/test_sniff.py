import gzip
import pickle
from pathlib import Path

import pytest
import torch

from sigmascope.checkpoints.checkpoint import FileKind, foreign_file_error, sniff


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x40\0\0\0\0\0\0\0{}", "safetensors"),
        (b"\x80\x02\0\0\0\0\0\0{}", "safetensors"),  # 640 bytes of header, as a pickle begins
        (b"PK\x03\x04\0\0\0\0{}", "safetensors"),
        (b"\n<!DOCTYPE HTML><html>", "html"),
        (b"<html lang='en'>", "html"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "lfs-pointer"),
        (b"Entry not found", "text"),
        (b'{"error":"no"}', "text"),
        (b"GGUF\x03\0\0\0", "gguf"),
        (b"\x89HDF\r\n\x1a\n\0\0", "hdf5"),
        (pickle.dumps({}, 2), "pickle"),
        (gzip.compress(b"x", mtime=0), "compressed"),
        (bytes(257) + b"ustar\0", "tar"),
        (b"", "unknown"),
    ],
)
def test_kinds_are_told_by_the_first_bytes(head: bytes, kind: FileKind) -> None:
    assert sniff(head) == kind


@pytest.mark.parametrize(("zipped", "kind"), [(True, "zip"), (False, "pickle")])
def test_what_torch_saves_is_recognised(zipped: bool, kind: FileKind, tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert sniff((tmp_path / "x.pt").read_bytes()) == kind


def test_nothing_is_said_of_an_unknown_file() -> None:
    assert foreign_file_error(Path("x"), "unknown", "a file") is None
