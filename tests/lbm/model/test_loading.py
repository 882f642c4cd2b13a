from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import CheckpointError, ConfigError, ModelMismatchError, NonFiniteError
from sigmascope.lbm.config import LbmConfig, find_config
from sigmascope.lbm.model import LbmModel, build_lbm, load_lbm

State = dict[str, Tensor]


@pytest.fixture
def state(tiny_model: LbmModel) -> State:
    state = {key: tensor.clone() for key, tensor in tiny_model.state_dict().items()}
    state["num_iterations"] = torch.tensor(1234.0)
    return state


def save_with_loss_network(state: State, path: Path) -> None:
    training = {f"model.{key}": tensor for key, tensor in state.items()}
    training["model.lpips_loss.net.lin0.weight"] = torch.ones(3)
    torch.save({"state_dict": training, "epoch": 3, "global_step": 7}, path)


LAYOUTS: dict[str, Callable[[State, Path], None]] = {
    "model.safetensors": lambda state, path: save_file(state, path),
    "bare.ckpt": lambda state, path: torch.save(state, path),
    "wrapped.ckpt": lambda state, path: torch.save({"model_state_dict": state}, path),
    "lightning.ckpt": save_with_loss_network,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_model(
    name: str, state: State, tiny_config: LbmConfig, tmp_path: Path
) -> None:
    LAYOUTS[name](state, tmp_path / name)
    model = load_lbm(tmp_path / name, tiny_config)
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert not model.training


def test_loaded_model_computes_what_the_saved_one_does(
    state: State, tiny_model: LbmModel, tiny_config: LbmConfig, tmp_path: Path
) -> None:
    save_file(state, tmp_path / "model.safetensors")
    x_t, sigma = torch.randn(1, 4, 8, 8), torch.ones(1)
    loaded = load_lbm(tmp_path / "model.safetensors", tiny_config)
    assert torch.equal(loaded(x_t, sigma), tiny_model(x_t, sigma))


def test_folder_with_config_is_enough(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.yaml").write_text(tiny_config.to_yaml(), encoding="utf-8")
    assert load_lbm(tmp_path).config == tiny_config


def test_config_of_the_checkpoints_own_name_goes_first(tmp_path: Path) -> None:
    checkpoint = tmp_path / "tuned.safetensors"
    assert find_config(checkpoint) is None
    (tmp_path / "config.yaml").touch()
    assert find_config(checkpoint) == tmp_path / "config.yaml"
    (tmp_path / "tuned.yaml").touch()
    assert find_config(checkpoint) == tmp_path / "tuned.yaml"


@pytest.mark.parametrize(
    ("checkpoint", "config"),
    [
        ("model.safetensors.index.json", "model.yaml"),
        ("model.v2.safetensors", "model.v2.yaml"),
        ("pocket.v2", "pocket.v2/pocket.v2.yaml"),
        ("pocket.v2", "pocket.v2/weights.yaml"),
    ],
)
def test_config_is_named_after_the_whole_name(checkpoint: str, config: str, tmp_path: Path) -> None:
    (tmp_path / "pocket.v2").mkdir()
    (tmp_path / "pocket.v2" / "weights.safetensors").touch()
    (tmp_path / "pocket.v2" / "pocket.yaml").touch()
    (tmp_path / "model.safetensors.index.yaml").touch()
    (tmp_path / config).touch()
    assert find_config(tmp_path / checkpoint) == tmp_path / config


def test_config_may_be_a_path(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "other.yaml").write_text(tiny_config.to_yaml(), encoding="utf-8")
    assert load_lbm(tmp_path / "model.safetensors", tmp_path / "other.yaml").config == tiny_config


def test_wrong_config_beside_the_checkpoint_is_named(state: State, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.yaml").write_text("learning_rate: 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml: unknown key learning_rate"):
        load_lbm(tmp_path / "model.safetensors")


def test_dtype_leaves_iterations_alone(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    model = load_lbm(tmp_path / "model.safetensors", tiny_config, dtype=torch.bfloat16)
    assert (model.denoiser.dtype, model.vae.dtype) == (torch.bfloat16, torch.bfloat16)
    assert model.num_iterations.dtype == torch.float32
    assert model.num_iterations.item() == 1234


def test_half_precision_keeps_a_vae_that_would_overflow(
    state: State, tiny_config: LbmConfig, tmp_path: Path
) -> None:
    save_file(state, tmp_path / "model.safetensors")
    model = load_lbm(tmp_path / "model.safetensors", tiny_config, dtype=torch.float16)
    assert (model.denoiser.dtype, model.vae.dtype) == (torch.float16, torch.float32)


def drop(state: State) -> None:
    del state["denoiser.conv_in.bias"]


def add(state: State) -> None:
    state["conditioner.embedder.weight"] = torch.ones(2)


def reshape(state: State) -> None:
    state["denoiser.conv_in.weight"] = torch.ones(32, 8, 3, 3)


def drop_many(state: State) -> None:
    for key in [key for key in state if key.startswith("vae")]:
        del state[key]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"1 missing: denoiser\.conv_in\.bias"),
        (add, r"1 unexpected: conditioner\.embedder\.weight"),
        (reshape, r"denoiser\.conv_in\.weight \(expected \[32, 4, 3, 3\], found \[32, 8, 3, 3\]\)"),
        (drop_many, r"missing: vae\.vae_model\.encoder\.conv_in\.weight, .* and \d+ more"),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[State], None], message: str, state: State, tiny_config: LbmConfig, tmp_path: Path
) -> None:
    change(state)
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    with pytest.raises(ModelMismatchError, match=message) as caught:
        load_lbm(path, tiny_config)
    assert str(path) in caught.value.message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_named(
    value: float, state: State, tiny_config: LbmConfig, tmp_path: Path
) -> None:
    state["denoiser.conv_out.weight"][1, 2, 0, 0] = value
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(NonFiniteError, match=r"denoiser\.conv_out\.weight holds NaN or Inf"):
        load_lbm(tmp_path / "model.safetensors", tiny_config)


def test_quantised_weights_are_refused(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    key = "denoiser.conv_out.weight"
    state[key] = state[key].to(torch.int8)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"conv_out\.weight holds torch\.int8"):
        load_lbm(tmp_path / "model.safetensors", tiny_config)


def test_truncated_file_is_a_checkpoint_error(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_lbm(path, tiny_config)


def test_missing_file_is_a_checkpoint_error(tiny_config: LbmConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors"):
        load_lbm(tmp_path / "gone.safetensors", tiny_config)


def test_progress_counts_every_tensor(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    seen: list[tuple[int, int]] = []
    load_lbm(
        tmp_path / "model.safetensors",
        tiny_config,
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert seen == [(index + 1, len(state)) for index in range(len(state))]


def test_no_tensor_stays_on_meta(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    model = load_lbm(tmp_path / "model.safetensors", tiny_config)
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
    # Also what is not in the state dict.
    assert build_lbm(tiny_config, device="meta").state_dict().keys() == model.state_dict().keys()


@pytest.mark.gpu
def test_loads_to_the_accelerator(state: State, tiny_config: LbmConfig, tmp_path: Path) -> None:
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator on this machine")
    save_file(state, tmp_path / "model.safetensors")
    device: Any = torch.accelerator.current_accelerator()
    model = load_lbm(tmp_path / "model.safetensors", tiny_config, device=device)
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
