"""Prove a LoRA on pictures: how far the base's results are from the tuned model's, with and without the LoRA.

Weights show how much of a fine-tuning a LoRA holds; pictures show how much of it is visible. The tuned model runs
first, and its results are kept on disk. Then the base takes its place in memory and runs twice.
"""

import gc
import logging
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sigmascope.errors import ConfigError, ModelMismatchError
from sigmascope.lbm.config import resolve_config
from sigmascope.lbm.images import UnreadableImage, find_images, load_image, ssim
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import LbmModel, load_lbm
from sigmascope.lora.alignment import changed_keys
from sigmascope.lora.families import layout_of
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import open_lora
from sigmascope.lora.validate import formed
from sigmascope.progress import Progress, no_progress

if TYPE_CHECKING:
    from sigmascope.lbm.training.objective import PixelLoss

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How pictures are translated; the same for all three models.

    Attributes:
        num_inference_steps: Euler steps along the bridge.
        seed: Seed of the bridge noise.
        resolution: Side of the square bucket; None for the config's.
        dtype: Dtype of the models' weights.
        device: Where they run.
    """

    num_inference_steps: int = 1
    seed: int = 0
    resolution: int | None = None
    dtype: torch.dtype = torch.float32
    device: str | torch.device = "cpu"


@dataclass(frozen=True, slots=True)
class OutputError:
    """Distance of one result from the tuned model's result.

    Attributes:
        psnr: Peak signal-to-noise ratio of the 8-bit pictures in dB; infinite for equal ones.
        image_difference: ‖x − x_tuned‖ of the pictures' values in [0, 1].
        image_norm: ‖x_tuned‖.
        latent_difference: ‖z − z_tuned‖ of the latents before they are decoded.
        latent_norm: ‖z_tuned‖.
        ssim: Structural similarity of the 8-bit pictures, 1 for equal ones.
        lpips: Perceptual distance (Zhang et al., arXiv 1801.03924, with VGG); None without the package `lpips`.
    """

    psnr: float
    image_difference: float
    image_norm: float
    latent_difference: float
    latent_norm: float
    ssim: float
    lpips: float | None = None

    @property
    def image_error(self) -> float | None:
        """Relative L2 error of the pictures; None if the tuned model's picture is completely black."""
        return self.image_difference / self.image_norm if self.image_norm > 0 else None

    @property
    def latent_error(self) -> float | None:
        """Relative L2 error of the latents; None if the tuned model's latent is zero."""
        return self.latent_difference / self.latent_norm if self.latent_norm > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values; an infinite PSNR is null."""
        return {
            "psnr": self.psnr if math.isfinite(self.psnr) else None,
            "image_error": self.image_error,
            "latent_error": self.latent_error,
            "ssim": self.ssim,
            "lpips": self.lpips,
        }


@dataclass(frozen=True, slots=True)
class ImageErrors:
    """One picture, translated by the base alone and by base + LoRA."""

    picture: str
    base: OutputError
    with_lora: OutputError

    @property
    def remaining(self) -> float | None:
        """Share of the distance from base to tuned latent that the LoRA leaves; None if the two are equal."""
        whole = self.base.latent_difference
        return self.with_lora.latent_difference / whole if whole > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "picture": self.picture,
            "base": self.base.as_dict(),
            "with_lora": self.with_lora.as_dict(),
            "remaining": self.remaining,
        }


@dataclass(frozen=True, slots=True)
class ImageReport:
    """The result of one validation on pictures.

    Attributes:
        pictures: In the order of their names, at least one.
        unreadable: Files that could not be read as pictures.
        not_applied: The LoRA's modules that fit no layer of the model, and so had no effect.
        num_inference_steps, seed: The models' settings.
        seconds: How long all of it took.
    """

    pictures: tuple[ImageErrors, ...]
    unreadable: tuple[UnreadableImage, ...]
    not_applied: tuple[str, ...]
    num_inference_steps: int
    seed: int
    seconds: float

    @property
    def overall(self) -> ImageErrors:
        """All pictures together: the mean PSNR, and the combined differences and norms."""
        base = together([picture.base for picture in self.pictures])
        return ImageErrors("all", base, together([picture.with_lora for picture in self.pictures]))

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values, totals first."""
        return {
            "overall": self.overall.as_dict(),
            "pictures": [picture.as_dict() for picture in self.pictures],
            "unreadable": [asdict(file) for file in self.unreadable],
            "not_applied": list(self.not_applied),
            "num_inference_steps": self.num_inference_steps,
            "seed": self.seed,
            "seconds": self.seconds,
        }


def together(errors: Sequence[OutputError]) -> OutputError:
    """Several results as one: mean PSNR (infinite if any is), SSIM and LPIPS, root-sum-square of the rest."""
    distances = [error.lpips for error in errors if error.lpips is not None]
    return OutputError(
        math.fsum(error.psnr for error in errors) / len(errors),
        math.hypot(*(error.image_difference for error in errors)),
        math.hypot(*(error.image_norm for error in errors)),
        math.hypot(*(error.latent_difference for error in errors)),
        math.hypot(*(error.latent_norm for error in errors)),
        math.fsum(error.ssim for error in errors) / len(errors),
        math.fsum(distances) / len(distances) if distances else None,
    )


