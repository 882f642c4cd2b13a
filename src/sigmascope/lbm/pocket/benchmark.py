"""The pocket model as the subject of a benchmark, and how close its pictures are to the rendered truth."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from PIL import Image

from sigmascope.errors import ConfigError
from sigmascope.lbm.bridge import bridge_sigmas
from sigmascope.lbm.images import image_to_tensor, psnr, tensor_to_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import CONFIG_PATH, EXAMPLE_SCENE, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, Light, relighting_pair
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.records.performance import BenchCase, Made

STEPS = 2
"""Of a case that names none."""


@dataclass(frozen=True)
class PocketSubject:
    """The tuned pocket model, which relights a rendered scene.

    Attributes:
        model: As loaded.
        picture: What it relights, resized to each case.
        name: What it is called in records and tables.
    """

    model: LbmModel
    picture: Image.Image
    name: str = "pocket LBM"

    @classmethod
    def load(cls, *, dtype: torch.dtype, device: torch.device) -> "PocketSubject":
        """Load the model from the package, and render its scene."""
        source, _ = relighting_pair(EXAMPLE_SCENE, COOL)
        return cls(load_lbm(TUNED_PATH, CONFIG_PATH, dtype=dtype, device=device), Image.fromarray(source))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return next(self.model.parameters()).device

    def check(self, case: BenchCase) -> None:
        """Refuse batches, videos, and no steps.

        Raises:
            ConfigError: Says which.
        """
        if case.batch != 1:
            raise ConfigError("--batch: the pocket model makes one picture at a time.", hint="Leave it out.")
        if case.frames is not None:
            raise ConfigError("--frames: the pocket model makes pictures, no videos.", hint="Leave it out.")
        bridge_sigmas(STEPS if case.steps is None else case.steps)

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Relight the scene at the case's size; `translate_image` knows its own stages and steps."""
        picture = self.picture
        if case.width is not None and case.height is not None:
            picture = picture.resize((case.width, case.height))
        result = translate_image(
            self.model,
            picture,
            num_inference_steps=STEPS if case.steps is None else case.steps,
            seed=seed,
            size="keep",
        )
        return Made(1, result.width, result.height)


def vae_psnr(model: LbmModel, light: Light, scenes: Iterable[int]) -> float:
    """Mean PSNR in dB of rendered scenes that were encoded and decoded, and nothing else."""
    values = []
    with torch.inference_mode():
        for number in scenes:
            truth = Image.fromarray(relighting_pair(number, light)[1])
            decoded = model.vae.decode(model.vae.encode(image_to_tensor(truth)))
            values.append(psnr(tensor_to_image(decoded.clamp(-1, 1)), truth))
    return sum(values) / len(values)


def relighting_psnr(
    model: LbmModel, light: Light, scenes: Iterable[int], *, num_inference_steps: int = 1
) -> float:
    """Mean PSNR in dB of a model's pictures against rendered ones.

    Args:
        model: Relights the scenes' source pictures.
        light: What the truth is rendered with.
        scenes: Numbers of scenes; those below 1000 are held out of training.
        num_inference_steps: Of the bridge.
    """
    values = []
    for number in scenes:
        source, truth = (Image.fromarray(pixels) for pixels in relighting_pair(number, light))
        result = translate_image(model, source, num_inference_steps=num_inference_steps, seed=0)
        values.append(psnr(result, truth))
    return sum(values) / len(values)
