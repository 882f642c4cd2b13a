"""The pocket model as the subject of a benchmark."""

from dataclasses import dataclass

import torch
from PIL import Image

from sigmascope.errors import ConfigError
from sigmascope.lbm.bridge import bridge_sigmas
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.pocket import CONFIG_PATH, EXAMPLE_SCENE, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, relighting_pair
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
