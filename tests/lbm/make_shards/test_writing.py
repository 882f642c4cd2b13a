import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lbm.shard_files import read_tar

from sigmascope.errors import ConfigError, WriteError
from sigmascope.lbm import make_shards
from sigmascope.lbm.make_shards import EncodedSample, ShardTarget, shard_pattern, write_shards


def samples(count: int) -> list[EncodedSample]:
    return [(f"s{i}", {"target.png": b"t%d" % i, "source.png": b"s%d" % i}) for i in range(count)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_samples_fill_one_shard_after_the_other(tmp_path: Path) -> None:
    written = write_shards(samples(7), ShardTarget(tmp_path / "new", shard_size=3))
    assert [shard.samples for shard in written] == [3, 3, 1]
    assert all(shard.nbytes == shard.path.stat().st_size for shard in written)
    assert [member for shard in written for member in read_tar(shard.path)] == [
        (f"s{i}.{key}.png", f"{key[0]}{i}".encode()) for i in range(7) for key in ("source", "target")
    ]


def test_the_bytes_depend_on_the_samples_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_shards(samples(4), ShardTarget(tmp_path / name))
    assert (tmp_path / "one/train-000000.tar").read_bytes() == (
        tmp_path / "two/train-000000.tar"
    ).read_bytes()


def test_the_pattern_has_braces_for_several(tmp_path: Path) -> None:
    target = ShardTarget(tmp_path, prefix="my-set", shard_size=1)
    assert shard_pattern(write_shards(samples(3), target)) == f"{tmp_path}/my-set-{{000000..000002}}.tar"
    one = write_shards(samples(1), ShardTarget(tmp_path, prefix="valid"))
    assert shard_pattern(one) == f"{tmp_path}/valid-000000.tar"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_stops_the_writing_leaves_the_folder_as_it_was(
    tmp_path: Path, error: type[BaseException]
) -> None:
    write_shards(samples(2), ShardTarget(tmp_path, shard_size=1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stopped() -> Iterator[EncodedSample]:
        for name, _ in samples(4):
            yield name, {"source.png": b"new"}
        raise error

    with pytest.raises(error):
        write_shards(stopped(), ShardTarget(tmp_path, shard_size=3, overwrite=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(make_shards, "TarWriter", FullDisk)
    with pytest.raises(WriteError, match="No space left") as error:
        write_shards(samples(1), ShardTarget(tmp_path))
    assert "Free some space" in (error.value.hint or "")
    assert files(tmp_path) == []


def test_shards_that_are_there_are_replaced_only_when_asked(tmp_path: Path) -> None:
    write_shards(samples(3), ShardTarget(tmp_path, shard_size=1))
    write_shards(samples(1), ShardTarget(tmp_path, prefix="train-more"))
    with pytest.raises(ConfigError, match="holds 3 shards") as error:
        write_shards(samples(1), ShardTarget(tmp_path))
    assert "--overwrite" in (error.value.hint or "")
    write_shards(samples(2), ShardTarget(tmp_path, shard_size=1, overwrite=True))
    assert files(tmp_path) == ["train-000000.tar", "train-000001.tar", "train-more-000000.tar"]


def test_no_samples_write_and_remove_nothing(tmp_path: Path) -> None:
    write_shards(samples(1), ShardTarget(tmp_path))
    assert write_shards([], ShardTarget(tmp_path, overwrite=True)) == []
    assert files(tmp_path) == ["train-000000.tar"]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shard_size": 0}, "--shard_size"), ({"prefix": "a/b"}, "--prefix"), ({"prefix": ""}, "--prefix")],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        write_shards(samples(1), ShardTarget(tmp_path, **options))  # type: ignore[arg-type]


def test_a_file_in_the_folder_s_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(WriteError, match="cannot be used"):
        write_shards(samples(1), ShardTarget(tmp_path / "out"))
