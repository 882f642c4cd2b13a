from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.lbm.training.tiny_run import randomised
from typer.testing import CliRunner

from sigmascope.cli.root import app
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, EXAMPLE_SCENE, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
from sigmascope.lbm.training.lora_layers import inject_lora
from sigmascope.lbm.training.session import write_trained
from sigmascope.lbm.training.settings import parse_train_settings

FORMATS = ("native", "kohya", "peft")


@pytest.mark.slow
def test_the_commands_take_what_training_writes(tmp_path: Path) -> None:
    keys = {"train_shards": "a", "base_model_path": str(BASE_PATH), "save_ckpt_path": "o", "rank": 3}
    settings = parse_train_settings({**keys, "conv_rank": 2, "output_formats": list(FORMATS)})
    trainable = inject_lora(load_lbm(BASE_PATH), settings)
    randomised(trainable.parameters(), std=0.05)
    source = tmp_path / "source.png"
    Image.fromarray(relighting_pair(EXAMPLE_SCENE, COOL)[0]).save(source)
    pictures = {}
    base = ["--base_model_path", str(BASE_PATH)]
    files = dict(zip(FORMATS, write_trained(trainable, settings, 1, tmp_path), strict=True))
    for name in ("bare", *FORMATS):
        output = tmp_path / f"{name}.png"
        given = ["--lora_path", str(files[name])] if name in files else []
        picture = ["--source_image", str(source), "--output_path", str(output), "--seed", "0"]
        done = CliRunner().invoke(app, ["lbm", "infer", *base, *given, *picture])
        assert done.exit_code == 0, done.output
        pictures[name] = np.asarray(Image.open(output)).astype(int)
        if name in files:
            tuned = ["--tuned_model_path", str(TUNED_PATH), *given]
            done = CliRunner().invoke(app, ["lora", "validate", *base, *tuned])
            assert done.exit_code == 0, done.output
    assert np.abs(pictures["native"] - pictures["bare"]).max() > 10
    for name in ("kohya", "peft"):
        assert np.abs(pictures[name] - pictures["native"]).max() <= 1
