"""Uploaded pictures: decoded with care, kept in memory under a name that only their own content gives."""

import hashlib
import io
import warnings
from dataclasses import dataclass
from typing import Final

from PIL import Image, UnidentifiedImageError

from sigmascope.lbm.images import DECODER_ERRORS, to_rgb
from sigmascope.lbm.serving.limits import MIB, Limits
from sigmascope.lbm.serving.recent import Recent
from sigmascope.lbm.serving.refusals import Refusal

# Not every format that Pillow knows: its EPS reader, for one, starts Ghostscript.
FORMATS: Final = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
NAMED: Final = "PNG, JPEG, WebP, TIFF, BMP or GIF"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to work on: upright RGB, and the id under which it is asked for."""

    id: str
    image: Image.Image

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return self.image.width * self.image.height * 3


class Pictures:
    """The pictures that were uploaded lately."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept = Recent[Picture](limits.kept_pictures_bytes)

    def add(self, data: bytes) -> Picture:
        """Decode an uploaded file and keep it. The same bytes give the same id.

        Raises:
            Refusal: It is empty, no picture, damaged (415), or too large when decoded (413).
        """
        return self._keep(hashlib.sha256(data).hexdigest(), decode(data, self._limits))

    def add_image(self, image: Image.Image) -> Picture:
        """Keep a picture that was made here."""
        return self._keep(hashlib.sha256(image.tobytes()).hexdigest(), image.convert("RGB"))

    def get(self, picture_id: str) -> Picture:
        """The picture of that id.

        Raises:
            Refusal: It is not kept, or no longer (404).
        """
        picture = self._kept.get(picture_id)
        if picture is None:
            raise Refusal(404, "This picture is not kept any more.", "Choose it again.")
        return picture

    def _keep(self, picture_id: str, image: Image.Image) -> Picture:
        picture = Picture(picture_id, image)
        self._kept.put(picture.id, picture, picture.size_bytes)
        return picture


def decode(data: bytes, limits: Limits) -> Image.Image:
    """Read the bytes of a picture as upright 8-bit RGB, as `load_image` reads a file.

    Raises:
        Refusal: It is empty, no picture, damaged (415), or too large when decoded (413).
    """
    if not data:
        raise Refusal(415, "The file is empty.", f"Choose a picture ({NAMED}).")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own limit says what Pillow's warning would
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_pixels(image, limits)
                image.load()
                return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(limits) from error
    except UnidentifiedImageError as error:
        raise Refusal(415, "This is no picture that can be read.", f"Choose one in {NAMED}.") from error
    except DECODER_ERRORS as error:
        raise Refusal(
            415, "The picture is damaged and cannot be decoded.", "Save or fetch it again."
        ) from error


def too_many_bytes(limits: Limits) -> Refusal:
    """The answer to an upload that does not end in time."""
    return Refusal(
        413, f"The file is larger than {limits.upload_bytes / MIB:g} MiB.", "Scale the picture down first."
    )


def _check_pixels(image: Image.Image, limits: Limits) -> None:
    if image.width * image.height > limits.picture_pixels:
        raise _too_many_pixels(limits, f" ({image.width}×{image.height})")


def _too_many_pixels(limits: Limits, size: str = "") -> Refusal:
    return Refusal(
        413,
        f"The picture{size} has more than {limits.picture_pixels / 1e6:g} megapixels.",
        "Scale it down first.",
    )


def as_png(image: Image.Image) -> bytes:
    """The picture as PNG; compressed lightly, because somebody waits for it."""
    written = io.BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()
