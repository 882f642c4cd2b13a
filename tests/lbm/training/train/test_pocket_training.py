"""A LoRA is really trained: held-out pictures come nearer to the truth."""

from pathlib import Path

import pytest
from scripts.pocket.quality import relighting_psnr

from sigmascope.lbm.make_shards import write_pocket_shards
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH
from sigmascope.lbm.pocket.scenes import COOL
from sigmascope.lbm.training.settings import load_train_settings
from sigmascope.lbm.training.train import train
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.reader import load_lora

EXAMPLES = Path(__file__).parents[4] / "examples" / "train_pocket_lora"
HELD_OUT = range(8)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_pocket_shards(folder, range(1000, 1096), COOL)
    return folder


@pytest.fixture(scope="module")
def psnr_of_base() -> float:
    return relighting_psnr(load_lbm(BASE_PATH), COOL, HELD_OUT)


@pytest.mark.parametrize("name", ["attention", "everything"])
def test_the_example_relights_held_out_scenes_3_db_nearer(
    tmp_path: Path, shards: Path, psnr_of_base: float, name: str
) -> None:
    """A fifth of the example's steps."""
    settings = load_train_settings(EXAMPLES / f"{name}.yaml").model_copy(
        update={
            "train_shards": (str(shards / "train-*.tar"),),
            "validation_shards": None,
            "base_model_path": BASE_PATH,
            "save_ckpt_path": tmp_path / "out",
            "max_steps": 40,
            "report_to": "none",
        }
    )
    report = train(settings)
    assert report.step == 40
    model = load_lbm(BASE_PATH)
    attach_lora(model, load_lora(tmp_path / "out" / "lora.safetensors"))
    assert relighting_psnr(model, COOL, HELD_OUT) >= psnr_of_base + 3
