"""Train the pocket model: a Latent Bridge Matching model small enough to ship with the package.

    python scripts/pocket/train.py --work build/pocket

Four parts, each resumed where it stopped: `vae` on rendered pictures, `base` (relight to the warm light) from
random weights, `tuned` (relight to the cool light) by fine-tuning every weight of `base`, and `pack`, which
writes base.safetensors, tuned.safetensors and config.yaml in bfloat16. Seeded: the same machine gives the same
weights.
"""

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from loop import LossAt, Plan, train
from numpy.typing import NDArray
from render import COOL_TARGET, SOURCE, WARM_TARGET, render_scenes, training_scenes
from torch import Tensor

from sigmascope.checkpoints import save_safetensors, tensor_fingerprint
from sigmascope.files import atomic_path
from sigmascope.lbm.bridge import bridge_interpolate, bridge_velocity_target
from sigmascope.lbm.config import LbmConfig, parse_config
from sigmascope.lbm.model import LbmModel, build_lbm
from sigmascope.lbm.training.objective import differences, sample_sigmas

SCENES = 4000
CROP = 64  # pixels; most steps see a quarter of a picture, which costs a quarter
FACTOR = 4  # pixels along one side of a latent element

VAE_PLAN = Plan("vae", steps=2200, learning_rate=1e-3, seed=1)
BASE_PLAN = Plan("base", steps=7500, learning_rate=1e-3, seed=2)
TUNED_PLAN = Plan("tuned", steps=2000, learning_rate=2e-4, seed=3)
FULL_SIZE_SHARE = 0.12  # the last steps see whole pictures, so that the model knows its real size

CONFIG = {
    "backbone_signature": "sigmascope/pocket",
    "vae_num_channels": 4,
    "unet_input_channels": 4,
    "timestep_sampling": "custom_timesteps",
    "selected_timesteps": [250, 500, 750, 1000],
    "prob": [0.1, 0.1, 0.2, 0.6],
    "bridge_noise_sigma": 0.005,
    "latent_loss_type": "l2",
    "latent_loss_weight": 1.0,
    "pixel_loss_type": "l2",
    "pixel_loss_weight": 0.0,
    "resolution": 128,
    "denoiser": {
        "block_out_channels": [48, 72, 96],
        "layers_per_block": 1,
        "transformer_layers_per_block": [1, 1, 1],
        "attention_head_dim": [3, 6, 8],
        "norm_num_groups": 8,
    },
    "vae": {
        "block_out_channels": [32, 48, 64],
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "mid_block_add_attention": False,
        "scaling_factor": 1.0,
        "force_upcast": False,
    },
}


