from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lbm.training.tiny_run import FOUR_TIMESTEPS, RUN

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import TRAINING_NEEDS, LbmConfig, parse_config
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH
from sigmascope.lbm.training.settings import TrainSettings, load_train_settings, parse_train_settings

YAML = """
train_shards: "shards/train-{0000..0003}.tar"
validation_shards: [shards/val-0000.tar]
base_model_path: checkpoints/exact_base.ckpt
rank: 32
conv_rank: 16
alpha: 32
trainable_lora_modules:
  - "attn1"
  - "ff.net"
batch_size: 2
learning_rate: 4e-5
optimizer: AdamW
mixed_precision: no
save_ckpt_path: out/relight
log_interval: 50
max_epochs: 3
save_interval: 1000
num_steps: [1, 2, 4]
wandb_project: null
timestep_sampling: log_normal
logit_mean: 0.5
source_key: photo
pixel_loss_type: l1
"""


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_train_settings({**RUN, **keys})
    return str(caught.value)


def test_one_yaml_holds_the_run_and_the_model(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    settings = load_train_settings(path)
    assert settings.train_shards == ("shards/train-{0000..0003}.tar",)
    assert settings.base_model_path == Path("checkpoints/exact_base.ckpt")
    assert (settings.rank, settings.conv_rank, settings.alpha) == (32, 16, 32.0)
    assert settings.trainable_lora_modules == ("attn1", "ff.net")
    assert settings.num_steps == (1, 2, 4)
    expected = {
        "timestep_sampling": "log_normal",
        "logit_mean": 0.5,
        "source_key": "photo",
        "pixel_loss_type": "l1",
    }
    assert settings.lbm == parse_config(expected)
    assert type(settings.lbm) is LbmConfig


def test_no_yaml_allows_commands(tmp_path: Path) -> None:
    said = refusal(rank=8, train_shards="pipe:cat a.tar", allow_pipe=True)
    assert "a file may not allow commands" in said
    assert "--allow_pipe on the command line" in said
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    assert load_train_settings(path, allow_pipe=True).allow_pipe
    assert "allow_pipe" not in load_train_settings(path, allow_pipe=True).to_yaml()


def test_what_is_left_out_is_as_lbm_s_trainer_has_it() -> None:
    """`precision="bf16-mixed"` and no clipping, in its `examples/training/train_lbm_surface.py`."""
    settings = parse_train_settings({**RUN, "rank": 8})
    assert (settings.mixed_precision, settings.max_grad_norm) == ("bf16", None)


def test_numbers_and_words_that_yaml_reads_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    assert yaml.safe_load(YAML)["learning_rate"] == "4e-5"
    assert yaml.safe_load(YAML)["mixed_precision"] is False
    assert load_train_settings(path).learning_rate == 4e-5
    assert load_train_settings(path).mixed_precision == "no"


LBM_TAKES = {
    "train_shards": ["pipe:cat shards.tar"], "validation_shards": ["pipe:cat shards.tar"],
    "backbone_signature": "stabilityai/stable-diffusion-xl-base-1.0", "vae_num_channels": 4,
    "unet_input_channels": 4, "source_key": "image", "target_key": "normal", "mask_key": "mask",
    "wandb_project": "lbm-surface", "batch_size": 8, "num_steps": [1, 2, 4], "learning_rate": "4e-5",
    "learning_rate_scheduler": None, "learning_rate_scheduler_kwargs": {}, "optimizer": "AdamW",
    "optimizer_kwargs": {}, "timestep_sampling": "uniform", "logit_mean": 0.0, "logit_std": 1.0,
    "pixel_loss_type": "lpips", "latent_loss_type": "l2", "latent_loss_weight": 1.0, "pixel_loss_weight": 0.0,
    "selected_timesteps": None, "prob": None, "conditioning_images_keys": [], "conditioning_masks_keys": [],
    "save_ckpt_path": "./checkpoints", "log_interval": 100, "resume_from_checkpoint": True, "max_epochs": 100,
    "bridge_noise_sigma": 0.005, "save_interval": 1000,
}  # fmt: skip
"""Every key that LBM's own training script takes from its YAML."""


def test_every_key_of_lbm_s_own_trainings_is_understood() -> None:
    settings = parse_train_settings({**LBM_TAKES, "base_model_path": "base.ckpt", "full_finetune": True})
    assert (settings.resume_from_checkpoint, settings.lr_scheduler) == (True, "constant")
    for key in ("source_key", "mask_key", "timestep_sampling", "max_epochs", "bridge_noise_sigma"):
        assert getattr(settings, key) == LBM_TAKES[key]


def test_what_lbm_s_own_yaml_lacks_is_done_as_lbm_does_it() -> None:
    """Its trainings make the base from the backbone and train the whole denoiser."""
    settings = parse_train_settings(LBM_TAKES)
    assert (settings.base_model_path, settings.makes_base) == (Path("checkpoints/base.safetensors"), True)
    assert (settings.full_finetune, settings.rank) == (True, None)
    lora = parse_train_settings({**LBM_TAKES, "rank": 8, "base_model_path": ""})
    assert (lora.makes_base, lora.full_finetune, lora.rank) == (True, False, 8)


def test_who_names_a_base_says_what_to_train() -> None:
    with pytest.raises(ConfigError, match=r"rank: give a rank .* or full_finetune: true"):
        parse_train_settings({**LBM_TAKES, "base_model_path": "base.ckpt"})
    with pytest.raises(ConfigError, match="rank: give a rank"):
        parse_train_settings({**LBM_TAKES, "base_model_path": "base.ckpt", "full_finetune": False})


LEFT_OUT = {
    "timestep_sampling": "uniform", "logit_mean": 0.0, "logit_std": 1.0, "selected_timesteps": None, "prob": None,
    "bridge_noise_sigma": 0.005, "latent_loss_type": "l2", "latent_loss_weight": 1.0, "pixel_loss_type": "lpips",
    "pixel_loss_weight": 0.0, "max_grad_norm": None, "mixed_precision": "bf16", "optimizer": "AdamW",
    "optimizer_kwargs": {}, "lr_scheduler": "constant", "warmup_steps": 0, "conditioning_images_keys": (),
    "conditioning_masks_keys": (), "mask_key": None, "resume_from_checkpoint": True, "vae_num_channels": 4,
    "unet_input_channels": 4, "backbone_signature": "stabilityai/stable-diffusion-xl-base-1.0", "full_finetune": True,
    "ema_decay": None, "gradient_accumulation_steps": 1, "pixel_loss_side": 512,
}  # fmt: skip
"""What LBM's trainer does where its YAML says nothing."""


@pytest.mark.parametrize("key", LEFT_OUT)
def test_a_key_that_is_left_out_has_lbm_s_default(key: str) -> None:
    settings = parse_train_settings({"train_shards": "a.tar", "save_ckpt_path": "out"})
    assert getattr(settings, key) == LEFT_OUT[key]


def test_a_schedule_under_lbm_s_name_is_taken_over_or_refused_with_ours() -> None:
    theirs = {"learning_rate_scheduler": "polynomial", "learning_rate_scheduler_kwargs": {"power": 2}}
    settings = parse_train_settings({**RUN, "rank": 8, **theirs})
    assert (settings.lr_scheduler, settings.lr_scheduler_kwargs) == ("polynomial", {"power": 2})
    said = refusal(rank=8, learning_rate_scheduler="CosineAnnealingLR")
    assert "set lr_scheduler to one of linear, cosine" in said
    assert "leave one of them out" in refusal(
        rank=8, learning_rate_scheduler="linear", lr_scheduler="constant"
    )


def test_its_yaml_gives_the_same_settings_again() -> None:
    settings = parse_train_settings(
        {**RUN, "rank": 8, "optimizer_kwargs": {"betas": [0.9, 0.95]}, "image_size": [512, 768]}
    )
    assert parse_train_settings(yaml.safe_load(settings.to_yaml())) == settings


def test_the_models_keys_come_from_the_config_beside_the_base() -> None:
    given = {**RUN, "base_model_path": str(BASE_PATH), "rank": 8}
    beside = yaml.safe_load(CONFIG_PATH.read_text())
    assert parse_train_settings(given).lbm == parse_config(beside)
    assert (
        parse_train_settings({**given, "bridge_noise_sigma": 0.1}).denoiser == parse_config(beside).denoiser
    )
    assert parse_train_settings({**given, "bridge_noise_sigma": 0.1}).bridge_noise_sigma == 0.1


def test_without_a_config_beside_the_base_the_model_is_the_full_size_one() -> None:
    assert parse_train_settings({**RUN, "rank": 8}).lbm == LbmConfig()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rnk": 8}, "unknown key rnk (did you mean rank?)"),
        ({"rank": 8, "learning_rat": 1}, "unknown key learning_rat (did you mean learning_rate?)"),
        ({"rank": 8, "logit_men": 1}, "unknown key logit_men (did you mean logit_mean?)"),
        ({"rank": 8, "denoiser": {"layers_per_blok": 1}}, "did you mean layers_per_block?"),
        ({"rank": 8, "batch_size": "two"}, "batch_size: input should be a valid integer"),
        ({"rank": 8, "batch_size": 0}, "batch_size: input should be greater than or equal to 1, got 0"),
        ({"rank": True}, "rank: expected a number, got true"),
        ({"rank": 8, "ema_decay": 1.0}, "ema_decay: input should be less than 1"),
        ({"rank": 8, "mixed_precision": "fp8"}, "mixed_precision: input should be 'no', 'fp16' or 'bf16'"),
        ({"rank": 8, "report_to": "paper"}, "report_to: input should be"),
        ({"rank": 8, "train_shards": []}, "train_shards: expected at least 1 value, got []"),
        ({"rank": 8, "train_shards": ""}, "train_shards: expected a list of values, got nothing"),
        ({"rank": 8, "train_shards": 3}, "train_shards.0: input should be a valid string, got 3."),
        ({"rank": 8, "image_size": [8, 8, 8]}, "image_size: expected at most 2 values, got [8, 8, 8]"),
        ({"rank": 8, "base_model_path": 3}, "base_model_path: expected a path, got 3"),
        (
            {"rank": 8, "train_shards": ["a.tar", ""]},
            "train_shards.1: string should have at least 1 character",
        ),
        ({"rank": 8, "save_ckpt_path": " "}, "save_ckpt_path: expected a path, got nothing"),
        ({"rank": 8, "learning_rate": float("nan")}, "learning_rate: input should be"),
    ],
)
def test_a_key_that_is_not_right_is_named(keys: dict[str, Any], said: str) -> None:
    assert said in refusal(**keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "rank: give a rank to start a LoRA, lora_weights_path to continue one"),
        ({"lora_weights_path": "a.safetensors", "rank": 8, "alpha": 8}, "leave out rank, alpha"),
        ({"full_finetune": True, "rank": 8}, "full_finetune: trains the weights themselves, so leave out rank"),
        ({"full_finetune": True, "trainable_lora_modules": ["attn1"]}, "leave out trainable_lora_modules"),
        ({"full_finetune": True, "lora_weights_path": "a"}, "leave out lora_weights_path"),
        ({"full_finetune": True, "output_formats": ["native", "kohya"]}, "leave kohya out of output_formats"),
        ({"rank": 8, "trainable_lora_modules": []}, "trainable_lora_modules: an empty list trains nothing"),
        ({"rank": 8, "prob": [1.0]}, "prob: needs selected_timesteps beside it"),
        ({"rank": 8, "selected_timesteps": [500]}, "selected_timesteps: needs prob beside it"),
        ({"rank": 8, **FOUR_TIMESTEPS, "prob": [0.5, 0.5]}, "prob: expected 4 entries"),
        ({"rank": 8, "latent_loss_weight": 0, "pixel_loss_weight": 0}, "there is nothing to minimise"),
        ({"rank": 8, "optimizer": "AdmW"}, "did you mean AdamW?"),
        ({"rank": 8, "optimizer_kwargs": {"weight_decai": 1}}, "did you mean weight_decay?"),
        ({"rank": 8, "optimizer_kwargs": {"lr": 1}}, "optimizer_kwargs.lr: is set by learning_rate"),
        ({"rank": 8, "lr_scheduler": "cosin"}, "did you mean cosine?"),
        ({"rank": 8, "warmup_steps": 5}, "warmup_steps: lr_scheduler constant has no warm-up"),
        ({"rank": 8, "image_size": [500, 512]}, "expected multiples of 32 for this model, got [500, 512] (near: [512, 512])"),
        ({"rank": 8, "pixel_crop": 100}, "pixel_crop: expected a multiple of the VAE's 8 pixels, got 100"),
        ({"rank": 8, "pixel_crop": 64, "pixel_tile_size": 64}, "leave out pixel_tile_size"),
        ({"rank": 8, "mixed_precision": "fp16", "device": "cpu"}, "fp16 needs an accelerator"),
        ({"rank": 8, "wandb_project": "p", "report_to": "tensorboard"}, "wandb_project: is for report_to: wandb"),
        ({"rank": 8, "num_steps": [1, 0]}, "num_steps: expected 1 or more, got 0"),
        ({"rank": 8, "validation_interval": 5}, "there are no validation_shards"),
        ({"rank": 8, "source_key": "jpg", "target_key": "JPG"}, "target_key: same as source_key (JPG)"),
        ({"rank": 8, "mask_key": "SOURCE"}, "mask_key: same as source_key (SOURCE)"),
        ({"rank": 8, "mask_key": "target"}, "mask_key: same as target_key (target)"),
        ({"rank": 8, "output_formats": ["native", "kohya", "native"]}, "output_formats: names native more than once"),
    ],
)  # fmt: skip
def test_what_cannot_be_together_is_refused(keys: dict[str, Any], said: str) -> None:
    assert said in refusal(**keys)


