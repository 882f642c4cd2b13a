import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sigmascope.errors import ModelMismatchError
from sigmascope.lbm.config import LbmConfig
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.monitor import Recorder
from sigmascope.records.run import Stage


@pytest.fixture
def state(tiny_model: LbmModel) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in tiny_model.state_dict().items()}


def watched(path: Path, config: LbmConfig, **options: Any) -> tuple[LbmModel, Stage]:
    with Recorder(name="loading", sample_hz=None) as recorder:
        model = load_lbm(path, config, **options)
    (stage,) = recorder.run().stages
    return model, stage


def test_stage_holds_what_the_specification_names(
    state: dict[str, torch.Tensor], tiny_config: LbmConfig, tmp_path: Path
) -> None:
    path = tmp_path / "base.safetensors"
    save_file(state, path)
    model, stage = watched(path, tiny_config, dtype=torch.bfloat16)
    assert stage.name == "model_loading"
    assert stage.seconds > 0
    buffers = state["num_iterations"].numel()
    assert {name: fact for name, fact in stage.facts.items() if name != "processor"} == {
        "file": str(path),
        "format": "safetensors",
        "file_bytes": path.stat().st_size,
        "parameters": sum(tensor.numel() for tensor in state.values()) - buffers,
        "dtype": "bfloat16",
        "device": "cpu",
        "missing_keys": [],
        "unexpected_keys": [],
    }
    assert set(stage.modules) == {"denoiser", "vae"}
    assert model.denoiser.dtype == torch.bfloat16


def test_pickle_is_named_by_its_format_not_its_suffix(
    state: dict[str, torch.Tensor], tiny_config: LbmConfig, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "base.pth")
    _, stage = watched(tmp_path / "base.pth", tiny_config)
    assert stage.facts["format"] == "pickle"


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_size_is_that_of_all_files_of_a_sharded_checkpoint(
    name: str, state: dict[str, torch.Tensor], tiny_config: LbmConfig, tmp_path: Path
) -> None:
    keys = sorted(state)
    shards = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for shard, held in shards.items():
        save_file({key: state[key] for key in held}, tmp_path / shard)
    weight_map = {key: shard for shard, held in shards.items() for key in held}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    expected = sum(path.stat().st_size for path in tmp_path.iterdir())
    model, stage = watched(tmp_path / name, tiny_config)
    assert stage.facts["file_bytes"] == expected
    assert stage.facts["format"] == "safetensors"
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_keys_that_stop_the_loading_are_on_record(
    state: dict[str, torch.Tensor], tiny_config: LbmConfig, tmp_path: Path
) -> None:
    state["denoiser.conv_inn.weight"] = state.pop("denoiser.conv_in.weight")
    save_file(state, tmp_path / "base.safetensors")
    with Recorder(name="loading") as recorder, pytest.raises(ModelMismatchError):
        load_lbm(tmp_path / "base.safetensors", tiny_config)
    (stage,) = recorder.run().stages
    assert not stage.success
    assert stage.facts["missing_keys"] == ["denoiser.conv_in.weight"]
    assert stage.facts["unexpected_keys"] == ["denoiser.conv_inn.weight"]


def test_without_a_recorder_it_only_loads(
    state: dict[str, torch.Tensor], tiny_config: LbmConfig, tmp_path: Path
) -> None:
    save_file(state, tmp_path / "base.safetensors")
    loaded = load_lbm(tmp_path / "base.safetensors", tiny_config).state_dict()
    expected = load_lbm(tmp_path / "base.safetensors", tiny_config).state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
