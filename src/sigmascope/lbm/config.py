"""The YAML that describes a Latent Bridge Matching model: its keys, how it is read, and where it is found.

The top-level keys are those of LBM's own configs. The optional `denoiser:` and `vae:` blocks are ours: with
diffusers' names they override the architecture, so that the same code builds a model of a few megabytes.

A key given twice is an error, although YAML loaders let the last one win. A training's YAML is also accepted as its
model's: LBM's trainer copies it to `config.yaml` beside its checkpoints. Pydantic's errors become one message that a
user can act on.

Importing this module does not load torch; only looking beside a checkpoint does.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from yaml.nodes import MappingNode, ScalarNode

from sigmascope.errors import ConfigError
from sigmascope.files import reason_of
from sigmascope.units import format_size

TimestepSampling = Literal["uniform", "log_normal", "custom_timesteps"]
LatentLoss = Literal["l1", "l2"]
PixelLoss = Literal["l1", "l2", "lpips"]
MaskReduction = Literal["all", "valid"]
DownBlock = Literal["DownBlock2D", "CrossAttnDownBlock2D"]
UpBlock = Literal["UpBlock2D", "CrossAttnUpBlock2D"]
MidBlock = Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"]

PROBABILITY_TOLERANCE = 1e-3
"""How far `prob` may be from a sum of 1: users write 0.333 three times."""
TRAINING_NEEDS: Final = ("train_shards", "save_ckpt_path")
"""Keys that every training's YAML has."""
_OF_A_RUN: Final = (*TRAINING_NEEDS, "base_model_path")
"""Keys that no model's YAML has."""
_MISSPELT_SIMILARITY: Final = 0.85
"""Similarity (difflib's ratio) from which a key is taken for a misspelt key of the model; no key of a training reaches
it."""


class ConfigBlock(BaseModel):
    """Base of every part of a config: unknown keys, NaN and Inf are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


def _check_widths(widths: tuple[int, ...], groups: int) -> None:
    if any(width < 1 or width % groups for width in widths):
        raise ValueError(
            f"block_out_channels: expected multiples of norm_num_groups ({groups}), got {list(widths)}"
        )


class DenoiserConfig(ConfigBlock):
    """Architecture of the denoiser, with the names of diffusers' `UNet2DConditionModel`.

    As in diffusers, `attention_head_dim` holds the number of heads of each block. `cross_attention_dim` must
    equal the widths, because cross attention attends to the hidden states themselves.
    """

    block_out_channels: tuple[int, ...] = (320, 640, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    down_block_types: tuple[DownBlock, ...] = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    up_block_types: tuple[UpBlock, ...] = ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")
    mid_block_type: MidBlock | None = "UNetMidBlock2DCrossAttn"
    transformer_layers_per_block: int | tuple[int, ...] = (1, 2, 10)
    attention_head_dim: int | tuple[int, ...] = (5, 10, 20)
    cross_attention_dim: tuple[int, ...] = ()
    norm_num_groups: int = Field(default=32, ge=1)
    use_linear_projection: bool = True

    @model_validator(mode="before")
    @classmethod
    def _widths_are_attended(cls, data: Any) -> Any:
        """Fill `cross_attention_dim` with the widths unless it is given."""
        if isinstance(data, Mapping) and not data.get("cross_attention_dim"):
            widths = data.get("block_out_channels", cls.model_fields["block_out_channels"].default)
            return {**data, "cross_attention_dim": widths}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> "DenoiserConfig":
        count = len(self.block_out_channels)
        if count == 0:
            raise ValueError("block_out_channels: expected at least one width")
        for key in (
            "down_block_types",
            "up_block_types",
            "cross_attention_dim",
            "layers_per_block",
            "transformer_layers_per_block",
            "attention_head_dim",
        ):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != count:
                raise ValueError(
                    f"{key}: expected {count} entries, one for each of block_out_channels, got {len(value)}"
                )
        for key in ("layers_per_block", "transformer_layers_per_block"):
            depths = getattr(self, key)
            block_depths = depths if isinstance(depths, tuple) else (depths,)
            if min(block_depths) < 1:
                raise ValueError(f"{key}: expected 1 or more, got {list(block_depths)}")
        _check_widths(self.block_out_channels, self.norm_num_groups)
        widths, heads = self.block_out_channels, self.attention_head_dim
        block_heads = heads if isinstance(heads, tuple) else (heads,) * len(widths)
        if any(each < 1 or width % each for width, each in zip(widths, block_heads, strict=True)):
            raise ValueError(
                f"attention_head_dim: expected numbers of heads that divide the widths {list(widths)}, "
                f"got {list(block_heads)}"
            )
        if self.cross_attention_dim != self.block_out_channels:
            raise ValueError(
                f"cross_attention_dim: expected the widths {list(self.block_out_channels)} "
                f"(cross attention attends to the hidden states), got {list(self.cross_attention_dim)}"
            )
        return self

    @property
    def factor(self) -> int:
        """Latent height and width must be multiples of this for skip connections to meet."""
        return int(2 ** (len(self.block_out_channels) - 1))


class VaeConfig(ConfigBlock):
    """Architecture of the VAE, with the names of diffusers' `AutoencoderKL`; the default is SDXL's."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    latent_channels: int = Field(default=4, ge=1)
    layers_per_block: int = Field(default=2, ge=1)
    norm_num_groups: int = Field(default=32, ge=1)
    mid_block_add_attention: bool = True
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    scaling_factor: float = Field(default=0.13025, gt=0)
    shift_factor: float = 0.0
    force_upcast: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> "VaeConfig":
        if not self.block_out_channels:
            raise ValueError("block_out_channels: expected at least one width")
        _check_widths(self.block_out_channels, self.norm_num_groups)
        return self

    @property
    def factor(self) -> int:
        """Image pixels along one side of a latent element."""
        return int(2 ** (len(self.block_out_channels) - 1))


