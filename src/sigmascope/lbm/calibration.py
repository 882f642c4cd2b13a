"""Statistics of the layers of an LBM: it translates a few pictures while its layers are watched.

What the pictures show matters little: blurred noise does nearly as well as photographs of the right kind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lbm.config import resolve_config
from sigmascope.lbm.images import Size, tensor_to_image
from sigmascope.lbm.infer import translated_latent
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.streamed import streamed_lbm
from sigmascope.lora.calibration import collect_statistics
from sigmascope.lora.families import denoiser_fingerprint
from sigmascope.lora.statistics import FULL_UP_TO, RANK, ModelStatistics
from sigmascope.progress import Progress, no_progress

__all__ = ["lbm_statistics", "noise_pictures"]

_BLOBS = 8  # along a side of a picture of noise


def lbm_statistics(
    path: str | Path,
    pictures: Sequence[Image.Image],
    *,
    config_path: str | Path | None = None,
    num_inference_steps: int = 1,
    size: str | Size = "bucket",
    resolution: int | None = None,
    probes: int = 1,
    full_up_to: int = FULL_UP_TO,
    rank: int = RANK,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Translate pictures with an LBM, and sum up what its layers do.

    Args:
        path: The model's checkpoint: the base or the tuned model of a later extraction.
        pictures: What it translates.
        config_path: The model's YAML; that beside the checkpoint when left out.
        num_inference_steps: As the LoRA will be used.
        size: As of `translate_image`.
        resolution: The same.
        probes: Random projections of each output.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of noise and projections.
        dtype: In which the model computes.
        device: Where it does.
        progress: Told after each call of the denoiser.

    Raises:
        ConfigError: There is no picture, or the model takes other pictures beside the source.
        CheckpointError: The model cannot be loaded.
        NonFiniteError: NaN or Inf went through a layer.
    """
    if not pictures:
        raise ConfigError("there is no picture to translate.", hint="Use --images FOLDER or --noise 4.")
    if asked := resolve_config(path, config_path).conditioning_keys:
        raise ConfigError(
            f"the model takes {', '.join(asked)} beside the source.",
            hint="Call sigmascope.collect_statistics with your own pictures for them.",
        )
    with open_checkpoint(path) as checkpoint:
        fingerprint = denoiser_fingerprint(checkpoint)
    with _model_for_statistics(path, config_path, dtype, device or torch.device("cpu")) as model:

        def run() -> None:
            with torch.inference_mode():
                for number, picture in enumerate(pictures):
                    translated_latent(
                        model,
                        picture,
                        num_inference_steps=num_inference_steps,
                        seed=seed + number,
                        size=size,
                        resolution=resolution,
                        conditioning={},
                    )

        return collect_statistics(
            model.denoiser,
            run,
            probes=probes,
            calls=num_inference_steps * len(pictures),
            full_up_to=full_up_to,
            rank=rank,
            seed=seed,
            fingerprint=fingerprint,
            progress=progress,
        )


@contextmanager
def _model_for_statistics(
    path: str | Path, config_path: str | Path | None, dtype: torch.dtype, device: torch.device
) -> Iterator[LbmModel]:
    """On the CPU most weights stay in the file: sums and gradients need the memory."""
    if device.type == "cpu":
        with streamed_lbm(path, config_path, dtype=dtype) as model:
            yield model
    else:
        yield load_lbm(path, config_path, dtype=dtype, device=device)


def noise_pictures(count: int, *, size: int = 512, seed: int = 0) -> list[Image.Image]:
    """Blurred coloured noise, (size, size): soft blobs with some grain.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"--noise {count} makes no picture.", hint="Use 1 or more, such as 4.")
    generator = torch.Generator().manual_seed(seed)
    pictures = []
    for _ in range(count):
        soft = torch.randn(1, 3, _BLOBS, _BLOBS, generator=generator)
        blobs = torch.nn.functional.interpolate(soft, size=(size, size), mode="bicubic")
        grain = torch.randn(1, 3, size, size, generator=generator)
        pictures.append(tensor_to_image((0.6 * blobs + 0.05 * grain).clamp(-1.0, 1.0)))
    return pictures
