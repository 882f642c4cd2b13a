"""The mathematics of Latent Bridge Matching, as pure functions on plain tensors.

Chadebec et al., "LBM: Latent Bridge Matching for Fast Image-to-Image Translation", ICCV 2025,
arXiv 2503.07535. A stochastic bridge joins the source latent z_source (at σ = 1) to the target latent
z_target (at σ = 0):

    x(σ) = σ·z_source + (1 − σ)·z_target + s·√(σ(1 − σ))·ε,     ε ~ N(0, I)

The denoiser is trained to predict its drift v = z_source − z_target, so that z_target ≈ x(σ) − σ·v.
σ follows a flow-matching Euler schedule and the denoiser sees it as the timestep σ·1000.
"""

import itertools
import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from sigmascope.errors import ConfigError

Latent = Float[Tensor, "batch channels height width"]
DenoiseFn = Callable[[Tensor, Tensor], Tensor]
"""(x_t, sigma of shape (batch,)) -> prediction, of the shape of x_t."""
OnStep = Callable[[int, int, Tensor], None]
"""(steps done, steps in all, x_t after the step)."""


def bridge_sigmas(num_inference_steps: int) -> Float[Tensor, " steps"]:
    """Noise levels at which sampling asks the denoiser: N values from 1 to 1/N, evenly spaced (float64).

    Raises:
        ConfigError: `num_inference_steps` is below 1.
    """
    if num_inference_steps < 1:
        raise ConfigError(
            f"num_inference_steps: expected 1 or more, got {num_inference_steps}.",
            hint="Use 1, or up to 4 for a little more detail.",
        )
    return torch.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps, dtype=torch.float64)


def bridge_noise_std(sigma: Float[Tensor, "..."], noise_scale: float) -> Float[Tensor, "..."]:
    """Standard deviation of the bridge at σ: s·√(σ(1 − σ)). Zero at both ends."""
    return noise_scale * torch.sqrt(sigma * (1.0 - sigma))


def bridge_interpolate(
    z_source: Latent, z_target: Latent, sigma: Float[Tensor, "*batch"], noise: Latent, noise_scale: float
) -> Latent:
    """A point of the bridge: x = σ·z_source + (1 − σ)·z_target + s·√(σ(1 − σ))·ε.

    Args:
        z_source: Source latents.
        z_target: Target latents.
        sigma: One σ in [0, 1] for each sample, or a single one for all.
        noise: ε, standard normal.
        noise_scale: s, the config's `bridge_noise_sigma`.
    """
    weight = _per_sample(sigma, z_source)
    mean = weight * z_source + (1.0 - weight) * z_target
    return mean + bridge_noise_std(weight, noise_scale) * noise


def bridge_velocity_target(z_source: Latent, z_target: Latent) -> Latent:
    """What the denoiser is trained to predict: v = z_source − z_target."""
    return z_source - z_target


def predict_target(x_t: Latent, prediction: Latent, sigma: Float[Tensor, "*batch"]) -> Latent:
    """The target latent that a prediction implies: ẑ_target = x − σ·v."""
    return x_t - _per_sample(sigma, x_t) * prediction


def euler_step(x_t: Latent, prediction: Latent, sigma: float, next_sigma: float) -> Latent:
    """One Euler step of dx = v dσ: x(σ′) = x(σ) + (σ′ − σ)·v."""
    return x_t + (next_sigma - sigma) * prediction


def add_bridge_noise(x_t: Latent, sigma: float, noise: Latent, noise_scale: float) -> Latent:
    """Put the bridge's own noise back after a step: x + s·√(σ(1 − σ))·ε. Nothing changes at σ = 0 or 1."""
    return x_t + noise_scale * math.sqrt(sigma * (1.0 - sigma)) * noise


def sample_bridge(
    denoise_fn: DenoiseFn,
    z_source: Latent,
    num_steps: int,
    noise_scale: float,
    generator: torch.Generator | None = None,
    on_step: OnStep | None = None,
) -> Latent:
    """Walk from the source latent to the target latent in `num_steps` Euler steps.

    Fresh bridge noise is added between steps; the last step ends at σ = 0, where there is none.

    Args:
        denoise_fn: Predicts z_source − z_target from x_t and σ.
        z_source: Where the walk starts (σ = 1).
        num_steps: N ≥ 1.
        noise_scale: s, the config's `bridge_noise_sigma`.
        generator: Generator of the noise, on any device; the noise is drawn there, then moved.
        on_step: Called after each step.

    Raises:
        ConfigError: `num_steps` is below 1.
    """
    sigmas = [*bridge_sigmas(num_steps).tolist(), 0.0]
    x_t = z_source
    for index, (sigma, next_sigma) in enumerate(itertools.pairwise(sigmas)):
        batch_sigma = torch.full((x_t.shape[0],), sigma, dtype=torch.float32, device=x_t.device)
        x_t = euler_step(x_t, denoise_fn(x_t, batch_sigma), sigma, next_sigma)
        if next_sigma > 0.0 and noise_scale > 0.0:
            x_t = add_bridge_noise(x_t, next_sigma, _noise_like(x_t, generator), noise_scale)
        if on_step is not None:
            on_step(index + 1, num_steps, x_t)
    return x_t


def _per_sample(sigma: Tensor, like: Tensor) -> Tensor:
    """Shape σ so that it broadcasts over channels, height and width."""
    sigma = sigma.to(device=like.device, dtype=like.dtype)
    return sigma.reshape(-1, *([1] * (like.ndim - 1)))


def _noise_like(x_t: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else x_t.device
    noise = torch.randn(x_t.shape, generator=generator, device=device, dtype=torch.float32)
    return noise.to(device=x_t.device, dtype=x_t.dtype)
