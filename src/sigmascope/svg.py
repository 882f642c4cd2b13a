"""The few shapes that pictures are made of, as SVG or PNG; in SVG all text is escaped.

`drawn` makes a file of a list of shapes; `Axis` places values, on a linear scale unless that would press them together.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Number = int | float
Anchor = Literal["start", "middle", "end"]
INK: Final = "#212121"
FAINT: Final = "#616161"
PICTURES: Final = (".svg", ".png")
"""Endings of the files that `drawn` makes."""
_SHARPNESS: Final = 2  # pixels of a PNG for one of the SVG
_NOT_IN_XML: Final = "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline begins, is centred or ends at a place."""

    x: Number
    y: Number
    text: str
    size: int = 12
    anchor: Anchor = "start"
    colour: str = INK


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


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle, or two crossed strokes."""

    x: Number
    y: Number
    radius: Number
    colour: str
    tip: str = ""
    is_cross: bool = False


Shape = Label | Line | Bar | Dot


def drawn(ending: str, size: tuple[int, int], shapes: Sequence[Shape]) -> bytes:
    """A whole file.

    Args:
        ending: `.png`, in any case; anything else gives an SVG.
        size: Width and height in pixels of the SVG; a PNG has twice as many.
        shapes: From back to front.
    """
    if ending.lower() != ".png":
        return document(*size, [_as_svg(shape) for shape in shapes]).encode()
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size[0] * _SHARPNESS, size[1] * _SHARPNESS), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        _paint(draw, shape)
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def _paint(draw: "ImageDraw", shape: Shape) -> None:
    if isinstance(shape, Label):
        _write(draw, shape)
    elif isinstance(shape, Line):
        ends = [_SHARPNESS * number for number in (*shape.start, *shape.end)]
        draw.line(ends, fill=shape.colour, width=_SHARPNESS)
    elif isinstance(shape, Bar):
        left, top = shape.x * _SHARPNESS, shape.y * _SHARPNESS
        right = max(left, left + shape.width * _SHARPNESS - 1)
        bottom = max(top, top + shape.height * _SHARPNESS - 1)
        draw.rectangle([left, top, right, bottom], fill=shape.colour)
    else:
        x, y, radius = (_SHARPNESS * number for number in (shape.x, shape.y, shape.radius))
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape.is_cross:
            draw.line(box, fill=shape.colour, width=3)
            draw.line((box[0], box[3], box[2], box[1]), fill=shape.colour, width=3)
        else:
            draw.ellipse(box, fill=shape.colour)


def _write(draw: "ImageDraw", shape: Label) -> None:
    from PIL import ImageFont

    place = (shape.x * _SHARPNESS, shape.y * _SHARPNESS)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
    font = ImageFont.load_default(shape.size * _SHARPNESS)
    draw.text(place, shape.text, fill=shape.colour, font=font, anchor=anchor)


def _as_svg(shape: Shape) -> str:
    if isinstance(shape, Label):
        text = label(shape.x, shape.y, shape.text, anchor=shape.anchor, size=shape.size)
        return text if shape.colour == INK else text.replace("<text ", f'<text fill="{shape.colour}" ', 1)
    if isinstance(shape, Line):
        return line(shape.start, shape.end, shape.colour)
    if isinstance(shape, Bar):
        return bar(shape.x, shape.y, (shape.width, shape.height), shape.colour, shape.tip)
    return (cross if shape.is_cross else dot)(shape.x, shape.y, shape.radius, shape.colour, shape.tip)


_TICKS: Final = 5
_SPREAD: Final = 100.0
_DECADES: Final = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """An upright axis of shares, shown in per cent.

    It is linear from 0, so that what is twice as large is twice as tall. Only where most values lie further apart than a
    hundredfold is it logarithmic: there a linear one would press them into a line at its foot.

    Attributes:
        top: Of the axis, in pixels.
        foot: Of the axis, in pixels.
        ticks: Values at which it has a line, rising; the last is at the top.
        is_logarithmic: Which of the two it is.
    """

    top: Number
    foot: Number
    ticks: tuple[float, ...]
    is_logarithmic: bool

    @classmethod
    def of(cls, values: Iterable[float], top: Number, foot: Number) -> "Axis":
        """An axis on which finite values find a place."""
        known = sorted(value for value in values if 0 < value < math.inf)
        if not known:
            return cls(top, foot, (0.0, 1.0), False)
        least, most = known[len(known) // 10], known[(len(known) * 9) // 10]
        if most > _SPREAD * least:
            highest = math.ceil(math.log10(known[-1]))
            lowest = max(math.floor(math.log10(known[0])), highest - _DECADES)
            return cls(top, foot, tuple(10.0**power for power in range(lowest, highest + 1)), True)
        rough = known[-1] / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
        count = math.ceil(known[-1] / step * (1 - 1e-9))
        return cls(top, foot, tuple(step * number for number in range(count + 1)), False)

    def place(self, value: float) -> float:
        """The height of a value in pixels from above; beyond the axis, its end."""
        least, most = self.ticks[0], self.ticks[-1]
        if value >= most:
            return float(self.top)
        if value <= least:
            return float(self.foot)
        share = value / most
        if self.is_logarithmic:
            share = math.log(value / least) / math.log(most / least)
        return self.foot - (self.foot - self.top) * share

    def lines(self, left: Number, right: Number, colour: str) -> Iterator[Shape]:
        """A line and a label for each tick."""
        for tick in self.ticks:
            y = self.place(tick)
            yield Line((left, y), (right, y), colour)
            yield Label(left - 8, y + 4, f"{100 * tick:.4g} %", anchor="end")


def mixed(value: float, stops: Sequence[tuple[float, str]]) -> str:
    """The colour of a value between colours for rising values, as #rrggbb; beyond them that of the nearest."""
    if not value > stops[0][0]:
        return stops[0][1]
    for (low, first), (high, second) in pairwise(stops):
        if value <= high:
            share = (value - low) / (high - low)
            pairs = [(int(first[at : at + 2], 16), int(second[at : at + 2], 16)) for at in (1, 3, 5)]
            return "#" + "".join(f"{round(one + (other - one) * share):02x}" for one, other in pairs)
    return stops[-1][1]


