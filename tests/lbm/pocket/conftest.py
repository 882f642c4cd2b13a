from pathlib import Path

import pytest

from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.demo import DemoResult, run_demo
from sigmascope.lora.extract import ExtractOptions, extract_lora


@pytest.fixture(scope="package")
def base() -> LbmModel:
    return load_lbm(BASE_PATH, CONFIG_PATH)


@pytest.fixture(scope="package")
def tuned() -> LbmModel:
    return load_lbm(TUNED_PATH, CONFIG_PATH)


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """The whole demo, at the rank that the model's card speaks of."""
    return run_demo(tmp_path_factory.mktemp("demo"), rank=8, conv_rank=8, num_inference_steps=1)


@pytest.fixture(scope="package")
def rank8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's LoRA, without the rest of the demo."""
    path = tmp_path_factory.mktemp("rank8") / "lora.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(8, 8))
    return path
