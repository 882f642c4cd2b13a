"""An epoch that goes on with another number of processes."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.lbm.data.test_data import tiny
from tests.lbm.shard_files import pair, plain, write_tar

from sigmascope.lbm.data import DataOptions, DataPosition, TrainingData

SAMPLES = 30
WIDE = range(0, SAMPLES, 4)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of two aspects."""
    members: list[tuple[str, bytes]] = []
    for number in range(SAMPLES):
        width = 16 if number in WIDE else 8
        picture = plain(number, width)
        members += pair(f"{number:03d}", number, **{"source.png": picture, "target.png": picture})
    return write_tar(tmp_path_factory.mktemp("shard") / "0.tar", members)


def epoch(
    shard: Path, batch_size: int, processes: int, position: DataPosition | None = None
) -> list[tuple[list[str], DataPosition]]:
    """The keys of each batch of all processes, and the position after it, on which they agree."""
    streams = [
        TrainingData(
            tiny(),
            DataOptions(
                (str(shard),), batch_size, shuffle_buffer=7, workers=0, process=process, processes=processes
            ),
        ).batches(2, position)
        for process in range(processes)
    ]
    batches = []
    for row in zip(*streams, strict=True):
        assert len({batch.source.shape[-2:] for batch, _ in row}) == 1
        (after,) = {after for _, after in row}
        batches.append(([key for batch, _ in row for key in batch.keys], after))
    return batches


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@example(batch_sizes=(3, 1, 1), processes=(4, 1, 1), cuts=(1, 1))  # more wait than a batch of the next has
@given(
    batch_sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    processes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_no_sample_is_used_twice_or_lost(
    shard: Path,
    batch_sizes: tuple[int, int, int],
    processes: tuple[int, int, int],
    cuts: tuple[int, int],
) -> None:
    """Stopped twice, and gone on with other numbers of processes and other batches each time."""
    used: list[str] = []
    position: DataPosition | None = None
    for size, count, cut in zip(batch_sizes, processes, (*cuts, None), strict=True):
        done = epoch(shard, size, count, position)[:cut]
        used += [key for keys, _ in done for key in keys]
        position = done[-1][1] if done else position
    assert sorted(used) == [f"{number:03d}" for number in range(SAMPLES)]