def test_every_wrong_combination_is_named_at_once() -> None:
    said = refusal(rank=8, latent_loss_weight=0, pixel_loss_weight=0, num_steps=0)
    assert "nothing to minimise" in said
    assert "num_steps" in said


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("rank: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_train_settings(broken)
    with pytest.raises(ConfigError, match=r"missing\.yaml: cannot be read"):
        load_train_settings(tmp_path / "missing.yaml")
    broken.write_text("- rank")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_train_settings(broken)


def test_missing_keys_are_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 8")
    with pytest.raises(ConfigError, match=r"run\.yaml: train_shards is required; save_ckpt_path is required"):
        load_train_settings(path)


def test_a_model_s_configuration_is_no_training() -> None:
    with pytest.raises(ConfigError, match=r"describes only a model.*train_shards, save_ckpt_path") as caught:
        load_train_settings(CONFIG_PATH)
    assert "lbm infer --config_path" in str(caught.value.hint)


def test_what_tells_a_training_is_what_every_training_needs() -> None:
    needed = [name for name, field in TrainSettings.model_fields.items() if field.is_required()]
    assert list(TRAINING_NEEDS) == needed


def test_a_home_is_resolved_and_other_paths_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    settings = parse_train_settings(
        {**RUN, "rank": 8, "base_model_path": "~/base.ckpt", "train_shards": ["~/a.tar", "pipe:cat a.tar"]}
    )
    assert settings.base_model_path == Path("/home/someone/base.ckpt")
    assert settings.train_shards == ("/home/someone/a.tar", "pipe:cat a.tar")
    assert settings.save_ckpt_path == Path("out")


def test_short_forms() -> None:
    settings = parse_train_settings(
        {**RUN, "rank": 8, "image_size": 512, "num_steps": 4, "save_precision": "float", "output_formats": "peft"}
    )  # fmt: skip
    assert settings.image_size == (512, 512)
    assert settings.num_steps == (4,)
    assert settings.save_precision == "float32"
    assert settings.output_formats == ("peft",)


def test_empty_values_of_a_template_mean_none() -> None:
    empty: dict[str, Any] = {"validation_shards": [], "lora_weights_path": "", "wandb_project": None}
    settings = parse_train_settings({**RUN, "rank": 8, **empty})
    assert settings.validation_shards is None
    assert settings.lora_weights_path is None
    assert parse_train_settings({**RUN, "rank": 8, "validation_shards": ""}).validation_shards is None


@pytest.mark.parametrize(
    ("keys", "tracker"),
    [
        ({}, "tensorboard"),
        ({"wandb_project": "p"}, "wandb"),
        ({"report_to": "none"}, None),
        ({"report_to": "mlflow"}, "mlflow"),
    ],
)
def test_the_tracker_that_is_meant(keys: dict[str, Any], tracker: str | None) -> None:
    assert parse_train_settings({**RUN, "rank": 8, **keys}).tracker == tracker


def test_what_is_derived() -> None:
    settings = parse_train_settings({**RUN, "rank": 8, "save_interval": 7})
    assert settings.validate_every == 7
    other = parse_train_settings({**RUN, "rank": 8, "validation_shards": "v", "validation_interval": 3})
    assert other.validate_every == 3


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_train_settings({**RUN, "rank": 8}).rank = 9


def test_every_key_of_the_specification_is_there() -> None:
    named = (
        "train_shards validation_shards base_model_path lora_weights_path rank conv_rank alpha "
        "trainable_lora_modules batch_size learning_rate optimizer save_ckpt_path log_interval max_epochs "
        "save_interval num_steps wandb_project backbone_signature vae_num_channels unet_input_channels "
        "timestep_sampling selected_timesteps prob logit_mean logit_std conditioning_images_keys "
        "conditioning_masks_keys source_key target_key mask_key bridge_noise_sigma latent_loss_type "
        "latent_loss_weight pixel_loss_type pixel_loss_weight denoiser vae"
    )
    assert set(named.split()) <= set(TrainSettings.model_fields)


@pytest.mark.parametrize(
    ("given", "side"),
    [
        ({}, 512),  # LBMConfig.pixel_loss_max_size
        ({"pixel_crop": 64}, 64),
        ({"pixel_crop": "whole"}, None),
        ({"pixel_crop": None}, None),
        ({"pixel_tile_size": 64}, None),
        ({"pixel_tile_size": 64, "pixel_crop": "whole"}, None),
    ],
)
def test_the_pixel_loss_sees_a_crop_as_in_lbm_unless_told_otherwise(
    given: dict[str, object], side: int | None
) -> None:
    assert parse_train_settings({**RUN, "rank": 8, **given}).pixel_loss_side == side


def test_a_base_that_the_hubs_cache_lacks_is_named_with_its_key() -> None:
    told = refusal(base_model_path="nobody/no-such-model")
    assert "base_model_path: nobody/no-such-model: is not a file or folder" in told
