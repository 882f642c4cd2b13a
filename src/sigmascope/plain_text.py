"""Foreign text made safe to show: it controls no terminal, log or page, and no stream fails because of it.

`printable` replaces invisible characters, `in_one_line` new lines too, and `Harmless` removes them from whatever rich prints. `never_failing` lets a
stream replace characters that its encoding lacks: our own symbols have plain substitutes (`PLAIN`), all others are
escaped.
"""

import codecs
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

PLAIN: Final = "sigmascope.plain"
"""The name by which Python's codecs know `_plain_marks`, as they know "backslashreplace"."""
_MARKS: Final = {
    **dict.fromkeys("✓✅", "+"),
    **dict.fromkeys("✗❌🚨", "x"),
    **dict.fromkeys("⚠❓", "!"),
    **dict.fromkeys("█━", "#"),
    **dict.fromkeys("─╌‐‑‒–—−╴╶╸╺", "-"),
    **dict.fromkeys("│║┃‖∣", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰", "+"),
    **dict.fromkeys("\ufe0f\ufe0e\u200b\u200c\u200d", ""),
    "→": "->", "←": "<-", "…": "...", "×": "x", "·": "*", "≤": "<=", "≥": ">=", "≈": "~", "±": "+/-", "µ": "u",
    "°": " deg", "²": "^2", "³": "^3", "Δ": "d", "σ": "sigma", "√": "sqrt ", "‘": "'", "’": "'", "“": '"', "”": '"',
    "\N{REPLACEMENT CHARACTER}": "?", "\N{NO-BREAK SPACE}": " ", "\N{EM SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ",
}  # fmt: skip
_PICTOGRAMS: Final = range(0x2300, 0x2800), range(0x1F000, 0x20000)
"""What stands before a heading and says nothing that the heading does not."""


def printable(text: object) -> str:
    """The text with every invisible character as U+FFFD, except for spaces and new lines.

    Escape sequences set a terminal's title, clear its screen or answer in the user's name; marks of direction
    show a line as another one.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )


def in_one_line(text: object) -> str:
    """The text with a space for each run of spaces and new lines, for a sentence or a table's row."""
    return printable(" ".join(str(text).split()))


class Harmless:
    """Anything that rich renders, without what a terminal obeys or the stream's encoding lacks; colours stay.

    Rich has divided the lines before that. So characters without a width are left out: marks for them, as `printable`
    shows, would push the end of a line out of sight.
    """

    def __init__(self, renderable: "RenderableType") -> None:
        self._renderable = renderable

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Segment]":
        """Render it, and take out what must not reach the terminal."""
        from rich.segment import Segment

        for segment in console.render(self._renderable, options):
            text = segment.text if segment.control else in_encoding(_visible(segment.text), options.encoding)
            yield Segment(text, segment.style, segment.control)


def _visible(text: str) -> str:
    from rich.cells import cell_len

    return (
        text
        if text.isprintable()
        else printable("".join(char for char in text if char == "\n" or cell_len(char)))
    )


def never_failing(stream: Any) -> None:
    """Let a stream write plain marks for what its encoding lacks; one that cannot be set so stays as it is."""
    with suppress(AttributeError, OSError, ValueError):  # it is no text stream, or closed
        stream.reconfigure(errors=PLAIN)


def in_encoding(text: str, encoding: str) -> str:
    """The text with plain marks for what an encoding lacks."""
    try:
        return text if text.isascii() else text.encode(encoding, PLAIN).decode(encoding)
    except LookupError:  # no encoding that Python knows
        return text.encode("ascii", PLAIN).decode("ascii")


def _plain_marks(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    mark = _MARKS.get(char, "*" if any(ord(char) in places for places in _PICTOGRAMS) else None)
    if mark is not None:
        return mark, error.start + 1
    error.end = error.start + 1
    return codecs.backslashreplace_errors(error)


codecs.register_error(PLAIN, _plain_marks)
