import random
from pathlib import Path
from typing import Any

import pytest
from tests.lbm.shard_files import encoded as png
from tests.lbm.shard_files import noise, pair, write_tar

from sigmascope.lbm.shards import RawSample, epoch_samples, shuffled

KEYS = ("source", "target")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for shard in range(3):
        members = [item for i in range(20) for item in pair(f"{shard}-{i:02d}", i)]
        paths.append(str(write_tar(folder / f"{shard}.tar", members)))
    return tuple(paths)


def keys(shards: tuple[str, ...], epoch: int = 0, **order: Any) -> list[str | None]:
    return [sample.key for sample in epoch_samples(shards, KEYS, epoch, **order)]


def test_shards_are_permuted_by_epoch(shards: tuple[str, ...]) -> None:
    firsts = {(keys(shards, epoch, buffer=0)[0] or "")[0] for epoch in range(12)}
    assert firsts == {"0", "1", "2"}


def test_the_buffer_mixes_samples_of_several_shards(shards: tuple[str, ...]) -> None:
    narrow, wide = keys(shards, buffer=0), keys(shards, buffer=40)
    assert sorted(map(str, narrow)) == sorted(map(str, wide))
    first_shard = (narrow[0] or "")[0]
    assert {(key or "")[0] for key in narrow[:20]} == {first_shard}
    assert len({(key or "")[0] for key in wide[:20]}) > 1


def test_every_sample_is_about_equally_often_first() -> None:
    """With a buffer for all, the first of 60 samples is uniform: chi-square, 59 degrees, limit at 1e-4."""
    counts = [0] * 60
    for seed in range(300):
        samples = (RawSample("0.tar", str(number)) for number in range(60))
        counts[int(next(shuffled(samples, random.Random(seed), 60, 1 << 30)).key or "")] += 1
    assert sum((count - 5) ** 2 / 5 for count in counts) < 106.0


def test_large_samples_shrink_the_buffer(tmp_path: Path) -> None:
    data = png(noise(0, 64, 64))
    names = [f"{i:02d}" for i in range(20)]
    shard = str(
        write_tar(tmp_path / "0.tar", [(f"{name}.{key}.png", data) for name in names for key in KEYS])
    )
    ordered = keys((shard,), buffer=100, buffer_bytes=6 * len(data))
    assert sorted(map(str, ordered)) == names
    for place, key in enumerate(ordered):  # three samples fit, so that none comes more than three early
        assert int(key or 0) <= place + 3
