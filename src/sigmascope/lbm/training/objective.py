"""What training minimises: the loss of Latent Bridge Matching on a batch of pairs.

For each sample (Chadebec et al., arXiv 2503.07535, section 3):

    z_source, z_target = VAE(source), VAE(target)
    x(σ) = σ·z_source + (1 − σ)·z_target + s·√(σ(1 − σ))·ε          σ by the config's sampling, ε ~ N(0, I)
    v = denoiser(x(σ), σ)
    L = w_latent·|v − (z_source − z_target)| under the mask  +  w_pixel·|VAE⁻¹(x(σ) − σ·v) − target| under the mask

The loss of a batch is the mean over its samples, so it is the same however the samples are cut into batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from sigmascope.errors import ConfigError
from sigmascope.lbm.batches import Batch
from sigmascope.lbm.bridge import bridge_interpolate, bridge_velocity_target, predict_target
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.draws import draw_bridge, generators_for
from sigmascope.lbm.training.pixel_loss import PixelLoss
from sigmascope.lbm.training.sample_means import differences, sample_means
from sigmascope.lbm.training.settings import TrainSettings
from sigmascope.lbm.training_terms import latent_mask

Latents = Float[Tensor, "batch channels height width"]
Conditioning = Float[Tensor, "batch extra height width"]
Denoise = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x_t, sigma, conditioning) -> prediction; a model that Accelerate has wrapped, for one."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of one batch.

    Attributes:
        total: Mean over the samples, with gradient.
        per_sample: Of which it is the mean; detached.
        latent: Mean latent loss before its weight, detached; None where the weight is 0.
        pixel: Mean pixel loss before its weight, likewise.
        sigmas: σ of each sample, on the CPU.
    """

    total: Float[Tensor, ""]
    per_sample: Float[Tensor, " batch"]
    latent: Float[Tensor, ""] | None
    pixel: Float[Tensor, ""] | None
    sigmas: Float[Tensor, " batch"]

    @property
    def samples(self) -> int:
        """How many `total` is the mean of: batches of different size are weighted with it."""
        return int(self.sigmas.shape[0])

    @property
    def sum(self) -> Float[Tensor, ""]:
        """The sum over the samples, with gradient."""
        return self.total * self.samples


@dataclass(frozen=True)
class BridgePoint:
    """Where on the bridge each sample stands, and what the denoiser should say there.

    Attributes:
        x_t: The point.
        velocity: z_source − z_target.
        sigmas: σ, on the CPU.
        conditioning: Latents of conditioning images, then masks.
    """

    x_t: Latents
    velocity: Latents
    sigmas: Float[Tensor, " batch"]
    conditioning: Conditioning | None


class Objective:
    """The loss that the settings describe.

    Args:
        settings: Of the run.

    Raises:
        ConfigError: The pixel loss needs a package that is not installed.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.config = settings.lbm
        self._pixel_loss = (
            PixelLoss(settings.pixel_loss_type, crop=settings.pixel_crop, tile_size=settings.pixel_tile_size)
            if settings.pixel_loss_weight > 0
            else None
        )

    def loss(self, model: LbmModel, batch: Batch, denoise: Denoise | None = None) -> LossTerms:
        """The loss of a batch; its random draws follow from the seed and the batch's epoch and numbers.

        Args:
            model: On the device to compute on. Its VAE runs in its own dtype, whatever autocast says.
            batch: On any device.
            denoise: Called in place of the model; the model itself when left out.

        Raises:
            ConfigError: The batch lacks a conditioning picture that the config names.
        """
        point = self.bridge_point(model, batch)
        device = point.x_t.device
        sigmas = point.sigmas.to(device)
        prediction = (denoise or model)(point.x_t, sigmas, point.conditioning).float()
        latent = self._latent_terms(prediction, point, batch)
        pixel = self._pixel_terms(model, prediction, point, batch)
        per_sample = torch.zeros(len(batch), device=device)
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
        """Encode a batch and draw where on the bridge each sample stands; nothing here has a gradient.

        Latents are the posterior's mode, as in inference.
        """
        with vae_alone(model):
            z_source, z_target = (encoded(model, pictures) for pictures in (batch.source, batch.target))
            conditioning = self.conditioning(model, batch, z_source)
        generators = generators_for(self.settings.seed, batch.epoch, batch.numbers, "bridge")
        sigmas, noise = draw_bridge(generators, z_source.shape[1:], self.config)
        noise_scale = self.config.bridge_noise_sigma
        x_t = bridge_interpolate(z_source, z_target, sigmas, noise.to(z_source.device), noise_scale)
        return BridgePoint(x_t, bridge_velocity_target(z_source, z_target), sigmas, conditioning)

    def conditioning(self, model: LbmModel, batch: Batch, like: Latents) -> Conditioning | None:
        """Latents of the conditioning images, then masks at latent size, as inference gives them."""
        images = _named(batch.conditioning_images, self.config.conditioning_images_keys)
        masks = _named(batch.conditioning_masks, self.config.conditioning_masks_keys)
        parts = [encoded(model, image) for image in images]
        parts += [functional.interpolate(mask.to(like), like.shape[-2:], mode="area") for mask in masks]
        return torch.cat(parts, dim=1) if parts else None

    def _latent_terms(
        self, prediction: Latents, point: BridgePoint, batch: Batch
    ) -> Float[Tensor, " batch"] | None:
        if self.settings.latent_loss_weight == 0:
            return None
        values = differences(prediction, point.velocity, self.settings.latent_loss_type)
        mask = None if batch.mask is None else latent_mask(batch.mask, *values.shape[-2:]).to(values.device)
        return sample_means(values, mask)

    def _pixel_terms(
        self, model: LbmModel, prediction: Latents, point: BridgePoint, batch: Batch
    ) -> Float[Tensor, " batch"] | None:
        if self._pixel_loss is None:
            return None
        z_target = predict_target(point.x_t, prediction, point.sigmas)
        generators = generators_for(self.settings.seed, batch.epoch, batch.numbers, "crop")
        with _no_autocast(z_target.device):
            return self._pixel_loss(model.vae, z_target, batch.target, batch.mask, generators)


def encoded(model: LbmModel, pictures: Float[Tensor, "batch 3 image_height image_width"]) -> Latents:
    """Latents of pictures, float32, on the model's device."""
    device = next(model.vae.parameters()).device
    return model.vae.encode(pictures.to(device)).float()


@contextmanager
def vae_alone(model: LbmModel) -> Iterator[None]:
    """Run the VAE without gradient and in its own dtype: under float16 autocast SDXL's would overflow."""
    with torch.no_grad(), _no_autocast(next(model.vae.parameters()).device):
        yield


def _no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


def _named(given: Mapping[str, Tensor], keys: Sequence[str]) -> list[Tensor]:
    if missing := [key for key in keys if key not in given]:
        raise ConfigError(
            f"conditioning: the batch has no {', '.join(missing)}.",
            hint="Put these into the shards, or take them out of conditioning_images_keys and _masks_keys.",
        )
    return [given[key] for key in keys]
