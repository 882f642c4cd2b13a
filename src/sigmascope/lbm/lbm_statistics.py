"""Translate a few pictures with an LBM to measure its layers (`lbm_statistics`) or to fit a LoRA (`fit_lbm_lora`).

`lbm_statistics` sums up how each layer's weight affects the picture. `fit_lbm_lora` brings a LoRA nearer to the model
that it was made from.

The content of the pictures matters little: blurred noise does almost as well as photographs of the right kind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from PIL import Image
from xxhash import xxh3_128_hexdigest

from sigmascope.checkpoints import open_checkpoint
from sigmascope.errors import ConfigError
from sigmascope.lbm.config import resolve_config
from sigmascope.lbm.images import Size, tensor_to_image
from sigmascope.lbm.infer import translated_latent
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lbm.streamed import streamed_lbm
from sigmascope.lora.file import LoraFile
from sigmascope.lora.fingerprint import denoiser_fingerprint
from sigmascope.lora.fit import FitOptions, FittedLora, fit_lora, record_calls, require_fittable, save_fitted
from sigmascope.lora.statistics import FULL_UP_TO, RANK, ModelStatistics
from sigmascope.lora.statistics_collection import UnfinishedSums, checkpoint_gradients, collect_statistics
from sigmascope.progress import Progress, no_progress

__all__ = ["fit_lbm_lora", "lbm_statistics", "noise_pictures"]

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
    gradient_checkpointing: bool = False,
    save_to: str | Path | None = None,
    progress: Progress = no_progress,
) -> ModelStatistics:
    """Translate pictures with an LBM, and sum up how its layers affect them.

    Args:
        path: The model's checkpoint: the base or the tuned model of a later extraction.
        pictures: The pictures to translate.
        config_path: The model's YAML; by default the one beside the checkpoint.
        num_inference_steps: As the LoRA will be used.
        size: As of `translate_image`.
        resolution: The same.
        probes: Random projections of each output.
        full_up_to: Width up to which a layer's moments are kept whole.
        rank: Directions that are kept of wider ones.
        seed: Of noise and projections.
        dtype: In which the model computes.
        device: Where it does.
        gradient_checkpointing: Spend a second forward pass of each block to keep less of it. On the CPU, where most
            weights stay in the file to save memory, it is always done.
        save_to: Write the file of statistics here. A run that was killed then goes on where it was.
        progress: Told after each call of the denoiser.

    Raises:
        ConfigError: There is no picture, or the model takes other pictures beside the source.
        CheckpointError: The model cannot be loaded.
        NonFiniteError: NaN or Inf went through a layer.
    """
    _require_pictures(path, config_path, pictures)
    with open_checkpoint(path) as checkpoint:
        fingerprint = denoiser_fingerprint(checkpoint)
    of_run = {"probes": probes, "full_up_to": full_up_to, "rank": rank, "seed": seed}
    settings = of_run | {
        "fingerprint": fingerprint,
        "pictures": [xxh3_128_hexdigest(picture.tobytes()) for picture in pictures],
        "call": [num_inference_steps, size, resolution, dtype],
    }
    where = device or torch.device("cpu")
    with ExitStack() as stack:
        model = stack.enter_context(_calibration_model(path, config_path, dtype, where))
        if gradient_checkpointing or where.type == "cpu":
            checkpoint_gradients(model.denoiser)
        unfinished = None if save_to is None else stack.enter_context(UnfinishedSums(Path(save_to), settings))

        def run() -> None:
            first = 0 if unfinished is None else unfinished.inputs
            for _ in _translations(
                model, pictures[first:], num_inference_steps, seed + first, size, resolution
            )():
                if unfinished is not None:
                    unfinished.input_done()

        measured = collect_statistics(
            model.denoiser,
            run,
            calls=num_inference_steps * len(pictures),
            fingerprint=fingerprint,
            unfinished=unfinished,
            progress=progress,
            **of_run,
        )
        if save_to is not None:
            measured.save(save_to)
    return measured


def fit_lbm_lora(
    base: str | Path,
    tuned: str | Path,
    lora: str | Path,
    save_to: str | Path,
    pictures: Sequence[Image.Image],
    options: FitOptions | None = None,
    *,
    config_path: str | Path | None = None,
    num_inference_steps: int = 1,
    size: str | Size = "bucket",
    resolution: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    progress: Progress = no_progress,
) -> FittedLora:
    """Fit a LoRA file to the denoiser calls that the tuned LBM makes to translate pictures.

    Args:
        base: Checkpoint of the model that the LoRA is for.
        tuned: Checkpoint of the model that it was made from.
        lora: The LoRA file.
        save_to: The file to write.
        pictures: The pictures that the tuned model translates.
        options: As in `fit_lora`; the seed is also that of the first picture's noise.
        config_path: The models' YAML; by default the one beside each checkpoint.
        num_inference_steps: As the LoRA will be used.
        size: As of `translate_image`.
        resolution: The same.
        dtype: In which the models compute.
        device: Where they do.
        gradient_checkpointing: Spend a second forward pass of each block to keep less of it.
        progress: Told after each call of the tuned denoiser and each step of the fit.

    Raises:
        ConfigError: There is no picture, or the model takes other pictures beside the source.
        CheckpointError: A model cannot be loaded.
        SigmascopeError: As of `fit_lora` and `save_fitted`.
    """
    _require_pictures(tuned, config_path, pictures)
    how, where = options or FitOptions(), device or torch.device("cpu")

    def told(done: int, _total: int, what: str) -> None:
        progress(done, num_inference_steps * len(pictures), what)

    def fit(original: LoraFile) -> FittedLora:
        with _calibration_model(tuned, config_path, dtype, where) as model:
            require_fittable(model.denoiser, original)
            run = _translations(model, pictures, num_inference_steps, how.seed, size, resolution)
            recorded = record_calls(model.denoiser, run, progress=told)
        del model
        with _calibration_model(base, config_path, dtype, where) as model:
            if gradient_checkpointing:
                checkpoint_gradients(model.denoiser)
            return fit_lora(model.denoiser, original, recorded, how, progress=progress)

    return save_fitted(lora, save_to, fit)


def _require_pictures(
    path: str | Path, config_path: str | Path | None, pictures: Sequence[Image.Image]
) -> None:
    if not pictures:
        raise ConfigError("there is no picture to translate.", hint="Use --images FOLDER or --noise 4.")
    if asked := resolve_config(path, config_path).conditioning_keys:
        raise ConfigError(
            f"the model needs {', '.join(asked)} besides the source.",
            hint="Call sigmascope.collect_statistics, or record_calls and fit_lora, with your own pictures for them.",
        )


def _translations(
    model: LbmModel,
    pictures: Sequence[Image.Image],
    steps: int,
    seed: int,
    size: str | Size,
    resolution: int | None,
) -> Callable[[], Iterator[None]]:
    """Translates a picture, and stops after each."""

    def translate() -> Iterator[None]:
        for number, picture in enumerate(pictures):
            with torch.inference_mode():
                translated_latent(
                    model,
                    picture,
                    num_inference_steps=steps,
                    seed=seed + number,
                    size=size,
                    resolution=resolution,
                    conditioning={},
                )
            yield

    return translate


@contextmanager
def _calibration_model(
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
