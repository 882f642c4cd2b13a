"""What a record says, shown without what it could make the terminal do."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from sigmascope.printable import printable


class Harmless:
    """Anything that rich renders, without the characters that a terminal obeys; colours stay.

    Lines are divided before that. So what has no width is left out, where `printable` would show a mark for it and push
    the end of a line out of sight.

    Args:
        renderable: What to render.
    """

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Render it, and take out what must not reach the terminal."""
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else Segment(_seen(segment.text), segment.style)


def _seen(text: str) -> str:
    return (
        text
        if text.isprintable()
        else printable("".join(char for char in text if char == "\n" or cell_len(char)))
    )
