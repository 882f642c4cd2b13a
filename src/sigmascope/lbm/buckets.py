"""The sizes an LBM works at: a few aspect ratios of about equal area."""

import math
import re

from sigmascope.errors import ConfigError

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

    Args:
        width: Of the image, in pixels.
        height: Of the image, in pixels.
        resolution: Side of the square bucket.
        factor: Sides of buckets are multiples of this.

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
    """Refuse a resolution that makes no sense or that nothing would use.

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
