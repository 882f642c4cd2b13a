"""Pictures in and out, and the sizes at which a model works.

Any file that Pillow reads becomes upright RGB; results are written whole or not at all.

Between files and models they are resized, padded and turned into tensors. `find_images` finds the readable pictures
of a folder, `psnr` says how close one is to the truth, and `contact_sheet` shows several side by side, each with its
name. `working_size` is the size at which a picture is translated.
"""

import contextlib
import io
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional

from sigmascope.checkpoints import atomic_path
from sigmascope.errors import ConfigError, FileError

ByteFile = BinaryIO | io.BytesIO | io.BufferedReader
"""A file of bytes; `io`'s classes are no subclasses of typing's at run time."""
Images = Float[Tensor, "batch 3 height width"]
Resized = Float[Tensor, "batch 3 new_height new_width"]
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""What `save_image` writes, by the file's suffix."""
JPEG_QUALITY = 95
"""Of WebP too."""
_SSIM_WINDOW: Final = 11
"""Pixels a side under the Gaussian of `ssim`."""
DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""What Pillow's decoders raise on damaged files: a chunk may claim to have gigabytes."""
PIXEL_LIMIT: Final = "SIGMASCOPE_MAX_PIXELS"
"""The environment variable that says how many pixels a picture may have."""
_PIXELS: Final = 89_478_485  # where Pillow begins to warn
_TILE_SIDES: Final = (322, 323)  # TIFF's tags
_ORIENTATION: Final = 0x0112  # EXIF's tag
PICTURES: Final = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of the files that are taken for pictures."""
MARGIN, CAPTION_HEIGHT = 8, 22
"""Of a contact sheet, in pixels."""
PAPER, INK = (250, 250, 248), (30, 30, 34)
"""Its colours."""
SMALLEST_SIDE, LARGEST_SIDE = 192, 384
"""It shows pictures with their longer side between these, in pixels."""


def load_image(path: str | Path) -> Image.Image:
    """Read a picture as upright 8-bit RGB.

    EXIF orientation is applied, transparency is laid over white, 16-bit and float grey are scaled to 8 bits,
    palettes, grey and CMYK are converted, and of several frames the first is taken.

    Raises:
        FileError: The file is missing, empty, truncated, not a picture, or has more pixels than
            `SIGMASCOPE_MAX_PIXELS`.
    """
    path = Path(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd but readable files
            with path.open("rb") as stream, open_picture(stream) as image:
                image.load()
                return to_rgb(image)
    except Image.DecompressionBombError as error:
        hint = f"Scale it down first, or set {PIXEL_LIMIT}."
        raise FileError(path, f"the picture is too large ({error}).", hint=hint) from error
    except FileNotFoundError as error:
        raise FileError(path, "no such file.", hint="Check the path of the source image.") from error
    except UnidentifiedImageError as error:
        empty = path.stat().st_size == 0
        message = "the file is empty." if empty else "is not a picture that Pillow can read."
        raise FileError(path, message, hint="Pass a PNG, JPEG, WebP or TIFF file.") from error
    except (IsADirectoryError, PermissionError) as error:
        raise FileError(path, f"cannot be read ({error.strerror}).", hint="Pass a readable file.") from error
    except DECODER_ERRORS as error:
        raise FileError(
            path,
            f"the picture cannot be decoded ({why_not_decoded(error)}).",
            hint="The file is damaged; download or save it again.",
        ) from error


def why_not_decoded(error: Exception) -> str:
    """What one of `DECODER_ERRORS` says."""
    return str(error) or "it takes more memory than there is"


@contextlib.contextmanager
def open_picture(stream: ByteFile, formats: Sequence[str] | None = None) -> Iterator[Image.Image]:
    """Open a picture whose size is checked before a pixel of it is decoded.

    `Image.open` has its own check, which only warns about sizes that are refused here, and raises for sizes that a user
    may have allowed. Warning filters cannot switch it off safely, because threads share them.

    Args:
        stream: The file.
        formats: Pillow's names of the formats that may be opened; all by default.

    Raises:
        Image.DecompressionBombError: It has more pixels than `SIGMASCOPE_MAX_PIXELS`.
        UnidentifiedImageError: It has none of the formats.
        OSError: It is damaged; so are the others of `DECODER_ERRORS`.
        ConfigError: `SIGMASCOPE_MAX_PIXELS` is not a number.
    """
    most = pixel_limit()
    Image.preinit()
    prefix = stream.read(16)
    image = _first_opened(stream, prefix, formats or tuple(Image.ID)) if prefix else None
    if image is None and formats is None and prefix:
        Image.init()
        image = _first_opened(stream, prefix, tuple(Image.ID))
    if image is None:
        raise UnidentifiedImageError("its first bytes match no known format")
    with image:
        tags = getattr(image, "tag_v2", {})
        tile = [tags.get(side, 0) for side in _TILE_SIDES]
        for width, height in (image.size, tile):
            if width * height > most:
                raise Image.DecompressionBombError(f"{width}×{height}; {PIXEL_LIMIT} allows {most:,} pixels")
        yield image


def _first_opened(stream: ByteFile, prefix: bytes, formats: Sequence[str]) -> Image.Image | None:
    for name in formats:
        if name not in Image.OPEN:
            Image.init()
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(prefix) is not True:
            continue
        stream.seek(0)
        with contextlib.suppress(SyntaxError, IndexError, TypeError, struct.error):  # it only begins like one
            return factory(stream, "")
    return None


def pixel_limit() -> int:
    """How many pixels a picture may have: `SIGMASCOPE_MAX_PIXELS`, else Pillow's `MAX_IMAGE_PIXELS`.

    Raises:
        ConfigError: The variable is not a number of at least 1.
    """
    text = os.environ.get(PIXEL_LIMIT)
    if not text:
        return Image.MAX_IMAGE_PIXELS or _PIXELS
    try:
        most = int(float(text))
    except (ValueError, OverflowError):
        most = 0
    if most < 1:
        raise ConfigError(
            f"{PIXEL_LIMIT} {text} is not a number of pixels.", hint="Write it as 200000000 or 2e8."
        )
    return most


def to_rgb(image: Image.Image) -> Image.Image:
    """Bring any Pillow image to upright 8-bit RGB (see `load_image`)."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I") or upright.mode == "F":
        return _wide_grey(upright).convert("RGB")
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        with_alpha = upright.convert("RGBA")
        white = Image.new("RGBA", with_alpha.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, with_alpha).convert("RGB")
    return upright.convert("RGB")


