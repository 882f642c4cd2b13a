"""The loss that training minimises: Latent Bridge Matching on a batch of pairs.

For each sample (Chadebec et al., arXiv 2503.07535, section 3):

    z_source, z_target ~ VAE(source), VAE(target)  drawn from the posterior
    x(σ) = σ·z_source + (1 − σ)·z_target + s·√(σ(1 − σ))·ε          σ by the config's sampling, ε ~ N(0, I)
    v = denoiser(x(σ), σ)
    L = w_latent·|v − (z_source − z_target)| under the mask  +  w_pixel·|VAE⁻¹(x(σ) − σ·v) − target| under the mask

The pixel loss decodes the predicted target latent with gradient, and clamps the picture to [-1, 1]. Elements
outside the mask count as no difference in a mean over all elements, as in LBM, or are left out of the mean
(`mask_reduction: valid`).

The loss of a batch is the mean over its samples, so it does not depend on how the samples are divided into batches. A
sample's draws depend only on the run's seed, the epoch and the sample's number in the epoch's stream. So two processes
with batch size b see exactly what one process with 2b sees, and a resumed run sees what an uninterrupted one does.
"""

import hashlib
import importlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from sigmascope.errors import ConfigError
from sigmascope.installation import install_packages
from sigmascope.lbm.bridge import bridge_interpolate, bridge_velocity_target, predict_target
from sigmascope.lbm.config import LbmConfig, MaskReduction
from sigmascope.lbm.config import PixelLoss as PixelLossKind
from sigmascope.lbm.model import LbmModel, LbmVae, join_conditioning
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.settings import TrainSettings

Latents = Float[Tensor, "batch channels height width"]
Conditioning = Float[Tensor, "batch extra height width"]
Pixels = Float[Tensor, "batch 3 height width"]
PixelMask = Float[Tensor, "batch 1 height width"]
Purpose = Literal["posterior", "bridge", "crop"]
"""Purposes of random numbers. Each has its own stream, so that drawing a crop does not change the noise."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of one batch.

    Attributes:
        total: Mean over the samples, with gradient.
        per_sample: Loss of each sample; detached.
        latent: Mean latent loss before its weight, detached; None if the weight is 0.
        pixel: Mean pixel loss before its weight, likewise.
        sigmas: σ of each sample, on the CPU.
    """

    total: Float[Tensor, ""]
    per_sample: Float[Tensor, " batch"]
    latent: Float[Tensor, ""] | None
    pixel: Float[Tensor, ""] | None
    sigmas: Float[Tensor, " batch"]


@dataclass(frozen=True)
class BridgePoint:
    """Each sample's point on the bridge, and what the denoiser should predict there.

    Attributes:
        x_t: The point.
        velocity: z_source − z_target.
        sigmas: σ, on the CPU.
        conditioning: Masks at latent size, then latents of the conditioning images.
    """

    x_t: Latents
    velocity: Latents
    sigmas: Float[Tensor, " batch"]
    conditioning: Conditioning | None


