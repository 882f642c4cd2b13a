"""The YAML of a training run: the keys of training and the model's own keys, in one file (SPEC section 7)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import LbmConfig, load_config
from sigmascope.lbm.config_errors import config_error
from sigmascope.lbm.config_kinds import refuse_model
from sigmascope.lbm.loading import find_config
from sigmascope.lbm.training.settings_errors import impossible_combinations, partial_pairs
from sigmascope.lbm.training.settings_values import as_list, numbers_are_numbers, user_path
from sigmascope.lbm.yaml_file import read_yaml

MixedPrecision = Literal["no", "fp16", "bf16"]
OutputFormat = Literal["native", "kohya", "peft"]
SavePrecision = Literal["float32", "fp16", "bf16"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "none"]

Pattern = Annotated[str, StringConstraints(min_length=1)]

EXAMPLE_HINT = "Start from the example in docs/lbm-train-config.md."


class TrainSettings(LbmConfig):
    """Everything that one training run is told; `docs/lbm-train-config.md` says what each key does.

    It is an `LbmConfig` too, with the model's own keys; `lbm` gives these alone. Relative paths are relative to
    the directory that training is started in, as for every path on a command line.
    """

    train_shards: tuple[Pattern, ...] = Field(min_length=1)
    validation_shards: tuple[Pattern, ...] | None = None
    base_model_path: Path
    save_ckpt_path: Path
    lora_weights_path: Path | None = None
    rank: int | None = Field(default=None, ge=1)
    conv_rank: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    trainable_lora_modules: tuple[str, ...] | None = None
    full_finetune: bool = False
    batch_size: int = Field(default=1, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-4, gt=0)
    optimizer: str = "AdamW"
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    lr_scheduler: str = "constant"
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    max_epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    gradient_checkpointing: bool = False
    mixed_precision: MixedPrecision = "no"
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    allow_pipe: bool = False
    shuffle_buffer: int = Field(default=256, ge=1)
    image_size: tuple[int, int] | None = None
    crop: Literal["center", "random"] = "center"
    pixel_crop: int | None = Field(default=None, ge=1)
    pixel_tile_size: int | None = Field(default=None, ge=1)
    log_interval: int = Field(default=10, ge=1)
    save_interval: int = Field(default=500, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    validation_interval: int | None = Field(default=None, ge=1)
    validation_samples: int = Field(default=4, ge=1)
    num_steps: tuple[int, ...] = Field(default=(1,), min_length=1)
    wandb_project: str | None = None
    report_to: Tracker | None = None
    output_formats: tuple[OutputFormat, ...] = Field(default=("native",), min_length=1)
    save_precision: SavePrecision = "float32"

    @field_validator(
        "train_shards",
        "validation_shards",
        "trainable_lora_modules",
        "num_steps",
        "output_formats",
        mode="before",
    )
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return as_list(value)

    @field_validator("base_model_path", "save_ckpt_path", "lora_weights_path", mode="before")
    @classmethod
    def _paths_of_a_user(cls, value: Any) -> Any:
        return user_path(value)

    @field_validator("train_shards", "validation_shards", mode="after")
    @classmethod
    def _shards_of_a_user(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return tuple(str(user_path(shard)) for shard in value) if value else None  # [] is none too

    @field_validator("image_size", mode="before")
    @classmethod
    def _one_side_is_a_square(cls, value: Any) -> Any:
        return [value, value] if isinstance(value, int) else value

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _no_is_no_boolean(cls, value: Any) -> Any:
        """YAML 1.1 reads a bare `no` as false."""
        return "no" if value is False else value

    @field_validator("save_precision", mode="before")
    @classmethod
    def _float_is_float32(cls, value: Any) -> Any:
        """`lora extract` calls it float."""
        return "float32" if value == "float" else value

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, data: Any) -> Any:
        return numbers_are_numbers(data, cls)

    @model_validator(mode="after")
    def _can_be_done(self) -> "TrainSettings":
        if wrong := impossible_combinations(self):
            raise ValueError("; ".join(wrong))
        return self

    @property
    def lbm(self) -> LbmConfig:
        """The model's own keys."""
        return LbmConfig.model_validate({name: getattr(self, name) for name in LbmConfig.model_fields})

    @property
    def convolution_rank(self) -> int | None:
        """Rank asked for in convolutions: `conv_rank`, else `rank`."""
        return self.conv_rank if self.conv_rank is not None else self.rank

    @property
    def validate_every(self) -> int:
        """Steps between two validations."""
        return self.validation_interval or self.save_interval

    @property
    def tracker(self) -> str | None:
        """Accelerate's name of the tracker; None when there is to be none."""
        chosen = self.report_to or ("wandb" if self.wandb_project else "tensorboard")
        return None if chosen == "none" else chosen


def parse_train_settings(data: Any, *, where: str = "settings") -> TrainSettings:
    """Validate what a YAML file or a caller gives.

    Keys of the model that are left out are taken from the config beside `base_model_path` (`<stem>.yaml` or
    `config.yaml`) where there is one, else they have the defaults of the full-size model.

    Args:
        data: A mapping with the keys of `TrainSettings`.
        where: Named in errors: the file, or what the mapping is.

    Raises:
        ConfigError: Names each key that is unknown (with the nearest known one), of a wrong type, or in a
            combination that cannot be; or it describes a model alone, or the config beside the base is not valid.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping of keys to values, got {type(data).__name__}.", hint=EXAMPLE_HINT
        )
    refuse_model(data, LbmConfig.model_fields, where)
    if wrong := partial_pairs(data):
        raise ConfigError(f"{where}: {'; '.join(wrong)}.", hint="Give both, or neither.")
    try:
        return TrainSettings.model_validate({**_beside_the_base(data), **data})
    except ValidationError as error:
        raise config_error(error, TrainSettings, where) from error


def load_train_settings(path: str | Path) -> TrainSettings:
    """Read and validate the YAML of a training run; see `parse_train_settings`.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not describe a run.
    """
    path = Path(path)
    return parse_train_settings(read_yaml(path, hint="Check --path_config."), where=str(path))


def _beside_the_base(data: Mapping[str, Any]) -> dict[str, Any]:
    """The model's keys that the config beside the base gives."""
    base = user_path(data.get("base_model_path"))
    if not isinstance(base, str | Path):
        return {}
    found = find_config(base)
    if found is None:
        return {}
    return load_config(found).model_dump()
