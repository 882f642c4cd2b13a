"""Where losses and pictures are shown while training: TensorBoard, Weights & Biases, ... through Accelerate."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from accelerate import Accelerator
from PIL import Image

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.settings import TrainSettings

_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "comet_ml": ("comet_ml",),
    "aim": ("aim",),
    "clearml": ("clearml",),
}
LOGS: Final = "logs"
"""The folder of trackers that write files, in `save_ckpt_path`."""
RUN: Final = "lbm"
_TAKES_PICTURES: Final = ("tensorboard", "wandb")


def check_tracker(name: str | None) -> None:
    """Refuse a tracker whose package is not installed: Accelerate leaves it out without a word.

    Raises:
        ConfigError: Names the package and how to install it.
    """
    if name is None:
        return
    packages = _PACKAGES.get(name, (name,))
    if not any(importlib.util.find_spec(package) for package in packages):
        raise ConfigError(
            f"report_to: {name} needs the package {packages[0]}, which is not installed.",
            hint=f"Install it with: pip install {packages[0]}, or set report_to: none and wandb_project: null.",
        )


def start_trackers(accelerator: Accelerator, settings: TrainSettings, step: int) -> None:
    """Begin the run in the tracker that the accelerator was made with.

    Args:
        accelerator: Made with `log_with` and `project_dir`.
        settings: Shown as the run's hyperparameters.
        step: That training begins or resumes at; what TensorBoard holds of later ones is dropped.
    """
    if settings.tracker is None:
        return
    options: dict[str, dict[str, Any]] = {}
    if settings.tracker == "tensorboard":
        options["tensorboard"] = {"purge_step": step + 1 if step else None}
    name = settings.wandb_project or RUN
    accelerator.init_trackers(name, config=_hyperparameters(settings), init_kwargs=options)


def log_pictures(accelerator: Accelerator, name: str, picture: Image.Image, step: int) -> None:
    """Show a picture in those trackers that take any."""
    pixels = np.asarray(picture.convert("RGB"))[None]
    for tracker in accelerator.trackers:
        if tracker.name in _TAKES_PICTURES:
            shape = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({name: pixels}, step=step, **shape)


def project_folder(settings: TrainSettings) -> Path:
    """Where trackers that write files do so."""
    return settings.save_ckpt_path / LOGS


def _hyperparameters(settings: TrainSettings) -> dict[str, bool | int | float | str]:
    """The settings as what every tracker takes: flat, and texts for lists and blocks."""
    values = settings.model_dump(mode="json")
    return {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in values.items()
    }
