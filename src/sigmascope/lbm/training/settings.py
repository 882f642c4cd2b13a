"""The YAML of a training run: the keys of training and the model's own keys, in one file.

Users' notation is translated to that of the settings. Settings that are valid one by one but not together are refused,
with one line for each conflict.

Every optimizer of `torch.optim` and every schedule of diffusers is available. Importing this module does not load
diffusers, so that settings are checked quickly.
"""

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, get_args

import torch
from pydantic import BaseModel, Field, StringConstraints, ValidationError, field_validator, model_validator
from torch import nn

from sigmascope.checkpoints.hub import local_model
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lbm.config import (
    TRAINING_NEEDS,
    LbmConfig,
    config_error,
    did_you_mean,
    find_config,
    load_config,
    read_yaml,
)
from sigmascope.units import parse_size

MixedPrecision = Literal["no", "fp16", "bf16"]
OutputFormat = Literal["native", "kohya", "peft"]
SavePrecision = Literal["float32", "fp16", "bf16"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "aim", "clearml", "none"]
Pattern = Annotated[str, StringConstraints(min_length=1)]

_OF_LBM: Final = {
    "learning_rate_scheduler": "lr_scheduler",
    "learning_rate_scheduler_kwargs": "lr_scheduler_kwargs",
}
"""Keys of LBM's own YAMLs that have another name here."""
UNSUPPORTED_OPTIMIZERS = frozenset({"Optimizer", "LBFGS", "SparseAdam"})
"""The base class, the one that calls the model itself, and the one for sparse gradients."""
SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": (),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power",),
    "constant": (),
    "constant_with_warmup": (),
    "piecewise_constant": ("step_rules",),
}
"""diffusers' schedules and the arguments of each."""
NO_WARMUP = frozenset({"constant", "piecewise_constant"})
"""Schedules that take no `warmup_steps`."""
LENGTH_INDEPENDENT = NO_WARMUP | {"constant_with_warmup"}
"""Schedules that do not depend on the length of the run."""
EXAMPLE_HINT = "Start from the example in docs/lbm-train-config.md."


OWN_BASE: Final = "base.safetensors"
"""The base in the run's folder, where the YAML names none."""


