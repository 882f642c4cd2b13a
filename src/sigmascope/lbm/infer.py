"""Translate a picture with an LBM model: encode, walk the bridge, decode; any size in, the same size out.

`Frame` brings the picture and its conditioning to the size that the model works at, and the result back.

Each part is a stage of the current recorder (`latent_encoding`, `denoising` with a step for each call of the
denoiser, `latent_decoding`); without a recorder the stages cost nothing. The result is the same either way.

`PictureRows` does it for the rows of a `lora_grid`.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from sigmascope.errors import ConfigError, NonFiniteError
from sigmascope.lbm.bridge import bridge_sigmas, sample_bridge
from sigmascope.lbm.images import (
    Size,
    check_resolution,
    image_to_tensor,
    mask_levels,
    pad_to,
    resize,
    tensor_to_image,
    to_rgb,
    working_size,
)
from sigmascope.lbm.model import LbmModel, is_finite, join_conditioning
from sigmascope.monitor import stage, step
from sigmascope.progress import Progress, no_progress

MINIMUM_TILE = 4
"""Latent elements along a tile's side, below which tiles are mostly overlap."""
SEEDS = 2**63
"""Seeds are below this, so that they fit a signed 64-bit column of a database."""


def translate_image(
    model: LbmModel,
    image: Image.Image,
    *,
    num_inference_steps: int = 1,
    seed: int | None = None,
    size: str | Size = "bucket",
    resolution: int | None = None,
    tile_size: int | None = None,
    decode_tiles: int | None = None,
    noise_scale: float | None = None,
    conditioning: Mapping[str, Image.Image] | None = None,
    on_latent: Callable[[Tensor], object] | None = None,
    progress: Progress = no_progress,
) -> Image.Image:
    """Translate one picture; the result has the picture's own size.

    The same seed gives the same result on every device, up to rounding, because noise is drawn on the CPU.

    Args:
        model: Loaded or built; its device and dtype are used.
        image: Any Pillow image; see `images.to_rgb`.
        num_inference_steps: Euler steps along the bridge, 1 or more.
        seed: Seed of the bridge noise between steps; if None, one is drawn and recorded.
        size: "bucket" resizes to the nearest aspect bucket, "keep" works at the picture's own size (padded to
            what the model needs), (width, height) resizes to that.
        resolution: Side of the square bucket; None for the config's. Only for the size "bucket".
        tile_size: Encode and decode in overlapping tiles of this many pixels; None for no tiles.
        decode_tiles: Decode in tiles of this many latent elements, whatever `tile_size` is; None to follow `tile_size`.
        noise_scale: 0 or more; None for the config's `bridge_noise_sigma`.
        conditioning: A picture for each of the config's conditioning image and mask keys.
        on_latent: Called with the result's latent (1, channels, height, width), float32, before it is decoded.
        progress: Called after each step.

    Raises:
        ConfigError: An option is out of range or has no effect, a picture is empty, or conditioning is missing.
        NonFiniteError: The latents or the picture hold NaN or Inf; says where they first appear.
    """
    decoded_tile = tile_size if decode_tiles is None else decode_tiles * model.vae.factor
    check_tile_size(decoded_tile, model, "tile_size" if decode_tiles is None else "decode_tiles")
    with torch.inference_mode():
        z_target, frame = translated_latent(
            model,
            image,
            num_inference_steps=num_inference_steps,
            seed=seed,
            size=size,
            resolution=resolution,
            tile_size=tile_size,
            noise_scale=noise_scale,
            conditioning=conditioning or {},
            progress=progress,
        )
        if on_latent is not None:
            on_latent(z_target)
        return _decode(model, z_target, frame, decoded_tile)


