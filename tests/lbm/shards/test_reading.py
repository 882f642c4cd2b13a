import os
import pickle
import subprocess
import time
from pathlib import Path

import pytest
from tests.lbm.shard_files import encoded as png
from tests.lbm.shard_files import noise, pair, write_tar

from sigmascope.errors import FileError
from sigmascope.lbm.shards import RawSample, read_shard

KEYS = ("source", "target")


def read(path: Path | str) -> list[RawSample]:
    return list(read_shard(str(path), KEYS))


def test_members_are_grouped_by_name_and_others_are_dropped(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [*pair("x/1", 10, json=b"{}"), *pair("x/2", 20)])
    first, second = read(shard)
    assert (first.key, second.key) == ("x/1", "x/2")
    assert set(first.members) == {"source.png", "target.png"}
    assert first.names == ("source.png", "target.png", "json")
    assert first.nbytes == sum(len(data) for data in first.members.values())


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_shards_are_read(tmp_path: Path, mode: str) -> None:
    shard = write_tar(tmp_path / "a.tar", pair("1", 10), mode)
    assert [sample.key for sample in read(shard)] == ["1"]


def test_case_of_suffixes_does_not_count(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [("1.Source.PNG", b"s"), ("1.target.jpg", b"t")])
    assert read(shard)[0].members == {"source.png": b"s", "target.jpg": b"t"}


def test_a_truncated_shard_gives_its_whole_samples_and_then_says_so(tmp_path: Path) -> None:
    members = [item for i in range(4) for item in _noisy(i)]
    shard = write_tar(tmp_path / "a.tar", members)
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    *good, last = read(shard)
    assert [sample.key for sample in good] == [str(i) for i in range(len(good))]
    assert 1 <= len(good) < 4
    assert all(sample.fault is None for sample in good)
    assert last.key is None
    assert f"breaks off after {len(good)} samples" in (last.fault or "")


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>" * 100, os.urandom(3000)])
def test_what_is_no_tar_file_is_one_fault(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    (sample,) = read(tmp_path / "a.tar")
    assert sample.key is None
    assert "cannot be read as a tar file" in (sample.fault or "")


def test_a_truncated_gzip_shard_is_one_fault(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar.gz", [item for i in range(4) for item in _noisy(i)], "w:gz")
    shard.write_bytes(shard.read_bytes()[:-2000])
    assert [sample.key is None for sample in read(shard)].count(True) == 1


def test_a_member_twice_spoils_its_sample_alone(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [*pair("1", 1), ("1.source.png", b"again"), *pair("2", 2)])
    first, second = read(shard)
    assert "twice" in (first.fault or "")
    assert (first.fault or "").endswith("source.png)")  # without what the reading code adds for itself
    assert second.fault is None


def test_a_shard_that_vanished_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.tar"):
        read(tmp_path / "gone.tar")


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("suffix", ["pyd", "pickle", "pth", "npy", "source.pyd"])
def test_nothing_is_unpickled(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bomb = pickle.dumps(_Bomb())
    shard = write_tar(tmp_path / "a.tar", [*pair("1", 1), (f"1.{suffix}", bomb)])
    assert len(read(shard)) == 1
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)  # the bomb itself works
    assert (tmp_path / "exploded").exists()


def test_a_command_is_read_like_a_file(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", pair("1", 1))
    assert read(f"pipe:cat {shard}") == [
        RawSample(f"pipe:cat {shard}", "1", sample.members, sample.names) for sample in read(shard)
    ]


def test_a_command_that_fails_is_a_fault() -> None:
    (sample,) = read("pipe:exit 3")
    assert sample.key is None


def test_stopping_early_ends_the_command(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [item for number in range(9) for item in _noisy(number)])
    marker = tmp_path / "pid"
    samples = read_shard(f"pipe:echo $$ > {marker}; cat {shard}; exec sleep 60", KEYS)
    next(samples)
    began = time.monotonic()
    samples.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 10
    state = subprocess.run(["ps", "-p", marker.read_text().strip()], capture_output=True, check=False)
    assert state.returncode != 0


def _noisy(number: int) -> list[tuple[str, bytes]]:
    data = png(noise(number, 40, 40))
    return [(f"{number}.source.png", data), (f"{number}.target.png", data)]