class TrainSettings(LbmConfig):
    """All settings of one training run; `docs/lbm-train-config.md` says what each key does.

    A YAML that names no base gets one, made from `backbone_signature` in the run's folder. If nothing says what to train
    either, every weight of the denoiser is trained, as in LBM's own trainings.

    It is also an `LbmConfig`, with the model's own keys; `lbm` gives only these. Relative paths are relative to
    the directory that training is started in, as for every path on a command line.
    """

    train_shards: tuple[Pattern, ...] = Field(min_length=1)
    validation_shards: tuple[Pattern, ...] | None = None
    base_model_path: Path = Path(OWN_BASE)
    save_ckpt_path: Path
    resume_from_checkpoint: bool = True
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
    max_grad_norm: float | None = Field(default=None, gt=0)
    max_epochs: int = Field(default=1, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    gradient_checkpointing: bool = False
    mixed_precision: MixedPrecision = "bf16"
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    allow_pipe: bool = Field(default=False, exclude=True)
    max_member: str | int | None = None
    shuffle_buffer: int = Field(default=256, ge=1)
    image_size: tuple[int, int] | None = None
    crop: Literal["center", "random"] = "center"
    pixel_crop: int | Literal["whole"] | None = 512
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
        """One value in place of a list of one, as users write it; an empty one is none."""
        if isinstance(value, str) and not value.strip():
            return None
        return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value

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
    def _as_it_is_called_here(cls, data: Any) -> Any:
        return with_own_base(renamed(numbers_are_numbers(data, cls)))

    @model_validator(mode="after")
    def _can_be_done(self) -> "TrainSettings":
        if wrong := list(impossible_combinations(self)):
            raise ValueError("; ".join(wrong))
        return self

    @property
    def lbm(self) -> LbmConfig:
        """The model's own keys."""
        return LbmConfig.model_construct(**{name: getattr(self, name) for name in LbmConfig.model_fields})

    @property
    def makes_base(self) -> bool:
        """Whether the run makes its base itself."""
        return self.base_model_path == self.save_ckpt_path / OWN_BASE

    @property
    def pixel_loss_side(self) -> int | None:
        """Side of the crop that the pixel loss decodes; None for the whole picture."""
        cut = "pixel_crop" in self.model_fields_set or self.pixel_tile_size is None
        return None if self.pixel_crop == "whole" or not cut else self.pixel_crop

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that training computes in."""
        return {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.mixed_precision]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the base while training; trained weights stay float32."""
        return torch.float32 if self.full_finetune else self.compute_dtype

    @property
    def validate_every(self) -> int:
        """Steps between two validations."""
        return self.validation_interval or self.save_interval

    @property
    def tracker(self) -> str | None:
        """Accelerate's name of the tracker; None for no tracker."""
        chosen = self.report_to or ("wandb" if self.wandb_project else "tensorboard")
        return None if chosen == "none" else chosen


def load_train_settings(path: str | Path, *, allow_pipe: bool = False) -> TrainSettings:
    """Read and validate the YAML of a training run; see `parse_train_settings`.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not describe a run.
    """
    path = Path(path)
    data = read_yaml(path, hint="Check --path_config.")
    return parse_train_settings(data, where=str(path), allow_pipe=allow_pipe)


def parse_train_settings(data: Any, *, where: str = "settings", allow_pipe: bool = False) -> TrainSettings:
    """Validate what a YAML file or a caller gives.

    Missing keys of the model are taken from the config beside `base_model_path` (`<stem>.yaml` or `config.yaml`) if
    there is one; otherwise they have the defaults of the full-size model.

    Args:
        data: A mapping with the keys of `TrainSettings`.
        where: Named in errors: the file, or what the mapping is.
        allow_pipe: Whether the commands of `pipe:` shards may run. The YAML itself cannot allow that.

    Raises:
        ConfigError: Names each key that is unknown (with the nearest known one), has a wrong type, or conflicts with
            another; or the YAML describes only a model, or the config beside the base is not valid.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping of keys to values, got {type(data).__name__}.", hint=EXAMPLE_HINT
        )
    if "allow_pipe" in data:
        raise ConfigError(
            f"{where}: allow_pipe: a file may not allow commands.",
            hint="Remove it, and pass --allow_pipe on the command line if you trust the file.",
        )
    if data and all(key in LbmConfig.model_fields for key in data):
        raise ConfigError(
            f"{where}: describes only a model, but a training needs {', '.join(TRAINING_NEEDS)} too.",
            hint="Add these keys (docs/lbm-train-config.md), or give the file to sigmascope lbm infer --config_path.",
        )
    # As the user wrote them: a default for the missing half would go with the other by chance only.
    for written, missing in (("selected_timesteps", "prob"), ("prob", "selected_timesteps")):
        if data.get(written) is not None and data.get(missing) is None:
            raise ConfigError(
                f"{where}: {written}: needs {missing} beside it.", hint="Give both, or neither."
            )
    base = user_path(data.get("base_model_path"))
    if isinstance(base, str | Path):
        try:
            base = local_model(base)
        except CheckpointError as error:
            raise ConfigError(f"{where}: base_model_path: {error.message}", hint=error.hint) from error
        data = {**data, "base_model_path": base}
    config = find_config(base) if isinstance(base, Path) else None
    of_the_model = {} if config is None else load_config(config).model_dump()
    try:
        return TrainSettings.model_validate({**of_the_model, **data, "allow_pipe": allow_pipe})
    except ValidationError as error:
        raise config_error(error, TrainSettings, where) from error


def renamed(data: Any) -> Any:
    """Keys of LBM's own YAMLs under their names here.

    Raises:
        ValueError: One is given under both names, or names a class of torch, which LBM takes.
    """
    if not isinstance(data, Mapping):
        return data
    values = {key: value for key, value in data.items() if key not in _OF_LBM}
    for theirs, ours in _OF_LBM.items():
        value = data.get(theirs)
        if not value:  # null, or no arguments
            continue
        if ours in values:
            raise ValueError(f"{theirs}: {ours} is the same; leave one of them out")
        if ours == "lr_scheduler" and value not in SCHEDULES:
            raise ValueError(
                f"{theirs}: torch's {value} is not available; set {ours} to one of {', '.join(SCHEDULES)}"
            )
        values[ours] = value
    return values


def with_own_base(data: Any) -> Any:
    """What LBM's own YAMLs leave out: the base, which they make from the backbone, and how to train, which is whole."""
    if not isinstance(data, Mapping) or user_path(data.get("base_model_path")) is not None:
        return data
    folder = user_path(data.get("save_ckpt_path"))
    if not isinstance(folder, str | Path):
        return data
    how = {key: data[key] for key in ("rank", "lora_weights_path", "full_finetune") if data.get(key)}
    return {**data, "base_model_path": Path(folder) / OWN_BASE} | ({} if how else {"full_finetune": True})


def impossible_combinations(settings: "TrainSettings") -> Iterator[str]:
    """Yield a line for each conflict between settings, with the keys and what to do."""
    yield from _what_is_trained(settings)
    yield from _what_is_minimised(settings)
    yield from _how_it_is_optimised(settings)
    yield from _sizes(settings)
    yield from _where_it_runs(settings)


def _what_is_trained(settings: "TrainSettings") -> Iterator[str]:
    ranks = [key for key in ("rank", "conv_rank", "alpha") if getattr(settings, key) is not None]
    if settings.full_finetune:
        keys = (*ranks, "lora_weights_path", "trainable_lora_modules")
        if of_lora := [key for key in keys if getattr(settings, key) is not None]:
            yield f"full_finetune: trains the weights themselves, so leave out {', '.join(of_lora)}"
        if others := [name for name in settings.output_formats if name != "native"]:
            yield (
                f"full_finetune: writes a whole checkpoint, not a LoRA; leave {', '.join(others)} out of "
                "output_formats"
            )
    elif settings.trainable_lora_modules == ():
        yield "trainable_lora_modules: an empty list trains nothing; leave it out to train every module"
    elif settings.lora_weights_path is not None:
        if ranks:
            yield f"lora_weights_path: its own ranks and alphas are taken over; leave out {', '.join(ranks)}"
    elif settings.rank is None:
        yield "rank: give a rank to start a LoRA, lora_weights_path to continue one, or full_finetune: true"


def _what_is_minimised(settings: "TrainSettings") -> Iterator[str]:
    named = {key: getattr(settings, key).lower() for key in ("source_key", "target_key")}
    masked = [key for key, name in named.items() if name == (settings.mask_key or "").lower()]
    if named["source_key"] == named["target_key"]:
        yield f"target_key: same as source_key ({settings.target_key}), so there is nothing to learn"
    elif settings.mask_key is not None and masked:
        yield (f"mask_key: same as {masked[0]} ({settings.mask_key}); name the mask's file, or leave it out")
    elif settings.latent_loss_weight == 0 and settings.pixel_loss_weight == 0:
        yield "latent_loss_weight: 0, like pixel_loss_weight, so there is nothing to minimise"


def _how_it_is_optimised(settings: "TrainSettings") -> Iterator[str]:
    try:
        check_optimizer(settings.optimizer, settings.optimizer_kwargs)
    except ConfigError as error:
        yield str(error).rstrip(".")
    try:
        check_schedule(settings.lr_scheduler, settings.warmup_steps, settings.lr_scheduler_kwargs)
    except ConfigError as error:
        yield str(error).rstrip(".")


def _sizes(settings: "TrainSettings") -> Iterator[str]:
    factor = settings.factor
    if settings.image_size is not None and any(side < 1 or side % factor for side in settings.image_size):
        near = [max(round(side / factor), 1) * factor for side in settings.image_size]
        given = list(settings.image_size)
        yield f"image_size: expected multiples of {factor} for this model, got {given} (near: {near})"
    crop, tile = settings.pixel_loss_side, settings.pixel_tile_size
    for key, side in (("pixel_crop", crop), ("pixel_tile_size", tile)):
        if side is not None and (side < settings.vae.factor or side % settings.vae.factor):
            yield f"{key}: expected a multiple of the VAE's {settings.vae.factor} pixels, got {side}"
    if crop is not None and tile is not None:
        yield "pixel_crop: the crop is decoded without tiles, so leave out pixel_tile_size or pixel_crop"
    if settings.max_member is not None:
        try:
            parse_size(str(settings.max_member))
        except ConfigError:
            yield f"max_member: expected a size such as 2GB, got {settings.max_member!r}"


def _where_it_runs(settings: "TrainSettings") -> Iterator[str]:
    if settings.mixed_precision == "fp16" and settings.device.partition(":")[0] == "cpu":
        yield "mixed_precision: fp16 needs an accelerator; use bf16 or no on device cpu"
    if settings.wandb_project is not None and settings.report_to not in (None, "wandb"):
        yield f"wandb_project: is for report_to: wandb, not {settings.report_to}"
    if min(settings.num_steps) < 1:
        yield f"num_steps: expected 1 or more, got {min(settings.num_steps)}"
    if settings.validation_interval is not None and settings.validation_shards is None:
        yield "validation_interval: there are no validation_shards to validate on"
    formats = settings.output_formats
    if twice := [name for name in dict.fromkeys(formats) if formats.count(name) > 1]:
        yield f"output_formats: names {', '.join(twice)} more than once; name each once"


def user_path(value: Any) -> Any:
    """A path with `~` resolved, None for an empty one; anything else as it is.

    Templates of configs leave `""` where nothing is meant, and to `Path` that is the current folder.
    """
    if isinstance(value, str) and not value.strip():
        return None
    if isinstance(value, str | Path) and str(value).startswith("~"):
        return Path(value).expanduser()
    return value


def numbers_are_numbers(data: Any, model: type[BaseModel]) -> Any:
    """Refuse true and false in place of a number; pydantic takes them for 1 and 0.

    Raises:
        ValueError: Names the keys.
    """
    if not isinstance(data, Mapping):
        return data
    wrong = [
        f"{key}: expected a number, got {str(value).lower()}"
        for key, value in data.items()
        if isinstance(value, bool) and key in model.model_fields and _is_number(model, key)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    return data


def _is_number(model: type[BaseModel], key: str) -> bool:
    annotation: Any = model.model_fields[key].annotation
    kinds = set(get_args(annotation)) if isinstance(annotation, UnionType) else {annotation}
    return bool(kinds & {int, float}) and kinds <= {int, float, NoneType}


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float, kwargs: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of `torch.optim`.

    Args:
        name: Name of its class, in upper or lower case.
        parameters: The parameters that it changes.
        learning_rate: The learning rate where the schedule's factor is 1.
        kwargs: Its other arguments; lists (YAML has no tuples) become tuples.

    Raises:
        ConfigError: There is no such optimizer, or it refuses an argument or its value.
    """
    make: Any = optimizer_class(name)  # each class has arguments of its own
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
    try:
        optimizer: torch.optim.Optimizer = make(list(parameters), lr=learning_rate, **given)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer: {name} refuses {dict(kwargs)} ({error}).",
            hint="Correct optimizer_kwargs, or choose another optimizer.",
        ) from error
    return optimizer


def check_optimizer(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse an unknown optimizer, and unknown or invalid arguments, before any model is loaded.

    Raises:
        ConfigError: Names the optimizer or the argument, and the known ones or what is wrong with the value.
    """
    kind = optimizer_class(name)
    known = [argument for argument in inspect.signature(kind).parameters if argument not in ("params", "lr")]
    for key in kwargs:
        if key == "lr":
            raise ConfigError("optimizer_kwargs.lr: is set by learning_rate.", hint="Leave it out here.")
        _require_known("optimizer_kwargs", key, known, kind.__name__)
    # Whether a fused kernel can be had depends on where the parameters will be.
    anywhere = {key: value for key, value in kwargs.items() if key != "fused"}
    make_optimizer(name, [nn.Parameter(torch.zeros(1, 1))], 1e-3, anywhere)


def _require_known(where: str, key: str, known: Sequence[str], owner: str) -> None:
    if key in known:
        return
    raise ConfigError(
        f"{where}.{key}: {owner} has no such argument{did_you_mean(key, known)}.",
        hint=f"Known: {', '.join(known) or 'none'}.",
    )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Find an optimizer of `torch.optim` by its name, in upper or lower case.

    Raises:
        ConfigError: The training loop has no such optimizer; lists all that it has.
    """
    candidates = (
        getattr(torch.optim, name) for name in dir(torch.optim) if name not in UNSUPPORTED_OPTIMIZERS
    )
    known: dict[str, type[torch.optim.Optimizer]] = {
        kind.__name__.lower(): kind
        for kind in candidates
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    optimizer = known.get(name.lower())
    if optimizer is None:
        names = sorted(kind.__name__ for kind in known.values())
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        guess = f" (did you mean {known[near[0]].__name__}?)" if near else ""
        raise ConfigError(f"optimizer: there is no {name!r}{guess}.", hint=f"Use one of {', '.join(names)}.")
    return optimizer


def check_schedule(name: str, warmup_steps: int, kwargs: Mapping[str, Any]) -> None:
    """Refuse an unknown schedule or unknown arguments.

    Raises:
        ConfigError: Names what is wrong, and the known schedules or arguments.
    """
    arguments = SCHEDULES.get(name)
    if arguments is None:
        raise ConfigError(
            f"lr_scheduler: there is no {name!r}{did_you_mean(name, SCHEDULES)}.",
            hint=f"Use one of {', '.join(SCHEDULES)}.",
        )
    if warmup_steps and name in NO_WARMUP:
        raise ConfigError(
            f"warmup_steps: lr_scheduler {name} has no warm-up.", hint="Use constant_with_warmup, or 0."
        )
    for key in kwargs:
        _require_known("lr_scheduler_kwargs", key, arguments, name)
    if name == "piecewise_constant" and "step_rules" not in kwargs:
        raise ConfigError(
            "lr_scheduler_kwargs: piecewise_constant needs step_rules.",
            hint='Such as "1:10,0.1:20,0.01": a factor up to each step, and the last one.',
        )
