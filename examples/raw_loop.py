"""A sampling loop of your own, outside any pipeline, with named stages.

It relights a picture with the pocket model that ships with Sigmascope. Without a watch a name costs a fraction of a
microsecond; with one, each name is a stage in the record:

pip install -e '.[lbm]'
sigmascope watch --trace relight.trace.json examples/raw_loop.py --steps 8 relit.png
"""

import argparse
import itertools

import torch
from PIL import Image
from torch import Tensor

import sigmascope
from sigmascope import load_lbm
from sigmascope.lbm.bridge import add_bridge_noise, bridge_sigmas, euler_step
from sigmascope.lbm.images import image_to_tensor, tensor_to_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.pocket import BASE_PATH, EXAMPLE_SCENE
from sigmascope.lbm.pocket.scenes import make_scene, scene_source_light, shade


def load() -> LbmModel:
    """Load the model, and record its modules."""
    with sigmascope.stage("model_loading") as stage:
        model = load_lbm(BASE_PATH)
    stage.module("denoiser", model.denoiser)
    stage.module("vae", model.vae)
    return model


def encode(model: LbmModel, picture: Image.Image) -> Tensor:
    """The picture's latent. Its statistics take time, so they are recorded after the stage."""
    with sigmascope.stage("latent_encoding") as stage:
        latent: Tensor = model.vae.encode(image_to_tensor(picture))
    stage.tensor("source_latent", latent)
    return latent


def denoise(model: LbmModel, latent: Tensor, steps: int, seed: int) -> Tensor:
    """Latent Bridge Matching's sampling (arXiv 2503.07535), written out. Each turn of the loop is a step."""
    noise_scale = model.config.bridge_noise_sigma
    generator = torch.Generator().manual_seed(seed)
    sigmas = [*bridge_sigmas(steps).tolist(), 0.0]
    with sigmascope.stage("denoising") as stage:
        for sigma, next_sigma in itertools.pairwise(sigmas):
            with sigmascope.step():
                prediction = model(latent, torch.full((latent.shape[0],), sigma))
                latent = euler_step(latent, prediction, sigma, next_sigma)
                if next_sigma > 0.0:
                    noise = torch.randn(latent.shape, generator=generator)
                    latent = add_bridge_noise(latent, next_sigma, noise, noise_scale)
    stage.fact("seed", seed)
    stage.tensor("result_latent", latent)
    return latent


def decode(model: LbmModel, latent: Tensor) -> Image.Image:
    """The picture of a latent."""
    with sigmascope.stage("latent_decoding"):
        pixels = model.vae.decode(latent)
        return tensor_to_image(pixels.clamp(-1.0, 1.0))


@torch.inference_mode()
def relight(picture: Image.Image, steps: int, seed: int) -> Image.Image:
    """The same scene under another light."""
    model = load()
    return decode(model, denoise(model, encode(model, picture), steps, seed))


def example_picture() -> Image.Image:
    """A scene that the model has not seen."""
    return Image.fromarray(shade(make_scene(EXAMPLE_SCENE), scene_source_light(EXAMPLE_SCENE)))


def main() -> None:
    """Relight the example."""
    parser = argparse.ArgumentParser(description="Relight a picture with the pocket model.")
    parser.add_argument("target", help="the picture to write")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    relight(example_picture(), arguments.steps, arguments.seed).save(arguments.target)
    print(f"wrote {arguments.target}")  # noqa: T201 - a script


if __name__ == "__main__":
    main()