class LbmConfig(ConfigBlock):
    """A whole LBM model. A key that is left out has the default of LBM's own `train_lbm_surface.py`.

    `num_train_timesteps`, `mask_reduction` and `resolution` are ours: the denoiser sees σ·`num_train_timesteps`;
    a loss under a mask is the mean over all elements ("all": LBM's own) or over the valid ones ("valid");
    `resolution` is the side of the square aspect bucket, from which the others follow (1024: LBM's own).
    """

    backbone_signature: str = "stabilityai/stable-diffusion-xl-base-1.0"
    vae_num_channels: int = Field(default=4, ge=1)
    unet_input_channels: int = Field(default=4, ge=1)
    num_train_timesteps: int = Field(default=1000, ge=1)
    timestep_sampling: TimestepSampling = "uniform"
    selected_timesteps: tuple[float, ...] | None = None
    prob: tuple[float, ...] | None = None
    logit_mean: float = 0.0
    logit_std: float = Field(default=1.0, gt=0)
    conditioning_images_keys: tuple[str, ...] = ()
    conditioning_masks_keys: tuple[str, ...] = ()
    source_key: str = "source"
    target_key: str = "target"
    mask_key: str | None = None
    mask_reduction: MaskReduction = "all"
    bridge_noise_sigma: float = Field(default=0.005, ge=0)
    latent_loss_type: LatentLoss = "l2"
    latent_loss_weight: float = Field(default=1.0, ge=0)
    pixel_loss_type: PixelLoss = "lpips"
    pixel_loss_weight: float = Field(default=0.0, ge=0)
    resolution: int = Field(default=1024, ge=8)
    denoiser: DenoiserConfig = Field(default_factory=DenoiserConfig)
    vae: VaeConfig = Field(default_factory=VaeConfig)

    @model_validator(mode="before")
    @classmethod
    def _vae_has_the_channels(cls, data: Any) -> Any:
        """Give the `vae:` block `vae_num_channels` unless it says its own number."""
        if not isinstance(data, Mapping) or "vae_num_channels" not in data:
            return data
        vae = data.get("vae", {})
        if isinstance(vae, Mapping):
            return {**data, "vae": {"latent_channels": data["vae_num_channels"], **vae}}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> "LbmConfig":
        if self.vae.latent_channels != self.vae_num_channels:
            raise ValueError(
                f"vae.latent_channels: expected vae_num_channels ({self.vae_num_channels}), "
                f"got {self.vae.latent_channels}"
            )
        if self.unet_input_channels != self.expected_input_channels:
            raise ValueError(
                f"unet_input_channels: expected {self.expected_input_channels} "
                "(vae_num_channels for the latent and each conditioning image, 1 for each mask), "
                f"got {self.unet_input_channels}"
            )
        if self.timestep_sampling == "custom_timesteps":
            self._check_custom_timesteps()
        return self

    def _check_custom_timesteps(self) -> None:
        if not self.selected_timesteps or not self.prob:
            raise ValueError("selected_timesteps: custom_timesteps needs selected_timesteps and prob")
        if len(self.prob) != len(self.selected_timesteps):
            raise ValueError(
                f"prob: expected {len(self.selected_timesteps)} entries, one for each of "
                f"selected_timesteps, got {len(self.prob)}"
            )
        if min(self.prob) < 0 or abs(sum(self.prob) - 1) > PROBABILITY_TOLERANCE:
            raise ValueError(
                f"prob: expected probabilities that sum to 1, got {list(self.prob)} = {sum(self.prob):g}"
            )
        low, high = min(self.selected_timesteps), max(self.selected_timesteps)
        if low <= 0 or high > self.num_train_timesteps:
            raise ValueError(
                f"selected_timesteps: expected timesteps in (0, {self.num_train_timesteps}], "
                f"got {list(self.selected_timesteps)}"
            )

    @property
    def conditioning_keys(self) -> tuple[str, ...]:
        """What the model takes beside the source: pictures, then masks."""
        return (*self.conditioning_images_keys, *self.conditioning_masks_keys)

    @property
    def expected_input_channels(self) -> int:
        """Channels that the denoiser sees: the latent, then every conditioning image and mask."""
        images = 1 + len(self.conditioning_images_keys)
        return self.vae_num_channels * images + len(self.conditioning_masks_keys)

    @property
    def factor(self) -> int:
        """Image height and width must be multiples of this."""
        return self.vae.factor * self.denoiser.factor

    def to_yaml(self) -> str:
        """Give the whole config as YAML text, which `load_config` reads back to an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: str | Path) -> LbmConfig:
    """Read and validate a YAML file.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not describe an LBM model.
    """
    return parse_config(read_yaml(Path(path)), where=str(path))


def parse_config(data: Any, *, where: str = "config") -> LbmConfig:
    """Validate what a YAML file or a caller gives.

    Args:
        data: A mapping with the keys of `LbmConfig`.
        where: Named in errors: the file, or what the mapping is.

    Raises:
        ConfigError: Names the key, what was expected, and the nearest known key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping of keys to values, got {type(data).__name__}.",
            hint="Start from the example in docs/lbm.md.",
        )
    try:
        return LbmConfig.model_validate(_of_the_model(data))
    except ValidationError as error:
        raise config_error(error, LbmConfig, where) from error


