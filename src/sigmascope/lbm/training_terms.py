"""What training draws and minimises: σ for each sample, and the latent loss under a validity mask."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from sigmascope.lbm.config import LatentLoss, LbmConfig


def sample_sigmas(
    batch: int, config: LbmConfig, generator: torch.Generator | None = None
) -> Float[Tensor, " batch"]:
    """Draw one σ in (0, 1] for each sample, as the config's `timestep_sampling` says (float32, CPU).

    - `uniform`: every one of the schedule's T timesteps alike.
    - `log_normal`: σ = sigmoid(n), n ~ N(logit_mean, logit_std²), put on the schedule's grid of 1/T
      (Esser et al. 2024, arXiv 2403.03206, section 3.1: a positive mean favours the source end).
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
        timesteps = torch.ceil(torch.sigmoid(normal) * total).clamp(1, total)
    else:
        weights = torch.tensor(config.prob)
        chosen = torch.multinomial(weights, batch, replacement=True, generator=generator)
        timesteps = torch.tensor(config.selected_timesteps)[chosen]
    return timesteps / total


def latent_loss(
    prediction: Float[Tensor, "batch channels height width"],
    target: Float[Tensor, "batch channels height width"],
    kind: LatentLoss,
    mask: Float[Tensor, "batch 1 height width"] | None = None,
) -> Float[Tensor, ""]:
    """Mean |d| (l1) or d² (l2) of d = prediction − target, over the elements that are valid.

    Args:
        prediction: Of the denoiser.
        target: z_source − z_target.
        kind: "l1" or "l2".
        mask: 1 where the latent is valid, 0 elsewhere. A batch with no valid element has loss 0.
    """
    difference = prediction - target
    values = difference.abs() if kind == "l1" else difference.square()
    if mask is None:
        return values.mean()
    weights = mask.expand_as(values)
    return (values * weights).sum() / weights.sum().clamp_min(1.0)


def latent_mask(
    mask: Float[Tensor, "batch 1 image_height image_width"], height: int, width: int
) -> Float[Tensor, "batch 1 {height} {width}"]:
    """Bring an image-resolution validity mask to the latent's: an element is valid if all its pixels are."""
    invalid = functional.adaptive_max_pool2d(1.0 - mask, (height, width))
    return (invalid <= 0.0).to(mask.dtype)
