from pathlib import Path
from typing import Any

import pytest
from tests.lbm.training.tiny_run import FOUR_TIMESTEPS

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import LbmConfig, load_config, parse_config, resolve_config
from sigmascope.lbm.training.settings import TrainSettings


def test_defaults_are_the_full_size_model() -> None:
    config = LbmConfig()
    assert config.denoiser.block_out_channels == (320, 640, 1280)
    assert config.denoiser.cross_attention_dim == (320, 640, 1280)
    assert config.denoiser.transformer_layers_per_block == (1, 2, 10)
    assert config.denoiser.attention_head_dim == (5, 10, 20)
    assert config.vae.scaling_factor == 0.13025
    assert config.bridge_noise_sigma == 0.005
    assert (config.unet_input_channels, config.vae_num_channels) == (4, 4)


def test_keys_left_out_have_the_defaults_of_lbm_s_own_training() -> None:
    """Those of `main` in its `examples/training/train_lbm_surface.py` (gojasper/LBM)."""
    config = LbmConfig()
    assert (config.timestep_sampling, config.selected_timesteps, config.prob) == ("uniform", None, None)
    assert (config.logit_mean, config.logit_std, config.bridge_noise_sigma) == (0.0, 1.0, 0.005)
    assert (config.latent_loss_type, config.latent_loss_weight) == ("l2", 1.0)
    assert (config.pixel_loss_type, config.pixel_loss_weight) == ("lpips", 0.0)


