import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.lbm.shard_files import read_tar

from sigmascope.errors import ConfigError
from sigmascope.lbm.make_shards import write_pocket_shards
from sigmascope.lbm.pocket.scenes import WARM, relighting_pair


def pixels(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def test_shards_hold_the_scenes_under_both_lights(tmp_path: Path) -> None:
    steps: list[tuple[int, int, str]] = []
    written = write_pocket_shards(
        tmp_path,
        range(1000, 1003),
        WARM,
        shard_size=2,
        size=32,
        progress=lambda *step: steps.append(step),
    )
    assert [shard.samples for shard in written] == [2, 1]
    expected = []
    for number in range(1000, 1003):
        source, target = relighting_pair(number, WARM, 32)
        expected += [(f"scene-{number:06d}.source.png", source), (f"scene-{number:06d}.target.png", target)]
    read = [member for shard in written for member in read_tar(shard.path)]
    assert [name for name, _ in read] == [name for name, _ in expected]
    for (_, data), (_, wanted) in zip(read, expected, strict=True):
        assert np.array_equal(pixels(data), wanted)
    assert steps[-1] == (3, 3, "scene-001002")


@pytest.mark.parametrize("numbers", [range(0), range(-1, 3)])
def test_scenes_that_do_not_exist_are_refused(tmp_path: Path, numbers: range) -> None:
    with pytest.raises(ConfigError, match="from 0 on"):
        write_pocket_shards(tmp_path, numbers)