def translated_latent(
    model: LbmModel,
    image: Image.Image,
    *,
    num_inference_steps: int,
    seed: int | None,
    size: str | Size,
    resolution: int | None,
    tile_size: int | None = None,
    noise_scale: float | None = None,
    conditioning: Mapping[str, Image.Image],
    progress: Progress = no_progress,
) -> tuple[Tensor, "Frame"]:
    """`translate_image` up to the result's latent, and how its pixels get their size."""
    config = model.config
    picture = checked_rgb(image, "picture")
    check_resolution(resolution, size)
    resolution = config.resolution if resolution is None else resolution
    working = working_size(*picture.size, size, resolution=resolution, factor=config.factor)
    frame = Frame(picture.size, working, pads=size == "keep")
    check_tile_size(tile_size, model)
    seed = secrets.randbits(31) if seed is None else seed
    if not 0 <= seed < SEEDS:
        raise ConfigError(
            f"seed: expected 0 to {SEEDS - 1}, got {seed}.", hint="Leave it out to have one drawn."
        )
    noise_scale = config.bridge_noise_sigma if noise_scale is None else noise_scale
    if not (math.isfinite(noise_scale) and noise_scale >= 0):
        raise ConfigError(
            f"noise_scale: expected 0 or more, got {noise_scale}.", hint="Leave it out for the config's."
        )
    z_source, extra = _encode(model, picture, frame, tile_size, conditioning)
    z_target = _denoise(model, z_source, extra, num_inference_steps, noise_scale, seed, progress)
    return z_target, frame


@dataclass(frozen=True, eq=False)
class PictureRows:
    """Pictures that an LBM translates, as the rows of a `lora_grid`. Settings have the defaults of `translate_image`.

    Attributes:
        lbm: The model.
        pictures: Pictures by the names of their rows, at least one.
        name: The model's name in the heading.

    Raises:
        ConfigError: There is no picture, the model needs others besides the source, or a setting is out of range.
    """

    lbm: LbmModel
    pictures: Mapping[str, Image.Image]
    num_inference_steps: int = 1
    picture_size: str | Size = "bucket"
    resolution: int | None = None
    tile_size: int | None = None
    name: str = "LBM"
    kind: str = "picture"

    def __post_init__(self) -> None:
        if not self.pictures:
            raise ConfigError("there is no picture to translate.", hint="Give at least one with --images.")
        if asked := self.lbm.config.conditioning_keys:
            raise ConfigError(
                f"the model needs {', '.join(asked)} besides the source.",
                hint="Write a class like sigmascope.pipeline.lora_grid.GridSubject that supplies those pictures.",
            )
        bridge_sigmas(self.num_inference_steps)
        check_resolution(self.resolution, self.picture_size)
        check_tile_size(self.tile_size, self.lbm)

    @property
    def model(self) -> object:
        """The LBM."""
        return self.lbm

    @property
    def rows(self) -> tuple[str, ...]:
        """The pictures' names."""
        return tuple(self.pictures)

    def settings(self, row: int) -> dict[str, object]:
        """The model's config, the picture, and how it is translated."""
        return {
            "config": repr(self.lbm.config),
            "picture": self.pictures[self.rows[row]],
            "steps": self.num_inference_steps,
            "size": self.picture_size,
            "resolution": self.resolution,
            "tile_size": self.tile_size,
        }

    def summary(self) -> str:
        """Steps, and the size if one was asked for."""
        size = (
            self.picture_size if isinstance(self.picture_size, str) else "×".join(map(str, self.picture_size))
        )
        steps = f"{self.num_inference_steps} step{'s' if self.num_inference_steps > 1 else ''}"
        return steps if size == "bucket" else f"{steps}, size {size}"

    def paint(self, row: int, seed: int) -> Image.Image:
        """Translate a picture."""
        return translate_image(
            self.lbm,
            self.pictures[self.rows[row]],
            num_inference_steps=self.num_inference_steps,
            seed=seed,
            size=self.picture_size,
            resolution=self.resolution,
            tile_size=self.tile_size,
        )


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


def check_tile_size(tile_size: int | None, model: LbmModel, option: str = "tile_size") -> None:
    """Refuse tiles that are mostly overlap; `decode_tiles` is given in latent elements.

    Raises:
        ConfigError: `tile_size` is too small for the model's VAE.
    """
    smallest = MINIMUM_TILE * model.vae.factor
    if tile_size is None or tile_size >= smallest:
        return
    if option == "decode_tiles":
        least, given, hint = f"{MINIMUM_TILE} latent elements", tile_size // model.vae.factor, "Use 128"
    else:
        least, given, hint = f"{smallest} pixels for this VAE", tile_size, "Use 512"
    raise ConfigError(f"{option}: expected at least {least}, got {given}.", hint=f"{hint}, or leave it out.")


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


