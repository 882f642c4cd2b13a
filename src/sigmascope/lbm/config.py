"""The YAML that describes a Latent Bridge Matching model (SPEC section 7).

The top-level keys are those of LBM's own configs. The optional `denoiser:` and `vae:` blocks are ours: they
override the architecture, so that the same code builds a model of a few megabytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from sigmascope.errors import ConfigError
from sigmascope.lbm.architecture import ConfigBlock, DenoiserConfig, VaeConfig
from sigmascope.lbm.config_errors import config_error
from sigmascope.lbm.config_kinds import refuse_training
from sigmascope.lbm.yaml_file import read_yaml

TimestepSampling = Literal["uniform", "log_normal", "custom_timesteps"]
LatentLoss = Literal["l1", "l2"]
PixelLoss = Literal["l1", "l2", "lpips"]

PROBABILITY_TOLERANCE = 1e-3
"""How far `prob` may be from a sum of 1: users write 0.333 three times."""


class LbmConfig(ConfigBlock):
    """A whole LBM model. The defaults are those of the full-size model for relighting.

    `num_train_timesteps` and `resolution` are ours: the denoiser sees σ·`num_train_timesteps`, and
    `resolution` is the side of the square aspect bucket, from which the others follow (1024: LBM's own).
    """

    backbone_signature: str = "stabilityai/stable-diffusion-xl-base-1.0"
    vae_num_channels: int = Field(default=4, ge=1)
    unet_input_channels: int = Field(default=4, ge=1)
    num_train_timesteps: int = Field(default=1000, ge=1)
    timestep_sampling: TimestepSampling = "custom_timesteps"
    selected_timesteps: tuple[float, ...] | None = (250.0, 500.0, 750.0, 1000.0)
    prob: tuple[float, ...] | None = (0.25, 0.25, 0.25, 0.25)
    logit_mean: float = 0.0
    logit_std: float = Field(default=1.0, gt=0)
    conditioning_images_keys: tuple[str, ...] = ()
    conditioning_masks_keys: tuple[str, ...] = ()
    source_key: str = "source"
    target_key: str = "target"
    mask_key: str | None = None
    bridge_noise_sigma: float = Field(default=0.005, ge=0)
    latent_loss_type: LatentLoss = "l2"
    latent_loss_weight: float = Field(default=1.0, ge=0)
    pixel_loss_type: PixelLoss = "lpips"
    pixel_loss_weight: float = Field(default=10.0, ge=0)
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


def parse_config(data: Any, *, where: str = "config") -> LbmConfig:
    """Validate what a YAML file or a caller gives.

    Args:
        data: A mapping with the keys of `LbmConfig`.
        where: Named in errors: the file, or what the mapping is.

    Raises:
        ConfigError: Names the key, what was expected, and the nearest known key; or it describes a training.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: expected a mapping of keys to values, got {type(data).__name__}.",
            hint="Start from the example in docs/lbm.md.",
        )
    refuse_training(data, where)
    try:
        return LbmConfig.model_validate(dict(data))
    except ValidationError as error:
        raise config_error(error, LbmConfig, where) from error


def load_config(path: str | Path) -> LbmConfig:
    """Read and validate a YAML file.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or does not describe an LBM model.
    """
    return parse_config(read_yaml(Path(path)), where=str(path))
