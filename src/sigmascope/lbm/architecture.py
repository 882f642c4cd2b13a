"""The architecture part of a config: the `denoiser:` and `vae:` blocks, with diffusers' names for everything."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DownBlock = Literal["DownBlock2D", "CrossAttnDownBlock2D"]
UpBlock = Literal["UpBlock2D", "CrossAttnUpBlock2D"]
MidBlock = Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"]


class ConfigBlock(BaseModel):
    """Base of every part of a config: unknown keys, NaN and Inf are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


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
            _check_depths(key, getattr(self, key))
        _check_widths(self.block_out_channels, self.norm_num_groups)
        _check_heads(self.block_out_channels, self.attention_head_dim)
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


def _check_depths(key: str, depths: int | tuple[int, ...]) -> None:
    each = depths if isinstance(depths, tuple) else (depths,)
    if min(each) < 1:
        raise ValueError(f"{key}: expected 1 or more, got {list(each)}")


def _check_widths(widths: tuple[int, ...], groups: int) -> None:
    for width in widths:
        if width < 1 or width % groups:
            raise ValueError(
                f"block_out_channels: expected multiples of norm_num_groups ({groups}), got {list(widths)}"
            )


def _check_heads(widths: tuple[int, ...], heads: int | tuple[int, ...]) -> None:
    each = heads if isinstance(heads, tuple) else (heads,) * len(widths)
    for width, count in zip(widths, each, strict=True):
        if count < 1 or width % count:
            raise ValueError(
                f"attention_head_dim: expected numbers of heads that divide the widths {list(widths)}, "
                f"got {list(each)}"
            )
