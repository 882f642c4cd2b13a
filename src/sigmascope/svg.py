"""The few SVG shapes that pictures are made of; all text is escaped."""

import re
from html import escape
from typing import Final, Literal

Number = int | float
Anchor = Literal["start", "middle", "end"]
_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(width: int, height: int, shapes: list[str]) -> str:
    """A whole document on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" fill="#212121">'
    )
    return "\n".join([head, bar(0, 0, (width, height), "white"), *shapes, "</svg>\n"])


def label(
    x: Number, y: Number, text: str, *, anchor: Anchor = "start", size: int = 12, turned: int = 0
) -> str:
    """Text at a place, turned clockwise by some degrees."""
    turn = f' transform="rotate({turned} {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{turn}>{plain(text)}</text>'
    )


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
    return escape(_NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _tip(text: str) -> str:
    return f"<title>{plain(text)}</title>" if text else ""
