"""The pocket model's scenes as shards to train on, so that training can be tried without data of one's own."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from sigmascope.errors import ConfigError
from sigmascope.lbm.pocket.rendering import begin_worker, render_pair
from sigmascope.lbm.pocket.scenes import COOL, WARM, Light
from sigmascope.lbm.shards.writing import EncodedSample, ShardTarget, WrittenShard, write_shards
from sigmascope.progress import Progress, no_progress

LIGHTS = {"cool": COOL, "warm": WARM}
"""By the name that the command line gives them."""
HELD_OUT = range(1000)
"""Scenes that the pocket models never saw; judge by these, train on others."""

POCKET_SHARD_SIZE = 128
"""Samples in a shard unless the caller says: so few that a run of a few hundred scenes has several."""
_CHUNK = 8
"""Scenes that a worker renders for one message."""


def write_pocket_shards(
    folder: str | Path,
    numbers: Sequence[int],
    light: Light = COOL,
    *,
    shard_size: int = POCKET_SHARD_SIZE,
    prefix: str = "train",
    overwrite: bool = False,
    size: int = 128,
    workers: int = 1,
    progress: Progress = no_progress,
) -> list[WrittenShard]:
    """Render relighting pairs into shards of `source.png` and `target.png`.

    Args:
        folder: Created if it is not there.
        numbers: Of the scenes, from 0; those below 1000 are held out.
        light: Of the targets. Sources have the scenes' own soft light.
        shard_size: Samples in a shard.
        prefix: Of the shards' names.
        overwrite: Replace shards of that name.
        size: Height and width in pixels.
        workers: Processes that render. More than 1 starts new interpreters, so a script that asks for more
            must do so under `if __name__ == "__main__":`.
        progress: Told after each scene.

    Returns:
        The shards, whose bytes depend on the other arguments alone.

    Raises:
        ConfigError: There are no numbers, one is negative, or `write_shards` refuses the target.
        WriteError: A shard cannot be written.
    """
    if not numbers or min(numbers) < 0 or size < 1:
        raise ConfigError("pocket scenes: expected numbers from 0 on.", hint="For example 1000-1255.")
    target = ShardTarget(Path(folder), prefix, shard_size, overwrite)
    render = partial(render_pair, light=light, size=size)
    return write_shards(_reported(_scenes(render, numbers, workers), len(numbers), progress), target)


def _scenes(
    render: Callable[[int], EncodedSample], numbers: Sequence[int], workers: int
) -> Iterator[EncodedSample]:
    if workers == 1:
        yield from map(render, numbers)
        return
    # Spawned, not forked: the parent may have torch's threads running.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, begin_worker) as pool:
        try:
            yield from pool.map(render, numbers, chunksize=_CHUNK)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _reported(samples: Iterator[EncodedSample], total: int, progress: Progress) -> Iterator[EncodedSample]:
    for done, sample in enumerate(samples, start=1):
        yield sample
        progress(done, total, sample[0])
