from pathlib import Path

import pytest

from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lora.extract import ExtractOptions, extract_lora


@pytest.fixture(scope="package")
def base() -> LbmModel:
    return load_lbm(BASE_PATH, CONFIG_PATH)


@pytest.fixture(scope="package")
def tuned() -> LbmModel:
    return load_lbm(TUNED_PATH, CONFIG_PATH)


@pytest.fixture(scope="package")
def rank8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "rank8.safetensors"
    extract_lora(BASE_PATH, TUNED_PATH, path, ExtractOptions(rank=8, conv_rank=8))
    return path
