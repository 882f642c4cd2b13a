"""A grid of LoRAs on pictures that the pocket LBM translates."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sigmascope import extract_lora, load_lbm, lora_grid, translate_image
from sigmascope.errors import ConfigError
from sigmascope.lbm.images import load_image
from sigmascope.lbm.infer import PictureRows
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lora.layer_extraction import ExtractOptions


@pytest.fixture(scope="module")
def model() -> LbmModel:
    return load_lbm(BASE_PATH, CONFIG_PATH)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "cool.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(rank=2, conv_rank=2))
    return path


@pytest.fixture(scope="module")
def pictures() -> dict[str, Image.Image]:
    return {
        f"scene{number}": Image.fromarray(relighting_pair(number, COOL)[0]).resize((48, 40))
        for number in (4, 5)
    }


@pytest.mark.slow
def test_rows_are_pictures_each_at_its_own_size(
    model: LbmModel, lora: Path, pictures: dict[str, Image.Image], tmp_path: Path
) -> None:
    shown = {**pictures, "tall": pictures["scene4"].resize((24, 56))}
    made = lora_grid(PictureRows(model, shown), lora, output=tmp_path / "grid.png", scales=1.0)
    assert made.rows == ("scene4", "scene5", "tall")
    bare = load_image(made.cell(2).picture)
    assert bare.size == (24, 56)
    alone = translate_image(model, shown["tall"], seed=0)
    assert np.array_equal(np.asarray(bare), np.asarray(alone))
    assert all((cell.mean_difference or 0) > 0.005 for cell in made.cells if cell.lora is not None)
    again = lora_grid(PictureRows(model, shown), lora, output=tmp_path / "grid.png", scales=1.0)
    assert all(cell.reused for cell in again.cells)


def test_settings_that_the_model_cannot_take_are_refused(
    model: LbmModel, pictures: dict[str, Image.Image], lora: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no picture"):
        PictureRows(model, {})
    with pytest.raises(ConfigError, match="tile_size"):
        PictureRows(model, pictures, tile_size=1)
    with pytest.raises(ConfigError, match="rows and settings of its own"):
        lora_grid(PictureRows(model, pictures), lora, "a fox", output=tmp_path / "grid.png")
