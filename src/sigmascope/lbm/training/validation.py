"""Pictures made while training, and how near they come to the truth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from PIL import Image
from torch import Tensor, nn

from sigmascope.lbm.bridge import sample_bridge
from sigmascope.lbm.data import Batch, DataOptions, TrainingData
from sigmascope.lbm.images import contact_sheet, psnr, save_image, tensor_to_image
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.checkpoints import untouched_random_state
from sigmascope.lbm.training.objective import encoded, vae_alone
from sigmascope.lbm.training.settings import TrainSettings

Conditioning = Callable[[LbmModel, Batch, Tensor], Tensor | None]
"""(model, batch, source latent) -> what the denoiser sees beside the latent."""

FOLDER: Final = "validation"
_SEED: Final = 0
"""Of the bridge noise, the same in every validation."""


@dataclass(frozen=True)
class Validation:
    """What one validation found.

    Attributes:
        step: Optimizer steps done.
        psnr: Mean dB against the targets, by number of inference steps.
        sheet: The pictures side by side: source, result at each number of steps, target.
    """

    step: int
    psnr: Mapping[int, float]
    sheet: Image.Image


def validate(
    model: LbmModel,
    samples: Sequence[Batch],
    step: int,
    num_steps: Sequence[int],
    *,
    conditioning: Conditioning,
    autocast: AbstractContextManager[object],
) -> Validation:
    """Make a picture of every sample at every number of steps. Model and random generators stay as they are.

    Args:
        model: As trained so far.
        samples: Of one picture each.
        step: Optimizer steps done.
        num_steps: Of the bridge.
        conditioning: Gives what the denoiser sees beside the latent.
        autocast: The precision of training.
    """
    device = next(model.parameters()).device
    pictures: list[tuple[str, Image.Image]] = []
    values: dict[int, list[float]] = {count: [] for count in num_steps}
    with untouched_random_state(device), torch.no_grad(), _evaluating(model), autocast:
        for batch in samples:
            truth = tensor_to_image(batch.target)
            pictures.append((batch.keys[0], tensor_to_image(batch.source)))
            for count in num_steps:
                picture = tensor_to_image(_translate(model, batch, count, conditioning))
                values[count].append(psnr(picture, truth))
                pictures.append((f"{_steps(count)}, {values[count][-1]:.1f} dB", picture))
            pictures.append(("target", truth))
    sheet = contact_sheet(pictures, columns=len(num_steps) + 2)
    return Validation(step, {count: sum(found) / len(found) for count, found in values.items()}, sheet)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; after it every module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _translate(model: LbmModel, batch: Batch, num_steps: int, conditioning: Conditioning) -> Tensor:
    with vae_alone(model):
        z_source = encoded(model, batch.source)
        extra = conditioning(model, batch, z_source)

    def denoise(x_t: Tensor, sigma: Tensor) -> Tensor:
        prediction: Tensor = model(x_t, sigma, extra)
        return prediction

    noise = model.config.bridge_noise_sigma
    generator = torch.Generator("cpu").manual_seed(_SEED)
    z_target = sample_bridge(denoise, z_source, num_steps, noise, generator)
    with vae_alone(model):
        return model.vae.decode(z_target).float()


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def read_samples(settings: TrainSettings) -> tuple[Batch, ...]:
    """Read the first `validation_samples` of the validation shards, always the same; none without shards.

    Raises:
        ConfigError: A pattern matches nothing.
        FileError: A shard does not exist.
        DataError: Not one sample can be used.
    """
    if not settings.validation_shards:
        return ()
    options = DataOptions(
        shards=settings.validation_shards,
        batch_size=1,
        shuffle=False,
        allow_pipe=settings.allow_pipe,
        max_member=settings.max_member,
        size=settings.image_size,
        workers=0,
    )
    stream = TrainingData(settings.lbm, options).batches(0)
    return tuple(batch for batch, _ in islice(stream, settings.validation_samples))


def save_sheet(found: Validation, folder: Path) -> Path:
    """Write the pictures of a validation into `folder`/validation.

    Raises:
        WriteError: The disk is full or refuses.
    """
    path = folder / FOLDER / f"step-{found.step:06d}.png"
    save_image(found.sheet, path)
    return path
