"""A picture as a list of plain shapes, drawn as SVG or PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sigmascope import svg
from sigmascope.cli.console import needs_extra
from sigmascope.files import atomic_path

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Number = int | float
_SHARPNESS = 2  # pixels of a PNG for one of the SVG


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline begins, is centred or ends at a place."""

    x: Number
    y: Number
    text: str
    size: int = 12
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True, slots=True)
class Line:
    """A thin line."""

    start: tuple[Number, Number]
    end: tuple[Number, Number]
    colour: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A filled rectangle; the tip shows under the mouse, in an SVG."""

    x: Number
    y: Number
    width: Number
    height: Number
    colour: str
    tip: str = ""


Shape = Label | Line | Bar


def save_picture(path: Path, size: tuple[int, int], shapes: Sequence[Shape]) -> None:
    """Write a picture whole or not at all, as PNG if it is named so and as SVG otherwise.

    Args:
        path: The file, replaced if it is there.
        size: Width and height in pixels of the SVG; a PNG has twice as many.
        shapes: From back to front.

    Raises:
        WriteError: The file cannot be written.
        ConfigError: A PNG is wanted and Pillow is not installed.
    """
    if path.suffix.lower() == ".png":
        _save_png(path, size, shapes)
        return
    with atomic_path(path) as temporary:
        temporary.write_text(svg.document(*size, [_as_svg(shape) for shape in shapes]), encoding="utf-8")


def _save_png(path: Path, size: tuple[int, int], shapes: Sequence[Shape]) -> None:
    with needs_extra("lbm"):
        from PIL import Image, ImageDraw
    image = Image.new("RGB", (size[0] * _SHARPNESS, size[1] * _SHARPNESS), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        _draw(draw, shape)
    with atomic_path(path) as temporary:
        image.save(temporary, format="PNG")


def _draw(draw: "ImageDraw", shape: Shape) -> None:
    from PIL import ImageFont

    if isinstance(shape, Label):
        place = (shape.x * _SHARPNESS, shape.y * _SHARPNESS)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        font = ImageFont.load_default(shape.size * _SHARPNESS)
        draw.text(place, shape.text, fill="#212121", font=font, anchor=anchor)
    elif isinstance(shape, Line):
        ends = [_SHARPNESS * number for number in (*shape.start, *shape.end)]
        draw.line(ends, fill=shape.colour, width=_SHARPNESS)
    else:
        left, top = shape.x * _SHARPNESS, shape.y * _SHARPNESS
        right = max(left, left + shape.width * _SHARPNESS - 1)
        bottom = max(top, top + shape.height * _SHARPNESS - 1)
        draw.rectangle([left, top, right, bottom], fill=shape.colour)


def _as_svg(shape: Shape) -> str:
    if isinstance(shape, Label):
        return svg.label(shape.x, shape.y, shape.text, anchor=shape.anchor, size=shape.size)
    if isinstance(shape, Line):
        return svg.line(shape.start, shape.end, shape.colour)
    return svg.bar(shape.x, shape.y, (shape.width, shape.height), shape.colour, shape.tip)
