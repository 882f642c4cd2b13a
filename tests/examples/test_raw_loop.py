import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from tests.examples.loading import EXAMPLES, load

from sigmascope import load_run
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH
from sigmascope.monitor import Recorder


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("raw_loop")


@pytest.fixture(scope="module")
def unwatched(example: ModuleType) -> Image.Image:
    """What the loop makes of its own picture in three steps."""
    made: Image.Image = example.relight(example.example_picture(), 3, 5)
    return made


def test_the_loop_gives_what_the_library_gives(example: ModuleType, unwatched: Image.Image) -> None:
    picture = example.example_picture()
    expected = translate_image(load_lbm(BASE_PATH), picture, num_inference_steps=3, seed=5, size="keep")
    assert np.array_equal(np.asarray(unwatched), np.asarray(expected))


def test_every_stage_is_on_record_and_the_picture_is_the_same(
    example: ModuleType, unwatched: Image.Image
) -> None:
    picture = example.example_picture()
    with Recorder("relight", sample_hz=None) as recorder:
        watched = example.relight(picture, 3, 5)
    run = recorder.run()
    assert [stage.name for stage in run.stages] == [
        "model_loading",
        "latent_encoding",
        "denoising",
        "latent_decoding",
    ]
    assert len(run.stage("denoising").steps) == 3
    assert np.array_equal(np.asarray(watched), np.asarray(unwatched))


@pytest.mark.slow
def test_it_runs_under_a_watch_from_outside(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sigmascope", "watch", "-o", "run.json", "--trace", "trace.json"),
            *(str(EXAMPLES / "raw_loop.py"), "--steps", "2", "relit.png"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "wrote relit.png\n"
    assert "denoising" in done.stderr
    assert len(load_run(tmp_path / "run.json").stage("denoising").steps) == 2
    assert (tmp_path / "trace.json").is_file()
    with Image.open(tmp_path / "relit.png") as relit:
        assert relit.size == (128, 128)
