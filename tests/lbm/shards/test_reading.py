import errno
import gzip
import os
import pickle
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from tests.lbm.shard_files import encoded as png
from tests.lbm.shard_files import noise, pair, plain, write_tar

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


@pytest.mark.parametrize("length", range(1, 12))
def test_a_gzip_header_that_breaks_off_is_one_fault(length: int, tmp_path: Path) -> None:
    shard = tmp_path / "short.tar.gz"
    shard.write_bytes(gzip.compress(b"")[:length])
    (sample,) = read(shard)
    assert "cannot be read as a tar file" in str(sample.fault)


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


def sparse_tar(path: Path, size: int) -> Path:
    """One GNU sparse member of that size, of which the file holds one block."""
    info = tarfile.TarInfo("a.source.png")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 512
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, 512)  # one piece: its place and length
    header[483:495] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + bytes(512) + bytes(1024))
    return path


def test_a_sparse_member_is_refused_before_it_is_read(tmp_path: Path) -> None:
    shard = sparse_tar(tmp_path / "a.tar", 100 << 30)
    with tarfile.open(shard) as tar:
        assert tar.getmembers()[0].size == 100 << 30  # what the standard library would fill with zeros
    (fault,) = read_shard(str(shard), ["source"])
    assert fault.fault is not None
    assert "a.source.png is a sparse file" in fault.fault


def test_a_member_beyond_the_limit_is_refused_and_one_that_nobody_wants_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [("a.source.png", plain(1)), ("a.video.mp4", bytes(4000)), ("b.source.png", bytes(4000))]
    shard = str(write_tar(tmp_path / "a.tar", large))
    first, second = read_shard(shard, ["source"])
    assert first.members == {"source.png": plain(1)}
    assert first.names == ("source.png", "video.mp4")
    assert second.members == {"source.png": bytes(4000)}
    monkeypatch.setenv("SIGMASCOPE_MAX_MEMBER", "2KB")
    *_, fault = read_shard(shard, ["source"])
    assert fault.fault is not None
    assert "b.source.png declares 3.906 KB; SIGMASCOPE_MAX_MEMBER allows 2 KB" in fault.fault


def test_a_compressed_member_that_grows_a_thousandfold_is_refused_unread(tmp_path: Path) -> None:
    bomb = [("a.source.png", plain(1)), ("a.unwanted", bytes(50 << 20))]
    shard = write_tar(tmp_path / "a.tar.gz", bomb, "w:gz")
    assert shard.stat().st_size < 100_000
    (fault,) = read_shard(str(shard), ["source"])
    assert fault.fault is not None
    assert "a.unwanted declares 50 MB, more than the compressed bytes can hold" in fault.fault


def test_a_header_that_fills_the_memory_is_refused_unread(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 4 << 30
    shard = tmp_path / "a.tar"
    shard.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    (fault,) = read_shard(str(shard), ["source"])
    assert fault.fault is not None
    assert "headers declare 4 GB" in fault.fault


@pytest.mark.parametrize("kind", [tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME], ids=["global", "name"])
def test_a_chain_of_headers_is_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("note")
    info.type, info.size = kind, 8
    shard = tmp_path / "a.tar"
    shard.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"8 a=bcd\n" + bytes(504)) * 1200 + bytes(1024))
    (fault,) = read_shard(str(shard), ["source"])
    assert fault.fault is not None
    assert "more than 16 headers stand before one member" in fault.fault


def test_headers_about_the_whole_archive_are_bounded_together(tmp_path: Path) -> None:
    note, member = tarfile.TarInfo("note"), tarfile.TarInfo("a.source.png")
    note.type, note.size = tarfile.XGLTYPE, 400 << 10
    said = b"%d comment=" % note.size
    block = note.tobuf() + said + b"x" * (note.size - len(said) - 1) + b"\n" + member.tobuf()
    shard = tmp_path / "a.tar"
    shard.write_bytes(block * 3 + bytes(1024))
    *_, fault = read_shard(str(shard), ["source"])
    assert fault.fault is not None
    assert "headers declare 1.172 MB" in fault.fault


def test_a_disk_that_fails_is_an_error_and_no_damage_of_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_tar(tmp_path / "a.tar", [("a.source.png", plain(1))])

    def fail(_descriptor: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr("sigmascope.lbm.shards.os.fstat", fail)
        with pytest.raises(FileError, match=r"a\.tar: cannot be read \(Input/output error\)"):
            list(read_shard(str(shard), ["source"]))