def pictures(scenes: NDArray[np.uint8], chosen: Tensor, light: Tensor) -> Tensor:
    """Return the chosen scenes under the chosen lights, (batch, 3, size, size) in [-1, 1]."""
    pixels = torch.from_numpy(
        np.stack([scenes[i, k] for i, k in zip(chosen.tolist(), light.tolist(), strict=True)])
    )
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def crop(batch: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Cut the same random square from every member of a batch."""
    y, x = (int(torch.randint(batch.shape[-1] - size + 1, (), generator=generator)) for _ in range(2))
    return batch[..., y : y + size, x : x + size]


def vae_loss(model: LbmModel, scenes: NDArray[np.uint8]) -> LossAt:
    """Reconstruction of pictures under all three lights, with a light Kullback-Leibler term."""

    def loss_at(step: int, generator: torch.Generator) -> Tensor:
        whole = step >= VAE_PLAN.steps * (1 - FULL_SIZE_SHARE)
        count = 4 if whole else 16
        chosen = torch.randint(len(scenes), (count,), generator=generator)
        images = pictures(scenes, chosen, torch.randint(3, (count,), generator=generator))
        if not whole:
            images = crop(images, CROP, generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = model.vae.vae_model.encode(images).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            decoded = model.vae.vae_model.decode(posterior.mean + posterior.std * noise).sample
        difference = decoded.float() - images
        divergence = 0.5 * (
            posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()
        )
        return 10 * difference.square().mean() + difference.abs().mean() + 1e-4 * divergence.mean()

    return loss_at


@torch.no_grad()
def encode_scenes(model: LbmModel, scenes: NDArray[np.uint8], light: int) -> Tensor:
    """Return the unscaled latents of all scenes under one light."""
    latents = []
    for start in range(0, len(scenes), 32):
        numbers = torch.arange(start, min(start + 32, len(scenes)))
        images = pictures(scenes, numbers, torch.full_like(numbers, light))
        with torch.autocast("cpu", torch.bfloat16):
            latents.append(model.vae.vae_model.encode(images).latent_dist.mode().float())
    return torch.cat(latents)


def bridge_loss(model: LbmModel, source: Tensor, target: Tensor, plan: Plan) -> LossAt:
    """The latent loss of Latent Bridge Matching (arXiv 2503.07535, equation of section 3)."""

    def loss_at(step: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(source), (16,), generator=generator)
        pair = torch.stack([source[chosen], target[chosen]])
        if step < plan.steps * (1 - FULL_SIZE_SHARE):
            pair = crop(pair, CROP // FACTOR, generator)
        z_source, z_target = pair
        sigma = sample_sigmas(len(chosen), model.config, generator)
        noise = torch.randn(z_source.shape, generator=generator)
        x_t = bridge_interpolate(z_source, z_target, sigma, noise, model.config.bridge_noise_sigma)
        with torch.autocast("cpu", torch.bfloat16):
            prediction = model(x_t, sigma)
        return differences(prediction.float(), bridge_velocity_target(z_source, z_target), "l2").mean()

    return loss_at


@torch.no_grad()
def report(model: LbmModel, held_out: NDArray[np.uint8], name: str) -> None:
    """Print held-out PSNR of one denoising step against both lights, in dB."""
    numbers = torch.arange(len(held_out))
    source, warm, cool = (pictures(held_out, numbers, torch.full_like(numbers, k)) for k in range(3))
    z_source = model.vae.encode(source)
    output = model.vae.decode(z_source - model(z_source, torch.ones(len(numbers))))
    recon = model.vae.decode(model.vae.encode(cool))
    print(
        f"{name}: VAE {psnr(recon, cool):.2f} dB, warm {psnr(output, warm):.2f} dB, cool {psnr(output, cool):.2f} dB",
        flush=True,
    )


def psnr(image: Tensor, truth: Tensor) -> float:
    """Mean over pictures of 10 log10(1 / MSE), pixels in [0, 1]."""
    error = ((image.clamp(-1, 1) - truth) / 2).square().mean(dim=(1, 2, 3))
    return float((-10 * torch.log10(error)).mean())


def with_scaling(config: LbmConfig, scaling: float) -> LbmConfig:
    """Return the config with the VAE's scaling factor set."""
    data = config.model_dump()
    data["vae"]["scaling_factor"] = scaling
    return parse_config(data)


def round_weights(module: torch.nn.Module) -> None:
    """Round to bfloat16 and back: what follows is trained for the weights that will be stored."""
    for tensor in module.state_dict().values():
        tensor.copy_(tensor.to(torch.bfloat16))


def pack(model: LbmModel, path: Path) -> None:
    """Write one checkpoint in bfloat16 with LBM's own keys."""
    state = {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items()}
    state["num_iterations"] = model.num_iterations
    save_safetensors(path, {key: tensor.contiguous() for key, tensor in state.items()})


def scene_latents(model: LbmModel, scenes: NDArray[np.uint8], work: Path) -> list[Tensor]:
    """Return the unscaled latents by light, from disk when this VAE's are there."""
    weights = "".join(tensor_fingerprint(tensor) for tensor in model.vae.state_dict().values())
    path = work / f"latents-{hashlib.sha256(weights.encode()).hexdigest()[:16]}.pt"
    if not path.exists():
        latents = [encode_scenes(model, scenes, light) for light in (SOURCE, WARM_TARGET, COOL_TARGET)]
        with atomic_path(path) as temporary:
            torch.save(latents, temporary)
    return list(torch.load(path, weights_only=True))


def prepare_vae(work: Path, scenes: NDArray[np.uint8]) -> tuple[LbmModel, list[Tensor]]:
    """Train or load the VAE; return the model with the scaling set, and scaled latents by light."""
    torch.manual_seed(VAE_PLAN.seed)
    model = build_lbm(parse_config(CONFIG))
    train(VAE_PLAN, model.vae, vae_loss(model, scenes), work / "vae.pt")
    round_weights(model.vae)
    latents = scene_latents(model, scenes, work)
    scaling = round(float(1 / latents[SOURCE].std()), 5)
    scaled = build_lbm(with_scaling(model.config, scaling))
    scaled.vae.load_state_dict(model.vae.state_dict())
    return scaled.eval(), [z * scaling for z in latents]


def main() -> None:
    """Train what is not trained yet, and pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help="state, scenes and latents")
    parser.add_argument("--out", type=Path, default=Path("build/pocket/packed"), help="the packed model")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    scenes = training_scenes(SCENES, options.work)
    held_out = render_scenes(range(64))
    model, latents = prepare_vae(options.work, scenes)
    torch.manual_seed(BASE_PLAN.seed)
    fresh = build_lbm(model.config)
    model.denoiser.load_state_dict(fresh.denoiser.state_dict())
    for plan, light, name in ((BASE_PLAN, WARM_TARGET, "base"), (TUNED_PLAN, COOL_TARGET, "tuned")):
        loss_at = bridge_loss(model, latents[SOURCE], latents[light], plan)
        train(plan, model.denoiser, loss_at, options.work / f"{name}.pt")
        round_weights(model.denoiser)
        model.num_iterations.fill_(plan.steps)
        report(model, held_out, name)
        pack(model, options.out / f"{name}.safetensors")
    with atomic_path(options.out / "config.yaml") as temporary:
        temporary.write_text(yaml.safe_dump(model.config.model_dump(mode="json"), sort_keys=False))
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes in this run", flush=True)


if __name__ == "__main__":
    main()