def strip(
    x: Number, y: Number, size: tuple[Number, Number], cells: Sequence[tuple[str, str]]
) -> Iterator[Shape]:
    """A row of cells of equal width, each of a colour, with a text under the mouse."""
    width = size[0] / max(len(cells), 1)
    gap = 1 if width > 4 else 0
    for index, (colour, tip) in enumerate(cells):
        yield Bar(x + index * width, y, width - gap, size[1], colour, tip)


def document(width: int, height: int, shapes: list[str]) -> str:
    """A whole document on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" fill="#212121">'
    )
    return "\n".join([head, bar(0, 0, (width, height), "white"), *shapes, "</svg>\n"])


def label(x: Number, y: Number, text: str, *, anchor: Anchor = "start", size: int = 12) -> str:
    """Text at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{plain(text)}</text>'


def line(start: tuple[Number, Number], end: tuple[Number, Number], colour: str) -> str:
    """A thin line."""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
        f'stroke="{colour}"/>'
    )


def bar(x: Number, y: Number, size: tuple[Number, Number], colour: str, tip: str = "") -> str:
    """A filled rectangle of (width, height), with a text that shows under the mouse."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}" fill="{colour}">'
        f"{_tip(tip)}</rect>"
    )


def dot(x: Number, y: Number, radius: Number, colour: str, tip: str = "") -> str:
    """A filled circle, with a text that shows under the mouse."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}">{_tip(tip)}</circle>'


def cross(x: Number, y: Number, radius: Number, colour: str, tip: str = "") -> str:
    """Two crossed strokes, with a text that shows under the mouse."""
    strokes = f"M{x - radius:.1f} {y - radius:.1f}l{2 * radius:g} {2 * radius:g}m0 {-2 * radius:g}l{-2 * radius:g} {2 * radius:g}"
    return f'<path d="{strokes}" stroke="{colour}" stroke-width="1.5" fill="none">{_tip(tip)}</path>'


def plain(text: str) -> str:
    """Text that XML may hold: markup escaped, control characters and lone surrogates replaced."""
    return escape(re.sub(_NOT_IN_XML, "\N{REPLACEMENT CHARACTER}", text))


def _tip(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""
