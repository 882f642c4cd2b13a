"""The whole command on a real photograph, with the model that ships with the package."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sigmascope.cli.lbm import app
from sigmascope.lbm.pocket import BASE_PATH, TUNED_PATH
from sigmascope.lora.extract import ExtractOptions, extract_lora


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The astronaut of scikit-image at half its size, 256×256, as a JPEG."""
    data = pytest.importorskip("skimage.data", reason="scikit-image, for its photographs, is not installed")
    path = tmp_path_factory.mktemp("photograph") / "astronaut.jpg"
    Image.fromarray(data.astronaut()).reduce(2).save(path, quality=95)
    return path


@pytest.fixture(scope="module")
def base(photograph: Path) -> Path:
    """What the base alone makes of it."""
    relit(photograph, photograph.with_name("base.png"))
    return photograph.with_name("base.png")


def relit(photograph: Path, output: Path, *flags: str) -> bytes:
    command = ("infer", "--base_model_path", str(BASE_PATH), "--source_image", str(photograph))
    always = ("--output_path", str(output), "--device", "cpu", "--seed", "0")
    result = CliRunner().invoke(app, [*command, *always, *flags], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return output.read_bytes()


def pixels(path: Path) -> Any:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"), dtype=np.float64)


def test_base_relights_a_photograph_warmly(photograph: Path, base: Path) -> None:
    source, result = pixels(photograph), pixels(base)
    assert result.shape == (256, 256, 3)
    assert np.abs(result - source).mean() > 10
    # A warm light: the picture loses blue, and more of it than of red.
    lost_red, _, lost_blue = (source - result).mean(axis=(0, 1))
    assert lost_blue > 10
    assert lost_blue > lost_red


@pytest.mark.slow
def test_lora_changes_a_photograph_and_at_scale_zero_does_not(
    photograph: Path, base: Path, tmp_path: Path
) -> None:
    lora = tmp_path / "cool.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, lora, ExtractOptions(rank=2, conv_rank=2))
    zero = relit(photograph, tmp_path / "zero.png", "--lora_path", str(lora), "--lora_scale", "0")
    relit(photograph, tmp_path / "full.png", "--lora_path", str(lora), "--lora_scale", "1")
    assert zero == base.read_bytes()
    assert np.abs(pixels(tmp_path / "full.png") - pixels(base)).mean() > 1
