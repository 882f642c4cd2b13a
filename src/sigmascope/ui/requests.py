"""What clients send: jobs and pictures, checked before anything waits in line.

A job is the body of `POST /api/jobs`. Uploaded pictures are decoded with care, and kept in memory under a name that
only their own content gives; `Recent` forgets the longest unused first.
"""

import hashlib
import io
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Final, Generic, TypeVar

from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sigmascope.errors import ConfigError
from sigmascope.lbm.images import DECODER_ERRORS, Size, open_picture, parse_size, to_rgb, working_size
from sigmascope.lbm.infer import SEEDS
from sigmascope.ui.security import LORA_SCALES, Limits, Refusal
from sigmascope.units import MIB

Value = TypeVar("Value")
Scale = Annotated[float, Field(ge=LORA_SCALES[0], le=LORA_SCALES[1], allow_inf_nan=False)]

FORMATS: Final = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
"""What is decoded. Not every format that Pillow knows: its EPS reader, for one, starts Ghostscript."""
NAMED: Final = "PNG, JPEG, WebP, TIFF, BMP or GIF"
"""These, in a message."""


class Wish(BaseModel):
    """One request.

    Attributes:
        picture: Id of an uploaded picture.
        client: Whoever asks; a newer request of the same client replaces its waiting one.
        scale: Strength of the LoRA.
        steps: Of the bridge.
        seed: Of the noise between steps.
        size: "bucket", "keep" or WIDTHxHEIGHT.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    picture: str = Field(max_length=64)
    client: str = Field(min_length=1, max_length=64)
    scale: Scale = 1.0
    steps: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0, lt=SEEDS)
    size: str = Field(default="bucket", max_length=32)

    def key(self, scale: float) -> str:
        """What a result depends on, and so the name under which it is kept."""
        return f"{self.picture}/{self.steps}/{self.seed}/{self.size}/{scale!r}"


def read_wish(body: bytes, limits: Limits) -> Wish:
    """Read a request's JSON.

    Raises:
        Refusal: It is not JSON (400), or a value is missing, of the wrong type or out of range (422).
    """
    try:
        wish = Wish.model_validate_json(body)
    except ValidationError as error:
        raise _as_refusal(error) from error
    if wish.steps > limits.steps:
        raise Refusal(422, f"steps: expected 1 to {limits.steps}, got {wish.steps}.", "LBM needs 1 to 4.")
    wished_size(wish)
    return wish


def _as_refusal(error: ValidationError) -> Refusal:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"The request is not JSON: {first['msg']}.", "Send an object.")
    where = ".".join(map(str, first["loc"])) or "request"
    return Refusal(422, f"{where}: {first['msg']}.", "Change this value.")


def wished_size(wish: Wish) -> str | Size:
    """The size as `translate_image` takes it.

    Raises:
        Refusal: It is none.
    """
    try:
        return parse_size(wish.size)
    except ConfigError as error:
        raise Refusal(
            422, f"size: expected bucket, keep, or WIDTHxHEIGHT such as 768x512, got {wish.size!r}."
        ) from error


def check_working_size(wish: Wish, picture: Size, *, resolution: int, factor: int, limits: Limits) -> None:
    """Refuse a size that the model would need more memory for than a machine has.

    Args:
        wish: What is asked for.
        picture: Its width and height.
        resolution: Side of the square bucket.
        factor: The config's.
        limits: How much is too much.

    Raises:
        Refusal: It is too large.
    """
    width, height = working_size(*picture, wished_size(wish), resolution=resolution, factor=factor)
    if width * height > limits.working_pixels:
        raise Refusal(
            422,
            f"size: the model would work at {width}×{height}, which is more than "
            f"{limits.working_pixels / 1e6:.1f} megapixels.",
            "Take the nearest bucket, or a smaller size.",
        )


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
        with open_picture(io.BytesIO(data), FORMATS) as image:
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


def _check_pixels(image: Image.Image, limits: Limits) -> None:
    if image.width * image.height > limits.picture_pixels:
        raise _too_many_pixels(limits, f" ({image.width}×{image.height})")


def _too_many_pixels(limits: Limits, size: str = "") -> Refusal:
    return Refusal(
        413,
        f"The picture{size} has more than {limits.picture_pixels / 1e6:g} megapixels.",
        "Scale it down first.",
    )


def too_many_bytes(limits: Limits) -> Refusal:
    """The answer to an upload that does not end in time."""
    return Refusal(
        413, f"The file is larger than {limits.upload_bytes / MIB:g} MiB.", "Scale the picture down first."
    )


def as_png(image: Image.Image) -> bytes:
    """The picture as PNG; compressed lightly, because somebody waits for it."""
    written = io.BytesIO()
    image.save(written, format="PNG", compress_level=1)
    return written.getvalue()


class Recent(Generic[Value]):
    """A mapping of bounded size that several threads may use.

    The newest value is always kept, whatever its size: what was just made must be there to be fetched.

    Args:
        limit_bytes: Of all values together.

    Examples:
        >>> kept = Recent[str](limit_bytes=2)
        >>> for key in "abc":
        ...     kept.put(key, key.upper(), size_bytes=1)
        >>> kept.get("a"), kept.get("c")
        (None, 'C')
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._values: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._total_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: str, value: Value, size_bytes: int) -> None:
        """Keep a value under a key, in place of the one that was there."""
        with self._lock:
            _, before = self._values.pop(key, (None, 0))
            self._values[key] = (value, size_bytes)
            self._total_bytes += size_bytes - before
            while self._total_bytes > self._limit_bytes and len(self._values) > 1:
                _, (_, freed) = self._values.popitem(last=False)
                self._total_bytes -= freed

    def get(self, key: str) -> Value | None:
        """The value, now the most recently used; None if it is not kept or no longer."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def __len__(self) -> int:
        return len(self._values)
