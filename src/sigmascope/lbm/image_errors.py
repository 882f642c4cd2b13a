"""How far pictures are from the tuned model's, one by one and together."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sigmascope.lbm.picture_folder import UnreadablePicture


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One result: 8-bit RGB (height, width, 3), and the latent that it was decoded from."""

    pixels: NDArray[np.uint8]
    latent: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OutputError:
    """Distance of one result from the tuned model's result.

    Attributes:
        psnr: Peak signal-to-noise ratio of the 8-bit pictures in dB; infinite for equal ones.
        image_difference: ‖x − x_tuned‖ of the pictures' values in [0, 1].
        image_norm: ‖x_tuned‖.
        latent_difference: ‖z − z_tuned‖ of the latents before they are decoded.
        latent_norm: ‖z_tuned‖.
    """

    psnr: float
    image_difference: float
    image_norm: float
    latent_difference: float
    latent_norm: float

    @property
    def image_error(self) -> float | None:
        """Relative L2 of the pictures; None where the tuned one is black all over."""
        return self.image_difference / self.image_norm if self.image_norm > 0 else None

    @property
    def latent_error(self) -> float | None:
        """Relative L2 of the latents; None where the tuned one is zero."""
        return self.latent_difference / self.latent_norm if self.latent_norm > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values; an infinite PSNR is null."""
        return {
            "psnr": self.psnr if math.isfinite(self.psnr) else None,
            "image_error": self.image_error,
            "latent_error": self.latent_error,
        }


@dataclass(frozen=True, slots=True)
class PictureErrors:
    """One picture, translated by the base alone and by base + LoRA."""

    picture: str
    base: OutputError
    with_lora: OutputError

    @property
    def remaining(self) -> float | None:
        """Share of the way from base to tuned latent that the LoRA leaves; None where there is no way to go."""
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
        not_applied: The LoRA's modules that fit nothing in the model, and so did nothing.
        num_inference_steps, seed: As the models ran.
        seconds: Time of all of it.
    """

    pictures: tuple[PictureErrors, ...]
    unreadable: tuple[UnreadablePicture, ...]
    not_applied: tuple[str, ...]
    num_inference_steps: int
    seed: int
    seconds: float

    @property
    def overall(self) -> PictureErrors:
        """All pictures as one: the mean PSNR, and differences and norms of all together."""
        base = together([picture.base for picture in self.pictures])
        return PictureErrors("all", base, together([picture.with_lora for picture in self.pictures]))

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
    """Several results as one: mean PSNR (infinite if any is), root-sum-square of the rest."""
    return OutputError(
        math.fsum(error.psnr for error in errors) / len(errors),
        math.hypot(*(error.image_difference for error in errors)),
        math.hypot(*(error.image_norm for error in errors)),
        math.hypot(*(error.latent_difference for error in errors)),
        math.hypot(*(error.latent_norm for error in errors)),
    )


def output_error(output: Output, tuned: Output) -> OutputError:
    """Compare one result with the tuned model's, in float64."""
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
    )
