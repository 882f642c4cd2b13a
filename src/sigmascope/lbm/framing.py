"""How a picture and its conditioning reach the size that a model works at, and how a result gets back."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from sigmascope.errors import ConfigError
from sigmascope.lbm.buckets import Size
from sigmascope.lbm.images import image_to_tensor, mask_levels, pad_to, resize, to_rgb
from sigmascope.lbm.model import LbmModel


@dataclass(frozen=True)
class Frame:
    """How a picture of `original` size is brought to the model's `working` size, and back."""

    original: Size
    working: Size
    pads: bool

    def enter(self, pixels: Tensor) -> Tensor:
        """Pixels (batch, 3, height, width) of the original size, padded or resized to the working size."""
        return pad_to(pixels, self.working) if self.pads else resize(pixels, self.working)

    def leave(self, pixels: Tensor) -> Tensor:
        """Pixels of the working size, cropped or resized to the original size."""
        if self.pads:
            return pixels[..., : self.original[1], : self.original[0]]
        return resize(pixels, self.original)


def conditioning_latents(
    model: LbmModel, frame: Frame, given: Mapping[str, Image.Image], like: Tensor, tile_size: int | None
) -> Tensor | None:
    """Latents of the conditioning images, then masks at latent size, joined on channels.

    Args:
        model: Its config says which pictures there must be.
        frame: That of the picture which they condition; they are resized to its original size first.
        given: A picture for each of the config's conditioning image and mask keys.
        like: Latent (1, channels, height, width), whose size and device they get.
        tile_size: In pixels; None encodes at once.

    Returns:
        (1, channels, height, width), float32; None where the model takes none.

    Raises:
        ConfigError: A picture is missing, not asked for, or empty.
    """
    config = model.config
    keys = [*config.conditioning_images_keys, *config.conditioning_masks_keys]
    if missing := [key for key in keys if key not in given]:
        raise ConfigError(
            f"conditioning: the model needs {', '.join(missing)}.",
            hint="Pass a picture for each, with --conditioning key=picture.png.",
        )
    if unknown := [key for key in given if key not in keys]:
        raise ConfigError(
            f"conditioning: the model takes {', '.join(keys) or 'none'}, got {', '.join(unknown)}.",
            hint="Leave these out.",
        )
    parts = []
    for key in config.conditioning_images_keys:
        pixels = resize(image_to_tensor(checked_rgb(given[key], key)), frame.original)
        pixels = frame.enter(pixels).to(like.device)
        parts.append(model.vae.encode(pixels, tile_size=tile_size).float())
    for key in config.conditioning_masks_keys:
        grey = image_to_tensor(mask_levels(checked_rgb(given[key], key).convert("L")))[:, :1]
        grey = frame.enter(resize(grey.expand(-1, 3, -1, -1), frame.original))[:, :1]
        mask = ((grey + 1.0) / 2.0).to(like.device)  # last: bicubic overshoot is cut at -1 and 1
        parts.append(functional.interpolate(mask, like.shape[-2:], mode="area"))
    return torch.cat(parts, dim=1) if parts else None


def checked_rgb(image: Image.Image, what: str) -> Image.Image:
    """An image as RGB.

    Args:
        image: Any Pillow image; see `images.to_rgb`.
        what: What it is, for the message.

    Raises:
        ConfigError: It has no pixels.
    """
    if 0 in image.size:
        raise ConfigError(
            f"{what}: the image is empty ({image.width}×{image.height} pixels).",
            hint="Pass one with at least one pixel.",
        )
    return to_rgb(image)
