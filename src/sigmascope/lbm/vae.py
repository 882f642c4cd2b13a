"""The VAE of an LBM model: images in [-1, 1] to latents (sample − shift)·scaling, and back."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from jaxtyping import Float
from torch import Tensor, nn

from sigmascope.lbm.architecture import VaeConfig
from sigmascope.pipeline.tiling import TilePlan, plan, tiled_map

Images = Float[Tensor, "batch 3 height width"]
Latents = Float[Tensor, "batch channels latent_height latent_width"]


class LbmVae(nn.Module):
    """Wraps diffusers' `AutoencoderKL` as `vae_model`, so that keys are `vae.vae_model.*`."""

    def __init__(self, config: VaeConfig) -> None:
        super().__init__()
        self.config = config
        blocks = len(config.block_out_channels)
        self.vae_model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            block_out_channels=config.block_out_channels,
            latent_channels=config.latent_channels,
            layers_per_block=config.layers_per_block,
            norm_num_groups=config.norm_num_groups,
            mid_block_add_attention=config.mid_block_add_attention,
            use_quant_conv=config.use_quant_conv,
            use_post_quant_conv=config.use_post_quant_conv,
            scaling_factor=config.scaling_factor,
            shift_factor=config.shift_factor,
            force_upcast=config.force_upcast,
        )

    @property
    def factor(self) -> int:
        """Image pixels along one side of a latent element."""
        return self.config.factor

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        dtype: torch.dtype = next(self.vae_model.parameters()).dtype
        return dtype

    def encode(
        self,
        images: Images,
        *,
        sample: bool = False,
        generator: torch.Generator | None = None,
        tile_size: int | None = None,
    ) -> Latents:
        """Encode images to latents, (z − shift)·scaling.

        Args:
            images: In [-1, 1], height and width multiples of `factor`.
            sample: Draw z from the posterior; otherwise take its mode, so that the result is the same each time.
            generator: Of that draw; on the CPU or on the images' device.
            tile_size: Encode in overlapping tiles of this many pixels; None encodes at once.
        """
        images = images.to(self.dtype)
        if tile_size is None:
            moments = self._moments(images)
        else:
            moments = tiled_map(self._moments, images, self._tiles(images.shape[-2:], tile_size))
        mean, log_variance = moments.chunk(2, dim=1)
        latents = mean
        if sample:
            std = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
            device = generator.device if generator is not None else mean.device
            noise = torch.randn(mean.shape, generator=generator, device=device)
            latents = mean + std * noise.to(mean)
        return (latents - self.config.shift_factor) * self.config.scaling_factor

    def decode(self, latents: Latents, *, tile_size: int | None = None) -> Images:
        """Decode latents to images: the inverse of `encode`'s shift and scaling, then the decoder.

        Args:
            latents: As `encode` gives them.
            tile_size: Decode in overlapping tiles of this many image pixels; None decodes at once.
        """
        latents = latents.to(self.dtype) / self.config.scaling_factor + self.config.shift_factor
        if tile_size is None:
            return self._pixels(latents)
        height, width = (side * self.factor for side in latents.shape[-2:])
        return tiled_map(self._pixels, latents, self._tiles((height, width), tile_size))

    def _tiles(self, size: Sequence[int], tile_size: int) -> TilePlan:
        tile = max(tile_size // self.factor, 2) * self.factor
        return plan(size[0], size[1], tile, None, self.factor)

    def _moments(self, images: Tensor) -> Tensor:
        encoded: Tensor = self.vae_model.encoder(images)
        quant_conv = self.vae_model.quant_conv
        return encoded if quant_conv is None else quant_conv(encoded)

    def _pixels(self, latents: Tensor) -> Tensor:
        decoded: Tensor = self.vae_model.decode(latents, return_dict=False)[0]
        return decoded