def validate_images(
    base: str | Path,
    tuned: str | Path,
    lora: str | Path,
    folder: str | Path,
    options: ImageOptions | None = None,
    *,
    config: str | Path | None = None,
    progress: Progress = no_progress,
) -> ImageReport:
    """Translate the pictures of a folder with base, base + LoRA and tuned model, and compare the results.

    The LoRA is merged into the base's weights, each sum rounded once to the models' dtype.

    Args:
        base: LBM checkpoint that the LoRA is applied to.
        tuned: LBM checkpoint that base and LoRA should reproduce.
        lora: LoRA file of any format.
        folder: Folder of pictures; its subfolders are ignored.
        options: How the pictures are translated.
        config: YAML of both models; None for the one beside each.
        progress: Called before each picture of each model.

    Raises:
        ConfigError: There is no picture that can be read, or the model needs more than a source picture.
        SigmascopeError: Whatever is wrong with the models, the LoRA or the options.
    """
    started = time.perf_counter()
    run = options or ImageOptions()
    require_source_only((base, tuned), config)
    pictures, unreadable = find_images(folder)
    total = 3 * len(pictures)

    def translate(model: LbmModel, turn: int, what: str) -> Iterator[tuple[Output, Path]]:
        """Each picture's result, and the file of the tuned model's."""
        for index, path in enumerate(pictures):
            progress(turn * len(pictures) + index, total, f"{what}: {path.name}")
            latents: list[Tensor] = []
            result = translate_image(
                model,
                load_image(path),
                num_inference_steps=run.num_inference_steps,
                seed=run.seed,
                resolution=run.resolution,
                on_latent=latents.append,
            )
            yield Output(np.asarray(result), latents[0].cpu().numpy()), Path(place) / f"{index}.npz"

    def errors(model: LbmModel, turn: int, what: str) -> list[OutputError]:
        against_tuned = []
        for output, file in translate(model, turn, what):
            with np.load(file) as kept:
                against_tuned.append(output_error(output, Output(kept["pixels"], kept["latent"]), perceptual))
        return against_tuned

    perceptual = _perceptual()
    with tempfile.TemporaryDirectory(prefix="sigmascope-") as place:
        model = load_lbm(tuned, config, dtype=run.dtype, device=run.device)
        for output, file in translate(model, 0, "tuned"):
            np.savez(file, pixels=output.pixels, latent=output.latent)
        del model
        gc.collect()  # a model holds itself in cycles: the tuned one must be gone before the base comes
        model = load_lbm(base, config, dtype=run.dtype, device=run.device)
        without = errors(model, 1, "base")
        with open_lora(lora) as lora_file:
            not_applied = add_lora(model, lora_file)
        with_lora = errors(model, 2, "base + LoRA")
    return ImageReport(
        tuple(map(ImageErrors, (path.name for path in pictures), without, with_lora)),
        tuple(unreadable),
        not_applied,
        run.num_inference_steps,
        run.seed,
        time.perf_counter() - started,
    )


def require_source_only(checkpoints: Sequence[str | Path], config: str | Path | None) -> None:
    """Refuse models that need conditioning, which a folder of source pictures does not hold.

    Raises:
        ConfigError: A model needs more than a source picture, or its config is not valid.
    """
    for checkpoint in checkpoints:
        if keys := resolve_config(checkpoint, config).conditioning_keys:
            raise ConfigError(
                f"--images: {checkpoint} needs more than a source picture ({', '.join(keys)}).",
                hint="Compare single pictures with sigmascope lbm infer and --conditioning.",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One result: 8-bit RGB (height, width, 3), and the latent that it was decoded from."""

    pixels: NDArray[np.uint8]
    latent: NDArray[np.float32]


def add_lora(model: LbmModel, lora: LoraFile) -> tuple[str, ...]:
    """Add a LoRA to the weights of a model that the caller owns; this cannot be undone.

    Returns:
        Names of the LoRA's modules that fit no weight.

    Raises:
        LoraFormatError: A module's tensors do not fit together.
        NonFiniteError: They hold NaN or Inf.
    """
    state = model.state_dict(keep_vars=True)
    targets = changed_keys(lora, state, layout_of({key: tuple(value.shape) for key, value in state.items()}))
    not_applied = list(targets.unmatched)
    for key, name in targets.names.items():
        weight = state[key].data
        wide = weight.float()
        try:
            weight.copy_(wide + formed(targets.change(key), wide.cpu()).to(weight.device))
        except ModelMismatchError:
            not_applied.append(name)
    return tuple(not_applied)


def output_error(output: Output, tuned: Output, perceptual: "PixelLoss | None" = None) -> OutputError:
    """Compare one result with the tuned model's, in float64; also by LPIPS, if given."""
    reference = tuned.pixels.astype(np.float64) / 255
    difference = output.pixels.astype(np.float64) / 255 - reference
    mean_square = float(np.mean(difference**2))
    latent = tuned.latent.astype(np.float64)
    return OutputError(
        psnr=math.inf if mean_square == 0 else -10 * math.log10(mean_square),
        image_difference=float(np.linalg.norm(difference)),
        image_norm=float(np.linalg.norm(reference)),
        latent_difference=float(np.linalg.norm(output.latent.astype(np.float64) - latent)),
        latent_norm=float(np.linalg.norm(latent)),
        ssim=ssim(output.pixels, tuned.pixels),
        lpips=None if perceptual is None else _distance(perceptual, output.pixels, tuned.pixels),
    )


def _perceptual() -> "PixelLoss | None":
    """LPIPS, if its package is installed and finds its weights."""
    if find_spec("lpips") is None:
        return None
    from sigmascope.lbm.training.objective import PixelLoss

    try:
        return PixelLoss("lpips")
    except (OSError, RuntimeError, ImportError) as error:  # it loads VGG's weights from the network once
        logger.warning("LPIPS is left out, because it cannot load its network: %s", error)
        return None


def _distance(perceptual: "PixelLoss", *pictures: NDArray[np.uint8]) -> float:
    ours, theirs = (
        torch.from_numpy(picture).movedim(-1, 0)[None].float() / 127.5 - 1.0 for picture in pictures
    )
    with torch.no_grad():
        return float(perceptual.compare(ours, theirs, None))