def _of_the_model(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """The keys of the model; of a training's YAML without those of the run."""
    # Two keys of a run tell a training apart from a slip.
    if sum(key in data for key in _OF_A_RUN) < 2:
        return dict(data)
    known = LbmConfig.model_fields
    return {
        key: value
        for key, value in data.items()
        if key in known or difflib.get_close_matches(str(key), known, n=1, cutoff=_MISSPELT_SIMILARITY)
    }


def resolve_config(path: str | Path, config: LbmConfig | str | Path | None) -> LbmConfig:
    """Return the config of a checkpoint: the given one, read from a file if necessary, or the one beside `path`.

    If there is none, it is the full-size default.

    Raises:
        ConfigError: The config is not valid.
        CheckpointError: The system refuses to look at `path`.
    """
    if isinstance(config, LbmConfig):
        return config
    file = find_config(path) if config is None else config
    return LbmConfig() if file is None else load_config(file)


def find_config(checkpoint: str | Path) -> Path | None:
    """Look for the YAML that describes a checkpoint.

    Beside a file that is `<its name without suffix>.yaml`, then `config.yaml`; the name of a sharded one is
    what comes before `.safetensors.index.json`. In a folder it is `<folder's name>.yaml`, then that of the
    weights in it, then `config.yaml`.

    Raises:
        CheckpointError: The system refuses to look at the path.
    """
    from sigmascope.checkpoints.checkpoint import (
        is_folder,
        is_regular_file,
        names_in,  # it loads torch
    )
    from sigmascope.checkpoints.reader import INDEX_SUFFIX
    from sigmascope.checkpoints.torch_files import PICKLE_SUFFIXES

    def stem(name: str) -> str:
        return name.removesuffix(INDEX_SUFFIX) if name.endswith(INDEX_SUFFIX) else Path(name).stem

    checkpoint = Path(checkpoint)
    if is_folder(checkpoint):
        suffixes = (INDEX_SUFFIX, ".safetensors", *PICKLE_SUFFIXES)
        weights = [stem(name) for name in names_in(checkpoint) if name.endswith(suffixes)]
        folder, stems = checkpoint, [checkpoint.absolute().name, *weights]
    else:
        folder, stems = checkpoint.parent, [stem(checkpoint.name)]
    for name in (*(f"{stem}.yaml" for stem in stems), "config.yaml"):
        if is_regular_file(folder / name):
            return folder / name
    return None


_MOST_YAML_BYTES = 1 << 20
_MOST_YAML_VALUES = 100_000
_MOST_YAML_DEPTH = 100
_MOST_DIGITS = 1000
"""Of any base: what they make can be written in the 4,300 decimal digits that Python writes."""


def read_yaml(path: Path, *, hint: str = "Check the path.") -> Any:
    """Give what a YAML file holds; an empty file is an empty mapping.

    Raises:
        ConfigError: The file cannot be read (then with the hint), is not UTF-8 or not YAML, gives a key twice, or
            means more values than any configuration.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_YAML_BYTES:
            raise ConfigError(
                f"{path}: is too large for a configuration ({format_size(size)}).",
                hint="Name shards by a pattern such as train-{000000..000099}.tar.",
            )
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read ({error}).", hint="Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({reason_of(error)}).", hint=hint) from error
    try:
        data = yaml.load(text, Loader=_OnceLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML ({error}).", hint="Correct that line.") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply.", hint="Correct its brackets.") from error
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:  # 2001-13-45, 5,000 digits, !!bool x
        raise ConfigError(
            f"{path}: holds a value that YAML reads as something else ({error}).",
            hint="Put quotation marks around it if it is meant as text.",
        ) from error
    return data if data is not None else {}


class _OnceLoader(yaml.SafeLoader):
    """A SafeLoader that takes each key of a mapping once; `<<` may repeat keys, which it is there to change.

    A value counts wherever an alias repeats it, so that a file of a kilobyte does not mean a billion values.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values: dict[int, int] = {}  # at and below each node that is whole
        self._total = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count the values, and refuse numbers that take minutes to read."""
        is_alias, before = self.check_event(yaml.AliasEvent), self._total
        self._depth += 1
        if self._depth > _MOST_YAML_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            self._total += self._values.get(
                id(node), _MOST_YAML_VALUES
            )  # one that is not whole yet holds itself
        else:
            self._total += 1
            self._values[id(node)] = self._total - before
        if self._total > _MOST_YAML_VALUES:
            problem = f"with its aliases expanded it has more than {_MOST_YAML_VALUES:,} values"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark if node else None)
        if (
            isinstance(node, ScalarNode)
            and len(node.value) > _MOST_DIGITS
            and node.tag.endswith((":int", ":float"))
        ):
            raise yaml.composer.ComposerError(
                None, None, f"a number has {len(node.value):,} digits", node.start_mark
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Look at the keys as they are written."""
        node: MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return node


def config_error(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    """Name every wrong key, what was expected of it, and the nearest known key.

    Args:
        error: What pydantic found.
        model: The model that was being filled; its fields are the known keys.
        where: The file, or what was being read.
    """
    details = _causes(error.errors())
    lines = [_describe(detail, model) for detail in details]
    unknown = any(detail["type"] == "extra_forbidden" for detail in details)
    hint = "Remove or rename the unknown keys." if unknown else "Correct these values."
    return ConfigError(f"{where}: {'; '.join(lines)}.", hint=hint)


def _causes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out the complaint that a list is too short if its values were refused: pydantic counts only those that
    remain.
    """
    inside = {detail["loc"][:-1] for detail in details}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in inside]


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return _unknown_key(detail["loc"], model)
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return f"{key}.{text}" if key else text
    if detail["type"] == "missing":
        return f"{key} is required"
    return f"{key}: {_expected(detail)}, got {_shortened(detail['input'])}"


def _unknown_key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    name = str(location[-1])
    known = _known_keys(model, location[:-1])
    key = ".".join(str(part) for part in location)
    return f"unknown key {key}" + (did_you_mean(name, known) or f" (known: {', '.join(sorted(known))})")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remark with the nearest known name; empty if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {nearest[0]}?)" if nearest else ""


def _known_keys(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    for part in parents:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _expected(detail: ErrorDetails) -> str:
    """What was expected, without the names of Python's types."""
    match detail["type"]:
        case "too_short":
            fewest = detail["ctx"]["min_length"]
            return f"expected at least {'1 value' if fewest == 1 else f'{fewest} values'}"
        case "too_long":
            most = detail["ctx"]["max_length"]
            return f"expected at most {'1 value' if most == 1 else f'{most} values'}"
        case "tuple_type":
            return "expected a list of values"
        case "path_type":
            return "expected a path"
        case _:
            return detail["msg"][:1].lower() + detail["msg"][1:]


def _shortened(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
