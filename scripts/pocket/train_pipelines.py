"""Train the pocket pipelines: a Stable Diffusion and a Stable Diffusion 3 small enough to keep with the tests.

    PYTHONPATH=. python scripts/pocket/train_pipelines.py unet --work build/pocket

`unet` or `mmdit`. Each has two parts, resumed where they stopped: `base` learns text and pictures under the warm light
from random weights, and `tuned` is every weight of its denoiser fine-tuned to the cool light. Weights are stored in
half precision, under tests/pocket_pipelines/weights. Seeded: the same machine with as many threads gives the same
weights.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import LossAt, Plan, train
from tests.pocket_pipelines.pipelines import KINDS, WEIGHTS, new_pocket, text_encoders
from tests.pocket_pipelines.solids import SIZE, draw_solid, is_held_out, solid_of
from torch import Tensor, nn

from sigmascope.checkpoints import save_safetensors
from sigmascope.lbm.pocket.scenes import COOL, WARM, Light

PICTURES = 12000
BATCH = 32
UNPROMPTED = 0.1  # share of pictures without their prompt, which guidance needs
PLANS = {
    ("unet", "base"): Plan("unet-base", steps=5000, learning_rate=1e-3, seed=11),
    ("unet", "tuned"): Plan("unet-tuned", steps=1200, learning_rate=2e-4, seed=12),
    ("mmdit", "base"): Plan("mmdit-base", steps=3500, learning_rate=1e-3, seed=13),
    ("mmdit", "tuned"): Plan("mmdit-tuned", steps=900, learning_rate=2e-4, seed=14),
}


def trained_numbers() -> list[int]:
    """Numbers of training pictures: those whose prompt is not held out."""
    return [number for number in range(PICTURES) if not is_held_out(number)]


@torch.no_grad()
def latents(pipeline: Any, light: Light) -> Tensor:
    """Scaled latents of all training pictures, (pictures, 4, 16, 16)."""
    encoded = []
    numbers = trained_numbers()
    for start in range(0, len(numbers), 64):
        drawn = np.stack([draw_solid(solid_of(n), n, light) for n in numbers[start : start + 64]])
        pixels = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 127.5 - 1
        assert pixels.shape[-1] == SIZE
        encoded.append(pipeline.vae.encode(pixels).latent_dist.mode())
    found = torch.cat(encoded)
    print(f"latents: mean {found.mean():.4f}, 1/std {1 / found.std():.5f}", flush=True)
    config = pipeline.vae.config
    return (found - config.shift_factor) * config.scaling_factor


def noise_loss(pipeline: Any, prompts: list[str], known: Tensor) -> LossAt:
    """Mean squared error of the predicted noise (Ho et al., arXiv 2006.11239, equation 14)."""
    scheduler = pipeline.scheduler

    def loss_at(step: int, generator: torch.Generator) -> Tensor:
        chosen, texts = _batch(prompts, generator)
        noise = torch.randn(chosen.shape[0], *known.shape[1:], generator=generator)
        times = torch.randint(scheduler.config.num_train_timesteps, chosen.shape, generator=generator)
        noisy = scheduler.add_noise(known[chosen], noise, times)
        embeddings, _ = pipeline.encode_prompt(texts, "cpu", 1, False)
        prediction = pipeline.unet(noisy, times, embeddings).sample
        return (prediction - noise).square().mean()

    return loss_at


def flow_loss(pipeline: Any, prompts: list[str], known: Tensor) -> LossAt:
    """Mean squared error of the predicted velocity, at logit-normal times (Esser et al., arXiv 2403.03206)."""

    def loss_at(step: int, generator: torch.Generator) -> Tensor:
        chosen, texts = _batch(prompts, generator)
        picture = known[chosen]
        noise = torch.randn(picture.shape, generator=generator)
        time_ = torch.sigmoid(torch.randn(len(chosen), generator=generator))
        sigma = 3 * time_ / (1 + 2 * time_)  # the shift of the sampler
        level = sigma[:, None, None, None]
        embeddings, _, pooled, _ = pipeline.encode_prompt(
            texts, texts, texts, do_classifier_free_guidance=False
        )
        prediction = pipeline.transformer(
            hidden_states=(1 - level) * picture + level * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=embeddings,
            pooled_projections=pooled,
        ).sample
        return (prediction - (noise - picture)).square().mean()

    return loss_at


def _batch(prompts: list[str], generator: torch.Generator) -> tuple[Tensor, list[str]]:
    chosen = torch.randint(len(prompts), (BATCH,), generator=generator)
    without = torch.rand(BATCH, generator=generator) < UNPROMPTED
    pairs = zip(chosen.tolist(), without.tolist(), strict=True)
    return chosen, ["" if unprompted else prompts[number] for number, unprompted in pairs]


def round_weights(module: nn.Module) -> dict[str, Tensor]:
    """Round to half precision in place, as they are stored; gives them in it."""
    rounded = {name: value.to(torch.float16).contiguous() for name, value in module.state_dict().items()}
    module.load_state_dict({name: value.float() for name, value in rounded.items()})
    return rounded


def main() -> None:
    """Train what is not trained yet, and store it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help="where its state is kept")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    WEIGHTS.mkdir(exist_ok=True)
    started = time.perf_counter()
    kind: str = options.kind
    pipeline = new_pocket(kind)
    denoiser: nn.Module = getattr(pipeline, KINDS[kind])
    text = text_encoders(pipeline)
    prompts = [solid_of(number).prompt for number in trained_numbers()]
    losses: dict[str, Callable[[Any, list[str], Tensor], LossAt]] = {"unet": noise_loss, "mmdit": flow_loss}
    for look, light in (("base", WARM), ("tuned", COOL)):
        trained = nn.ModuleDict({"denoiser": denoiser, "text": text}) if look == "base" else denoiser
        trained.requires_grad_()
        loss_at = losses[kind](pipeline, prompts, latents(pipeline, light))
        train(PLANS[kind, look], trained, loss_at, options.work / f"{kind}-{look}.pt")
        trained.requires_grad_(False)
        save_safetensors(WEIGHTS / f"{kind}-{look}.safetensors", round_weights(denoiser))
        if look == "base":
            save_safetensors(WEIGHTS / f"{kind}-text.safetensors", round_weights(text))
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes in this run", flush=True)


if __name__ == "__main__":
    main()