def _encode(
    model: LbmModel,
    picture: Image.Image,
    frame: Frame,
    tile_size: int | None,
    given: Mapping[str, Image.Image],
) -> tuple[Tensor, Tensor | None]:
    """Give the source latent and the conditioning, both float32."""
    with stage("latent_encoding") as recorded:
        recorded.fact("strategy", f"{'Direct' if tile_size is None else 'Tiled'} VAE Encoding")
        recorded.fact("image_size", list(frame.original))
        recorded.fact("working_size", list(frame.working))
        device = next(model.parameters()).device
        pixels = frame.enter(image_to_tensor(picture)).to(device)
        z_source = model.vae.encode(pixels, tile_size=tile_size).float()
        recorded.tensor("source_latent", z_source, statistics=True)
        _require_finite(z_source, "the source latent", model)
        extra = conditioning_latents(model, frame, given, z_source, tile_size)
        return z_source, extra


def _require_finite(tensor: Tensor, what: str, model: LbmModel) -> None:
    if not is_finite(tensor):
        dtype = str(model.denoiser.dtype).removeprefix("torch.")
        raise NonFiniteError(
            f"NaN or Inf in {what} (denoiser {dtype}, VAE {str(model.vae.dtype).removeprefix('torch.')}).",
            hint="Run in bf16 or float32 (--torch_dtype).",
        )


def _denoise(
    model: LbmModel,
    z_source: Tensor,
    extra: Tensor | None,
    num_steps: int,
    noise_scale: float,
    seed: int,
    progress: Progress,
) -> Tensor:
    with stage("denoising") as recorded:
        recorded.fact("num_inference_steps", num_steps)
        recorded.fact("seed", seed)
        recorded.fact("bridge_noise_sigma", noise_scale)

        def denoise(x_t: Tensor, sigma: Tensor) -> Tensor:
            with step():
                prediction: Tensor = model(x_t, sigma, extra)
            return prediction

        def on_step(done: int, total: int, x_t: Tensor) -> None:
            progress(done, total, "denoising")

        generator = torch.Generator("cpu").manual_seed(seed)
        z_target = sample_bridge(denoise, z_source, num_steps, noise_scale, generator, on_step)
        recorded.tensor("result_latent", z_target, statistics=True)
        _require_finite(z_target, "the result latent", model)
        return z_target


def _decode(model: LbmModel, z_target: Tensor, frame: Frame, tile_size: int | None) -> Image.Image:
    with stage("latent_decoding") as recorded:
        recorded.fact("strategy", f"{'Direct' if tile_size is None else 'Tiled'} VAE Decoding")
        pixels = model.vae.decode(z_target, tile_size=tile_size).float().cpu()
        recorded.tensor("image", pixels)
        _require_finite(pixels, "the decoded picture", model)
        return tensor_to_image(frame.leave(pixels.clamp(-1.0, 1.0)))


def conditioning_latents(
    model: LbmModel, frame: Frame, given: Mapping[str, Image.Image], like: Tensor, tile_size: int | None
) -> Tensor | None:
    """Masks at latent size, then latents of the conditioning images, joined on channels.

    Args:
        model: Its config says which pictures are needed.
        frame: The frame of the source; the conditioning pictures are first resized to its original size.
        given: A picture for each of the config's conditioning image and mask keys.
        like: Latent (1, channels, height, width), whose size and device they get.
        tile_size: In pixels; None encodes at once.

    Returns:
        (1, channels, height, width), float32; None where the model takes none.

    Raises:
        ConfigError: A picture is missing, not expected, or empty.
    """
    config = model.config
    keys = config.conditioning_keys
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
    images, masks = [], []
    for key in config.conditioning_images_keys:
        pixels = resize(image_to_tensor(checked_rgb(given[key], key)), frame.original)
        pixels = frame.enter(pixels).to(like.device)
        images.append(model.vae.encode(pixels, tile_size=tile_size).float())
    for key in config.conditioning_masks_keys:
        grey = image_to_tensor(mask_levels(checked_rgb(given[key], key).convert("L")))[:, :1]
        grey = frame.enter(resize(grey.expand(-1, 3, -1, -1), frame.original))[:, :1]
        masks.append((grey + 1.0) / 2.0)
    return join_conditioning(masks, images, like)