def test_reads_every_key_of_the_specification(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
backbone_signature: some/backbone
vae_num_channels: 4
unet_input_channels: 9
timestep_sampling: log_normal
selected_timesteps: [250, 1000]
prob: [0.5, 0.5]
logit_mean: 0.5
logit_std: 2.0
conditioning_images_keys: [depth]
conditioning_masks_keys: [region]
source_key: photo
target_key: relit
mask_key: valid
bridge_noise_sigma: 0.01
latent_loss_type: l1
latent_loss_weight: 2.0
pixel_loss_type: l2
pixel_loss_weight: 3.0
""",
        encoding="utf-8",
    )
    config = load_config(path)
    assert config.timestep_sampling == "log_normal"
    assert config.selected_timesteps == (250.0, 1000.0)
    assert (config.logit_mean, config.logit_std) == (0.5, 2.0)
    assert config.conditioning_images_keys == ("depth",)
    assert (config.source_key, config.target_key, config.mask_key) == ("photo", "relit", "valid")
    assert (config.latent_loss_type, config.latent_loss_weight) == ("l1", 2.0)
    assert (config.pixel_loss_type, config.pixel_loss_weight) == ("l2", 3.0)


def test_yaml_round_trip(tiny_config: LbmConfig, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_config.to_yaml(), encoding="utf-8")
    assert load_config(path) == tiny_config


def test_factor_is_vae_times_denoiser(tiny_config: LbmConfig) -> None:
    assert LbmConfig().factor == 8 * 4
    assert tiny_config.factor == 2 * 2


def test_vae_takes_over_the_channels() -> None:
    config = parse_config({"vae_num_channels": 16, "unet_input_channels": 16})
    assert config.vae.latent_channels == 16


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"bridge_noise_sigmma": 1}, "unknown key bridge_noise_sigmma (did you mean bridge_noise_sigma?)"),
        ({"vae": {"scale_factor": 1}}, "unknown key vae.scale_factor (did you mean scaling_factor?)"),
        ({"denoiser": {"zzz": 1}}, "unknown key denoiser.zzz (known: "),
        ({"timestep_sampling": "normal"}, "timestep_sampling: input should be 'uniform', 'log_normal'"),
        (
            {"bridge_noise_sigma": -1},
            "bridge_noise_sigma: input should be greater than or equal to 0, got -1",
        ),
        ({"logit_std": "wide"}, "logit_std: input should be a valid number"),
        ({**FOUR_TIMESTEPS, "prob": [0.5, 0.5]}, "prob: expected 4 entries"),
        ({**FOUR_TIMESTEPS, "prob": [0.3, 0.3, 0.3, 0.3]}, "prob: expected probabilities that sum to 1"),
        ({**FOUR_TIMESTEPS, "prob": [1.5, -0.5, 0, 0]}, "prob: expected probabilities"),
        (
            {**FOUR_TIMESTEPS, "selected_timesteps": None},
            "custom_timesteps needs selected_timesteps and prob",
        ),
        ({**FOUR_TIMESTEPS, "selected_timesteps": [0, 1, 2, 3]}, "expected timesteps in (0, 1000]"),
        ({"unet_input_channels": 8}, "unet_input_channels: expected 4"),
        ({"conditioning_images_keys": ["depth"]}, "unet_input_channels: expected 8"),
        ({"vae": {"latent_channels": 16}}, "vae.latent_channels: expected vae_num_channels (4), got 16"),
        ({"vae": {"block_out_channels": [30]}}, "vae.block_out_channels: expected multiples"),
        ({"vae": {"block_out_channels": []}}, "vae.block_out_channels: expected at least one"),
        ({"denoiser": {"block_out_channels": []}}, "denoiser.block_out_channels: expected at least one"),
        ({"denoiser": {"block_out_channels": [32, 64]}}, "denoiser.down_block_types: expected 2 entries"),
        ({"denoiser": {"cross_attention_dim": [2048, 640, 1280]}}, "denoiser.cross_attention_dim: expected"),
        ({"denoiser": {"attention_head_dim": [7, 10, 20]}}, "denoiser.attention_head_dim: expected"),
        ({"denoiser": {"down_block_types": ["A", "B", "C"]}}, "denoiser.down_block_types.0: input should be"),
        ({"denoiser": 3}, "denoiser: input should be a valid dictionary"),
        ("text", "expected a mapping of keys to values, got str"),
        ([1, 2], "expected a mapping of keys to values, got list"),
    ],
)
def test_error_names_the_key_and_what_was_expected(data: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, where="my.yaml")
    assert caught.value.message.startswith("my.yaml: ")
    assert message in caught.value.message
    assert caught.value.hint


def test_every_wrong_key_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"unknown key lerning.*logit_std"):
        parse_config({"lerning": 1, "logit_std": 0})


def test_probabilities_rounded_by_hand_are_accepted() -> None:
    config = parse_config({"selected_timesteps": [1, 2, 3], "prob": [0.333, 0.333, 0.333]})
    assert config.prob == (0.333, 0.333, 0.333)


def test_uniform_needs_no_timesteps() -> None:
    config = parse_config({"timestep_sampling": "uniform", "selected_timesteps": None, "prob": None})
    assert config.selected_timesteps is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a: [1", "not valid YAML"), (b"\xff\xfe\xfa", "cannot be read"), (b"- 1", "expected a mapping")],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in caught.value.message


TRAINING = "train_shards: a.tar\nsave_ckpt_path: out\nbatch_size: 8\nnum_steps: [1, 2]\nwandb_project: lbm\n"


def test_a_training_s_yaml_serves_as_its_model_s(tmp_path: Path) -> None:
    """LBM's trainer copies it to config.yaml beside its checkpoints."""
    (tmp_path / "config.yaml").write_text(TRAINING + "source_key: image\nbridge_noise_sigma: 0.01\n")
    config = resolve_config(tmp_path / "last.ckpt", None)
    assert config == parse_config({"source_key": "image", "bridge_noise_sigma": 0.01})


def test_a_slip_in_a_key_of_the_model_is_named_in_a_training_s_yaml_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TRAINING + "bridge_noise_sigmas: 0.01\n")
    with pytest.raises(ConfigError, match=r"bridge_noise_sigmas \(did you mean bridge_noise_sigma\?\)"):
        load_config(tmp_path / "config.yaml")


def test_every_key_of_a_training_is_passed_over() -> None:
    run = set(TrainSettings.model_fields) - set(LbmConfig.model_fields)
    assert parse_config(dict.fromkeys(run, "x")) == LbmConfig()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read \(No such file or directory\)\."):
        load_config(tmp_path / "nothing.yaml")


def test_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()
    assert load_config(path) == LbmConfig()


@pytest.mark.parametrize("key", ["layers_per_block", "transformer_layers_per_block"])
@pytest.mark.parametrize("value", [0, -1, [1, 0], [-2, 1]])
def test_blocks_have_layers(key: str, value: int | list[int], tiny_yaml: dict[str, Any]) -> None:
    tiny_yaml["denoiser"][key] = value
    with pytest.raises(ConfigError, match=f"{key}: expected 1 or more"):
        parse_config(tiny_yaml)


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["bridge_noise_sigma", "logit_mean", "latent_loss_weight"])
def test_numbers_are_finite(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{key}: {value}", encoding="utf-8")
    with pytest.raises(ConfigError, match=key):
        load_config(path)