def upright_size(image: Image.Image, stream: ByteFile) -> tuple[int, int]:
    """(width, height) that `to_rgb` will have, from what stands before the pixels; PNG may turn behind them.

    Args:
        image: Opened and not yet decoded.
        stream: The file that it was opened from.
    """
    if image.format == "TIFF":  # which Pillow turns by itself
        return image.size
    # PNG's own method decodes all pixels for an EXIF that may stand behind them.
    exif = Image.Image.getexif(image)
    if image.format == "PNG" and _ORIENTATION not in exif and (late := _png_exif(stream)):
        exif.load(late)
    return image.size[::-1] if exif.get(_ORIENTATION) in (5, 6, 7, 8) else image.size


def _png_exif(stream: ByteFile) -> bytes | None:
    stream.seek(8)
    while len(head := stream.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if kind == b"eXIf":
            return b"Exif\0\0" + stream.read(length)
        stream.seek(length + 4, os.SEEK_CUR)
    return None


def _wide_grey(image: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit or float grey to 8 bits.

    Integers above 255 are taken as 16-bit; floats up to 1 as fractions.
    """
    values = np.asarray(image, dtype=np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    if values.max(initial=0) > (255 if image.mode == "I" else 1) and image.mode != "F":
        values = values / 257.0  # 0 and 1 alone are a mask's, which stays one for `mask_levels`
    elif image.mode == "F" and values.max(initial=0) <= 1.0:
        values = values * 255.0
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


def mask_levels(grey: Image.Image) -> Image.Image:
    """Give an 8-bit grey mask its full range: if all values are 0 or 1, as NumPy saves booleans, they become 0 and
    255.
    """
    return grey.point([0] + [255] * 255) if grey.getextrema() in ((0, 1), (1, 1)) else grey


def save_image(image: Image.Image, path: str | Path) -> None:
    """Write a picture whole or not at all; the suffix (.png, .jpg, .jpeg, .webp) chooses the format.

    Raises:
        ConfigError: Another suffix.
        WriteError: The target cannot be written; it is as it was.
    """
    kind = image_format(path)
    options = {"quality": JPEG_QUALITY} if kind in ("JPEG", "WEBP") else {}
    with atomic_path(Path(path)) as temporary:
        image.save(temporary, format=kind, **options)


def image_format(path: str | Path) -> str:
    """Name Pillow's format for a file to be written.

    Raises:
        ConfigError: The suffix is not one of `FORMATS`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise ConfigError(
            f"{path}: cannot write a picture with the suffix {suffix!r}.",
            hint=f"Use one of {', '.join(FORMATS)}.",
        )
    return FORMATS[suffix]


def image_to_tensor(image: Image.Image) -> Float[Tensor, "1 3 height width"]:
    """Give an RGB image as float32 in [-1, 1]."""
    array = np.array(image.convert("RGB"), dtype=np.uint8)
    return torch.from_numpy(array).permute(2, 0, 1)[None].float() / 127.5 - 1.0


def tensor_to_image(tensor: Float[Tensor, "1 3 height width"]) -> Image.Image:
    """Give a tensor in [-1, 1] as an 8-bit RGB image; values outside are clipped."""
    pixels = ((tensor[0].detach().float() + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def resize(images: Images, size: tuple[int, int]) -> Resized:
    """Resize to (width, height) with antialiased bicubic interpolation, kept in [-1, 1].

    An image of that size already comes back untouched.
    """
    width, height = size
    if images.shape[-2:] == (height, width):
        return images
    resized = functional.interpolate(images, (height, width), mode="bicubic", antialias=True)
    return resized.clamp(-1.0, 1.0)


def pad_to(images: Images, size: tuple[int, int]) -> Resized:
    """Repeat the last row and column until the images are (width, height)."""
    right, bottom = size[0] - images.shape[-1], size[1] - images.shape[-2]
    return functional.pad(images, (0, right, 0, bottom), mode="replicate")


@dataclass(frozen=True, slots=True)
class UnreadableImage:
    """A file that has a picture's name but cannot be read as one, and why."""

    file: str
    reason: str


def find_images(folder: str | Path) -> tuple[list[Path], list[UnreadableImage]]:
    """The pictures of a folder that can be read, by name, and those that cannot. Each is decoded once.

    Args:
        folder: Its subfolders are ignored.

    Raises:
        ConfigError: It is not a folder, or holds no picture that can be read.
    """
    place = Path(folder)
    try:
        files = sorted(path for path in place.iterdir() if path.suffix.lower() in PICTURES)
    except OSError as error:
        raise ConfigError(
            f"--images {place} cannot be listed ({error.strerror}).", hint="Name a folder of pictures."
        ) from error
    pictures: list[Path] = []
    unreadable: list[UnreadableImage] = []
    for path in files:
        try:
            load_image(path)
        except FileError as error:
            unreadable.append(UnreadableImage(path.name, error.message.removeprefix(f"{path}: ")))
        else:
            pictures.append(path)
    if not pictures:
        entries = (
            f"{len(files)} damaged, first {files[0].name}: {unreadable[0].reason}" if files else "none at all"
        )
        raise ConfigError(
            f"--images {place} holds no picture that can be read ({entries}).",
            hint=f"Put pictures into it ({', '.join(PICTURES)}).",
        )
    return pictures, unreadable


def psnr(image: Image.Image, truth: Image.Image) -> float:
    """Peak signal-to-noise ratio in dB: 10 log10(255² / mean squared error), over all pixels and channels.

    Returns:
        Infinity for equal pictures.
    """
    difference = np.asarray(image.convert("RGB"), np.float64) - np.asarray(truth.convert("RGB"), np.float64)
    error = float(np.mean(difference**2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ssim(pixels: NDArray[np.uint8], truth: NDArray[np.uint8]) -> float:
    """Structural similarity of 8-bit pictures, 1 for equal ones (Wang, Bovik, Sheikh and Simoncelli, 2004).

    Means, variances and covariance are weighted by a Gaussian of 1.5 pixels in a window of 11; the result is the mean
    over all positions where the window is whole, and over the channels.

    Args:
        pixels: (height, width, 3).
        truth: The same.
    """
    ours, theirs = pixels.astype(np.float64), truth.astype(np.float64)
    our_mean, their_mean = _blurred(ours), _blurred(theirs)
    our_variance, their_variance = _blurred(ours**2) - our_mean**2, _blurred(theirs**2) - their_mean**2
    covariance = _blurred(ours * theirs) - our_mean * their_mean
    least_mean, least_variance = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    similarity = (2 * our_mean * their_mean + least_mean) * (2 * covariance + least_variance)
    similarity /= (our_mean**2 + their_mean**2 + least_mean) * (
        our_variance + their_variance + least_variance
    )
    border = _SSIM_WINDOW // 2 if min(pixels.shape[:2]) >= _SSIM_WINDOW else 0
    return float(similarity[border : pixels.shape[0] - border, border : pixels.shape[1] - border].mean())


def _blurred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values (height, width, channels) under the Gaussian of `ssim`; pictures go on mirrored beyond their edges."""
    reach = _SSIM_WINDOW // 2
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / 1.5) ** 2)
    bell /= bell.sum()
    for axis in (0, 1):
        mirrored = np.pad(values, [(reach, reach) if i == axis else (0, 0) for i in range(3)], "symmetric")
        moved, length = np.moveaxis(mirrored, axis, 0), values.shape[axis]
        blurred = np.zeros_like(values)
        along = np.moveaxis(blurred, axis, 0)
        for first, weight in enumerate(bell):
            along += weight * moved[first : first + length]
        values = blurred
    return values


def contact_sheet(pictures: Sequence[tuple[str, Image.Image]], *, columns: int | None = None) -> Image.Image:
    """Return one picture that shows all, in rows, each with its caption above it.

    Args:
        pictures: Captions and pictures; all are shown at the size of the first.
        columns: Pictures in a row; all in one row by default.

    Raises:
        ValueError: There is nothing to show.
    """
    if not pictures:
        raise ValueError("a contact sheet needs at least one picture")
    columns = columns or len(pictures)
    first = pictures[0][1]
    longer = max(first.size)
    scale = min(max(longer, SMALLEST_SIDE), LARGEST_SIDE) / longer
    width, height = (max(1, round(side * scale)) for side in first.size)
    rows = -(-len(pictures) // columns)
    cell_width, cell_height = width + MARGIN, height + CAPTION_HEIGHT + MARGIN
    sheet = Image.new("RGB", (columns * cell_width + MARGIN, rows * cell_height + MARGIN), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for index, (caption, picture) in enumerate(pictures):
        left = MARGIN + index % columns * cell_width
        top = MARGIN + index // columns * cell_height
        draw.text((left, top), caption, fill=INK, font=font)
        shown = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
        sheet.paste(shown, (left, top + CAPTION_HEIGHT))
    return sheet


Size = tuple[int, int]
"""(width, height) in pixels."""
BASE_RESOLUTION = 1024
"""Side of the square bucket of the full-size model."""
_PORTRAIT = ((512, 2048), (512, 1920), (640, 1536), (768, 1280), (896, 1152), (1024, 1024))
BUCKETS: tuple[Size, ...] = _PORTRAIT + tuple((height, width) for width, height in reversed(_PORTRAIT[:-1]))
"""Every bucket as (width, height), from the tallest to the widest. Six and five transposes."""


def working_size(
    width: int,
    height: int,
    size: str | Size = "bucket",
    *,
    resolution: int = BASE_RESOLUTION,
    factor: int = 1,
) -> Size:
    """Size at which the model sees an image, always multiples of `factor`.

    Args:
        width: Of the image, in pixels.
        height: Of the image, in pixels.
        size: "bucket" for the nearest aspect bucket, "keep" for the image's own size (rounded up), or
            (width, height), rounded up.
        resolution: Side of the square bucket.
        factor: The config's `factor`.

    Raises:
        ConfigError: The image is empty, or `size` is none of these.
    """
    _refuse_empty(width, height)
    if size == "bucket":
        return nearest_bucket(width, height, resolution=resolution, factor=factor)
    if size == "keep":
        return _round_up(width, factor), _round_up(height, factor)
    if isinstance(size, str) or min(size) < 1:
        raise ConfigError(
            f"size: expected bucket, keep, or (width, height), got {size!r}.", hint="Use the bucket."
        )
    return _round_up(size[0], factor), _round_up(size[1], factor)


def _refuse_empty(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ConfigError(
            f"the picture is empty ({width}×{height} pixels).", hint="Pass one with at least one pixel."
        )


def _round_up(length: int, factor: int) -> int:
    return -(-length // factor) * factor


def nearest_bucket(width: int, height: int, *, resolution: int = BASE_RESOLUTION, factor: int = 1) -> Size:
    """Choose the bucket whose aspect ratio is nearest, by |log(ratio)|, so that 2:1 and 1:2 count alike.

    Returns:
        (width, height) of the bucket.

    Raises:
        ConfigError: The image is empty, or `resolution` is below `factor`.
    """
    _refuse_empty(width, height)
    aspect = math.log(width / height)
    return min(scaled_buckets(resolution, factor), key=lambda size: abs(math.log(size[0] / size[1]) - aspect))


def scaled_buckets(resolution: int = BASE_RESOLUTION, factor: int = 1) -> tuple[Size, ...]:
    """Scale the buckets for a model of another resolution.

    Args:
        resolution: Side of the square bucket; 1024 gives LBM's own.
        factor: Sides become multiples of this (the config's `factor`), and at least it.

    Raises:
        ConfigError: `resolution` is below `factor`.
    """
    if resolution < factor:
        raise ConfigError(
            f"resolution: expected at least {factor} (the model halves its input that often), got {resolution}.",
            hint=f"Use a multiple of {factor}.",
        )

    def side(pixels: int) -> int:
        return max(factor, round(pixels * resolution / BASE_RESOLUTION / factor) * factor)

    return tuple((side(width), side(height)) for width, height in BUCKETS)


def parse_size(text: str) -> str | Size:
    """Read a `--size`: "bucket", "keep", or WIDTHxHEIGHT.

    Raises:
        ConfigError: It is none of these.
    """
    if text in ("bucket", "keep"):
        return text
    match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip().lower())
    if match is None or int(match[1]) * int(match[2]) == 0:
        raise ConfigError(
            f"--size: expected bucket, keep, or WIDTHxHEIGHT such as 768x512, got {text!r}.",
            hint="Leave it out for the nearest aspect bucket.",
        )
    return int(match[1]), int(match[2])


def check_resolution(resolution: int | None, size: str | Size) -> None:
    """Refuse a resolution that makes no sense or has no effect.

    Args:
        resolution: Side of the square bucket; None is the config's.
        size: As of `working_size`.

    Raises:
        ConfigError: It is below 1, or `size` is not "bucket".
    """
    if resolution is None:
        return
    if resolution < 1:
        raise ConfigError(
            f"--resolution: expected 1 or more, got {resolution}.", hint="Leave it out for the config's."
        )
    if size != "bucket":
        shown = size if isinstance(size, str) else f"{size[0]}x{size[1]}"
        raise ConfigError(
            f"--resolution {resolution} has no effect with --size {shown}.",
            hint="Leave out one of the two: --resolution scales the buckets.",
        )
