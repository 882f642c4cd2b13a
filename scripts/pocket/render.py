"""Render the training scenes once and keep them on disk.

Scenes below `FIRST_TRAINING_SCENE` are held out: training never sees them.
"""

from collections.abc import Iterable
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sigmascope.files import atomic_path
from sigmascope.lbm.pocket.scenes import COOL, WARM, make_scene, scene_source_light, shade

FIRST_TRAINING_SCENE = 1000
SOURCE, WARM_TARGET, COOL_TARGET = 0, 1, 2


def render_scene(number: int) -> NDArray[np.uint8]:
    """Return one scene under its source light, the warm and the cool light: (3, size, size, 3)."""
    surfaces = make_scene(number)
    lights = (scene_source_light(number), WARM, COOL)
    return np.stack([shade(surfaces, light) for light in lights])


def render_scenes(numbers: Iterable[int], processes: int = 2) -> NDArray[np.uint8]:
    """Render scenes side by side: (scenes, 3, size, size, 3)."""
    with Pool(processes) as pool:
        return np.stack(pool.map(render_scene, numbers, chunksize=32))


def training_scenes(count: int, folder: Path) -> NDArray[np.uint8]:
    """Return the training scenes, from disk when they are there."""
    path = folder / f"scenes-{count}.npy"
    if not path.exists():
        scenes = render_scenes(range(FIRST_TRAINING_SCENE, FIRST_TRAINING_SCENE + count))
        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            np.save(stream, scenes)
    return np.asarray(np.load(path, mmap_mode="r"))
