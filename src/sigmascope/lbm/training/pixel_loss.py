"""The pixel loss: the predicted target latent, decoded with gradient, against the target picture."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.config import PixelLoss as PixelLossKind
from sigmascope.lbm.training.draws import draw_offset
from sigmascope.lbm.training.sample_means import differences, sample_means
from sigmascope.lbm.vae import LbmVae

Pixels = Float[Tensor, "batch 3 height width"]
PixelMask = Float[Tensor, "batch 1 height width"]


class PixelLoss:
    """Compares pictures at pixel resolution, whole, in tiles, or a crop of each.

    A crop is decoded on its own, so the VAE sees nothing around it: near its edges, and through group
    normalisation and attention everywhere, it differs slightly from the same place of the whole picture.

    Args:
        kind: "l1", "l2" or "lpips" (Zhang et al., arXiv 1801.03924, with VGG).
        crop: Side in pixels, a multiple of the VAE's factor; a picture that is smaller is taken as far as it goes.
        tile_size: Decode the whole picture in tiles of this many pixels.

    Raises:
        ConfigError: "lpips" and the package of that name is not installed.
    """

    def __init__(self, kind: PixelLossKind, *, crop: int | None = None, tile_size: int | None = None) -> None:
        self.kind = kind
        self.crop = crop
        self.tile_size = tile_size
        self._lpips: nn.Module | None = _perceptual(lpips_package()) if kind == "lpips" else None

    def __call__(
        self,
        vae: LbmVae,
        latents: Float[Tensor, "batch channels latent_height latent_width"],
        target: Pixels,
        mask: PixelMask | None,
        generators: Sequence[torch.Generator],
    ) -> Float[Tensor, " batch"]:
        """The loss of each sample.

        Args:
            vae: Its decoder passes the gradient on to the latents.
            latents: x̂_target.
            target: The picture that it should be, in [-1, 1].
            mask: 1 where a pixel is valid.
            generators: One for each sample, of its crop.
        """
        if self.crop is not None:
            latents, target, mask = cropped(latents, target, mask, self.crop, vae.factor, generators)
        decoded = vae.decode(latents, tile_size=self.tile_size).float()
        return self.compare(decoded, target.to(decoded), None if mask is None else mask.to(decoded))

    def compare(self, decoded: Pixels, target: Pixels, mask: PixelMask | None) -> Float[Tensor, " batch"]:
        """The mean difference of each sample's valid pixels."""
        if self._lpips is not None:
            return sample_means(self._distances(self._lpips, decoded, target, mask), mask)
        assert self.kind != "lpips"
        return sample_means(differences(decoded, target, self.kind), mask)

    def _distances(
        self, network: nn.Module, decoded: Pixels, target: Pixels, mask: PixelMask | None
    ) -> Float[Tensor, "batch 1 height width"]:
        if mask is not None:
            # The network looks around each pixel: what is not valid must not be seen from one that is.
            decoded = decoded * mask + target * (1.0 - mask)
        distances: Tensor = network.to(decoded.device)(decoded, target)
        return distances


def lpips_package() -> ModuleType:
    """Import the package of LPIPS, without its weights.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("lpips")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "pixel_loss_type: lpips needs the package of that name, which is not installed.",
            hint="Run pip install lpips, set pixel_loss_type to l1 or l2, or pixel_loss_weight to 0.",
        ) from error


def cropped(
    latents: Tensor,
    target: Tensor,
    mask: Tensor | None,
    side: int,
    factor: int,
    generators: Sequence[torch.Generator],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cut the same place out of each sample's latent, picture and mask, on the VAE's grid.

    Args:
        latents: (batch, channels, h, w).
        target: (batch, 3, h·factor, w·factor).
        mask: (batch, 1, h·factor, w·factor).
        side: Of the crop, in pixels.
        factor: Pixels along one side of a latent element.
        generators: One for each sample.
    """
    height, width = (min(side // factor, length) for length in latents.shape[-2:])
    corners = [
        (draw_offset(one, latents.shape[-2], height), draw_offset(one, latents.shape[-1], width))
        for one in generators
    ]

    def cut(tensor: Tensor, scale: int) -> Tensor:
        parts = [
            one[:, top * scale : (top + height) * scale, left * scale : (left + width) * scale]
            for one, (top, left) in zip(tensor, corners, strict=True)
        ]
        return torch.stack(parts)

    return cut(latents, 1), cut(target, factor), None if mask is None else cut(mask, factor)


def _perceptual(package: Any) -> nn.Module:
    """LPIPS with a distance for each pixel, so that a mask can be applied; its weights stay as they are."""
    network: nn.Module = package.LPIPS(net="vgg", spatial=True, verbose=False)
    return network.eval().requires_grad_(False)