class Objective:
    """The loss that the settings describe.

    Raises:
        ConfigError: The pixel loss needs a package that is not installed.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.config = settings.lbm
        self._pixel_loss = (
            PixelLoss(
                settings.pixel_loss_type,
                crop=settings.pixel_loss_side,
                tile_size=settings.pixel_tile_size,
                reduction=settings.mask_reduction,
            )
            if settings.pixel_loss_weight > 0
            else None
        )

    def loss(self, model: LbmModel, batch: Batch) -> LossTerms:
        """The loss of a batch; its random draws follow from the seed and the batch's epoch and numbers.

        Args:
            model: On the device to compute on. Its VAE runs in its own dtype, whatever autocast says.
            batch: On any device.

        Raises:
            ConfigError: The batch lacks a conditioning picture that the config names.
        """
        point = self.bridge_point(model, batch)
        device = point.x_t.device
        sigmas = point.sigmas.to(device)
        prediction = model(point.x_t, sigmas, point.conditioning).float()
        latent = pixel = None
        if self.settings.latent_loss_weight > 0:
            values = differences(prediction, point.velocity, self.settings.latent_loss_type)
            mask = None if batch.mask is None else latent_mask(batch.mask, *values.shape[-2:]).to(device)
            latent = sample_means(values, mask, self.settings.mask_reduction)
        if self._pixel_loss is not None:
            z_target = predict_target(point.x_t, prediction, point.sigmas)
            generators = generators_for(self.settings.seed, batch.epoch, batch.numbers, "crop")
            with torch.autocast(device.type, enabled=False):
                pixel = self._pixel_loss(model.vae, z_target, batch.target, batch.mask, generators)
        per_sample = torch.zeros(len(batch.numbers), device=device)
        if latent is not None:
            per_sample = per_sample + self.settings.latent_loss_weight * latent
        if pixel is not None:
            per_sample = per_sample + self.settings.pixel_loss_weight * pixel
        return LossTerms(
            total=per_sample.mean(),
            per_sample=per_sample.detach(),
            latent=None if latent is None else latent.detach().mean(),
            pixel=None if pixel is None else pixel.detach().mean(),
            sigmas=point.sigmas,
        )

    def bridge_point(self, model: LbmModel, batch: Batch) -> BridgePoint:
        """Encode a batch and draw each sample's point on the bridge, without gradients.

        Latents are drawn from the posterior (inference takes its mode): target, source, then the conditioning images.
        """
        posterior = generators_for(self.settings.seed, batch.epoch, batch.numbers, "posterior")
        with vae_alone(model):
            z_target, z_source = (
                encoded(model, picture, posterior) for picture in (batch.target, batch.source)
            )
            conditioning = self.conditioning(model, batch, z_source, posterior)
        generators = generators_for(self.settings.seed, batch.epoch, batch.numbers, "bridge")
        sigmas, noise = draw_bridge(generators, z_source.shape[1:], self.config)
        noise_scale = self.config.bridge_noise_sigma
        x_t = bridge_interpolate(z_source, z_target, sigmas, noise.to(z_source.device), noise_scale)
        return BridgePoint(x_t, bridge_velocity_target(z_source, z_target), sigmas, conditioning)

    def conditioning(
        self,
        model: LbmModel,
        batch: Batch,
        like: Latents,
        posterior: Sequence[torch.Generator] | None = None,
    ) -> Conditioning | None:
        """Masks at latent size, then latents of the conditioning images, joined as in inference.

        Args:
            model: Whose VAE encodes the images.
            batch: Holds the pictures and masks.
            like: The latent that is conditioned.
            posterior: A generator for each sample to draw latents with; None for the posterior's mode.

        Raises:
            ConfigError: The batch lacks one that the config names.
        """
        given = {**batch.conditioning_images, **batch.conditioning_masks}
        if missing := [key for key in self.config.conditioning_keys if key not in given]:
            raise ConfigError(
                f"conditioning: the batch has no {', '.join(missing)}.",
                hint="Add them to the shards, or remove them from conditioning_images_keys and conditioning_masks_keys.",
            )
        images, masks = batch.conditioning_images, batch.conditioning_masks
        return join_conditioning(
            [masks[key] for key in self.config.conditioning_masks_keys],
            [encoded(model, images[key], posterior) for key in self.config.conditioning_images_keys],
            like,
        )


def encoded(
    model: LbmModel,
    pictures: Float[Tensor, "batch 3 image_height image_width"],
    posterior: Sequence[torch.Generator] | None = None,
) -> Latents:
    """Latents of pictures, float32, on the model's device.

    Args:
        model: Whose VAE encodes.
        pictures: In [-1, 1].
        posterior: A generator for each picture to draw its latent with; None for the posterior's mode.
    """
    device = next(model.vae.parameters()).device
    return model.vae.encode(pictures.to(device), sample=posterior is not None, generator=posterior).float()


@contextmanager
def vae_alone(model: LbmModel) -> Iterator[None]:
    """Run the VAE without gradient and in its own dtype: under float16 autocast SDXL's would overflow."""
    device = next(model.vae.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def draw_bridge(
    generators: Sequence[torch.Generator], latent_shape: Sequence[int], config: LbmConfig
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch channels height width"]]:
    """Draw σ by the config's `timestep_sampling`, then ε ~ N(0, I), for each sample (float32, CPU)."""
    sigmas, noises = [], []
    for generator in generators:
        sigmas.append(sample_sigmas(1, config, generator))
        noises.append(torch.randn(tuple(latent_shape), generator=generator))
    return torch.cat(sigmas), torch.stack(noises)


def sample_sigmas(
    batch: int, config: LbmConfig, generator: torch.Generator | None = None
) -> Float[Tensor, " batch"]:
    """Draw one σ in (0, 1] for each sample, as the config's `timestep_sampling` says (float32, CPU).

    - `uniform`: each of the schedule's T timesteps has the same probability.
    - `log_normal`: sigmoid(n), n ~ N(logit_mean, logit_std²), is the place in the schedule's table of timesteps, as
      in LBM. The table descends from T to 1, so σ = 1 − sigmoid(n), on the grid of 1/T rounded up: a positive mean
      favours the target end. Esser et al. 2024 (arXiv 2403.03206, section 3.1) have σ = sigmoid(n).
    - `custom_timesteps`: `selected_timesteps` with probabilities `prob`.

    Args:
        batch: How many.
        config: Of the model.
        generator: On the CPU.
    """
    total = config.num_train_timesteps
    if config.timestep_sampling == "uniform":
        timesteps = torch.randint(1, total + 1, (batch,), generator=generator).float()
    elif config.timestep_sampling == "log_normal":
        normal = torch.randn(batch, generator=generator) * config.logit_std + config.logit_mean
        index = (torch.sigmoid(normal) * total).floor().clamp(max=total - 1)
        timesteps = total - index
    else:
        weights = torch.tensor(config.prob)
        chosen = torch.multinomial(weights, batch, replacement=True, generator=generator)
        timesteps = torch.tensor(config.selected_timesteps)[chosen]
    return timesteps / total


def generators_for(seed: int, epoch: int, numbers: Sequence[int], purpose: Purpose) -> list[torch.Generator]:
    """CPU generators for a purpose, one for each sample.

    The numbers are hashed (BLAKE2b), because PyTorch's Mersenne Twister gives related streams for related seeds and
    uses 32 bits of them.
    """
    generators = []
    for number in numbers:
        message = struct.pack("<QQQ", seed, epoch, number) + purpose.encode()
        digest = hashlib.blake2b(message, digest_size=8).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little")))
    return generators


class PixelLoss:
    """Compares pictures at pixel resolution, whole, in tiles, or a crop of each.

    A crop is decoded on its own, so the VAE sees nothing around it. It differs slightly from the same part of the whole
    picture: near its edges, and everywhere through group normalisation and attention.

    Args:
        kind: "l1", "l2" or "lpips" (Zhang et al., arXiv 1801.03924, with VGG).
        crop: Side in pixels, a multiple of the VAE's factor; a smaller picture is used whole.
        tile_size: Decode the whole picture in tiles of this many pixels.
        reduction: The elements that a masked sample's mean is over; see `sample_means`.

    Raises:
        ConfigError: "lpips" and the package of that name is not installed.
    """

    def __init__(
        self,
        kind: PixelLossKind,
        *,
        crop: int | None = None,
        tile_size: int | None = None,
        reduction: MaskReduction = "all",
    ) -> None:
        self.kind = kind
        self.crop = crop
        self.tile_size = tile_size
        self.reduction: MaskReduction = reduction
        self._lpips: nn.Module | None = None
        if kind == "lpips":
            # Spatial: a distance for each pixel, so that a mask can be applied.
            network: nn.Module = lpips_package().LPIPS(net="vgg", spatial=reduction == "valid", verbose=False)
            self._lpips = network.eval().requires_grad_(False)

    def __call__(
        self,
        vae: LbmVae,
        latents: Float[Tensor, "batch channels latent_height latent_width"],
        target: Pixels,
        mask: PixelMask | None,
        generators: Sequence[torch.Generator],
    ) -> Float[Tensor, " batch"]:
        """The loss of each sample."""
        if self.crop is not None:
            latents, target, mask = cropped(latents, target, mask, self.crop, vae.factor, generators)
        decoded = vae.decode(latents, tile_size=self.tile_size).float().clamp(-1.0, 1.0)
        return self.compare(decoded, target.to(decoded), None if mask is None else mask.to(decoded))

    def compare(self, decoded: Pixels, target: Pixels, mask: PixelMask | None) -> Float[Tensor, " batch"]:
        """The mean difference of each sample, under its mask."""
        if self._lpips is not None:
            distances = self._distances(self._lpips, decoded, target, mask)
            return sample_means(distances, mask if self.reduction == "valid" else None)
        assert self.kind != "lpips"
        return sample_means(differences(decoded, target, self.kind), mask, self.reduction)

    def _distances(
        self, network: nn.Module, decoded: Pixels, target: Pixels, mask: PixelMask | None
    ) -> Float[Tensor, "batch 1 distances_high distances_wide"]:
        """One for each pixel ("valid") or for each sample ("all")."""
        if mask is not None and self.reduction == "valid":
            # The network looks around each pixel: what is not valid must not be seen from one that is.
            decoded = decoded * mask + target * (1.0 - mask)
        elif mask is not None:
            decoded, target = decoded * mask, target * mask
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
            hint=f"Install it with: {install_packages('lpips')}, set pixel_loss_type to l1 or l2, or pixel_loss_weight to 0.",
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
        (draw_offset(item, latents.shape[-2], height), draw_offset(item, latents.shape[-1], width))
        for item in generators
    ]

    def cut(tensor: Tensor, scale: int) -> Tensor:
        parts = [
            item[:, top * scale : (top + height) * scale, left * scale : (left + width) * scale]
            for item, (top, left) in zip(tensor, corners, strict=True)
        ]
        return torch.stack(parts)

    return cut(latents, 1), cut(target, factor), None if mask is None else cut(mask, factor)


def draw_offset(generator: torch.Generator, length: int, part: int) -> int:
    """Draw where a part of a length begins; all positions have the same probability."""
    return int(torch.randint(0, length - part + 1, (), generator=generator))


def differences(
    prediction: Float[Tensor, "batch channels height width"],
    target: Float[Tensor, "batch channels height width"],
    kind: Literal["l1", "l2"],
) -> Float[Tensor, "batch channels height width"]:
    """|d| (l1) or d² (l2) of d = prediction − target."""
    difference = prediction - target
    return difference.abs() if kind == "l1" else difference.square()


def sample_means(
    values: Float[Tensor, "batch channels height width"],
    mask: Float[Tensor, "batch 1 height width"] | None = None,
    reduction: MaskReduction = "all",
) -> Float[Tensor, " batch"]:
    """The mean of each sample under its mask; 0 for a sample without a valid element.

    A mean over the valid elements of the whole batch would depend on which samples share a batch, so that two
    processes would not give the gradient of the doubled batch.

    Args:
        values: Differences.
        mask: 1 where they are valid, 0 elsewhere.
        reduction: "all" divides by the number of all elements, so that a sample counts by its valid share; "valid"
            divides by the number of valid elements, so that each sample counts the same.
    """
    if mask is None:
        return values.flatten(1).mean(dim=1)
    weights = mask.to(values.dtype).expand_as(values)
    masked = (values * weights).flatten(1)
    if reduction == "all":
        return masked.mean(dim=1)
    return masked.sum(dim=1) / weights.flatten(1).sum(dim=1).clamp_min(1.0)


def latent_mask(
    mask: Float[Tensor, "batch 1 image_height image_width"], height: int, width: int
) -> Float[Tensor, "batch 1 {height} {width}"]:
    """Bring an image-resolution validity mask to the latent's: an element is valid if all its pixels are."""
    invalid = functional.adaptive_max_pool2d(1.0 - mask, (height, width))
    return (invalid <= 0.0).to(mask.dtype)
