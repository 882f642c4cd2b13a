"""Parts of the tables that `resize`, `merge`, `inspect` and `diff` print: 80 columns, no markup from files.

What a file says is shown as plain text: a name or header field with brackets in it must not become markup, and
control characters must not reach the terminal.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.printable import printable

_PADDING = (0, 1, 0, 0)
_LONGEST = 300  # characters of one value that are shown


def plain(value: object, *, limit: int = _LONGEST, style: str = "") -> Text:
    """Text of a file, on one line: control characters as U+FFFD, cut where a file makes it endless."""
    text = " ".join(str(value).split())
    clean = printable(text)
    shown = clean if len(clean) <= limit else f"{clean[: limit - 1]}…"
    return Text(shown, style=style, overflow="fold")


def title(what: str, name: object) -> Text:
    """The first line of a report."""
    return Text.assemble((f"{what}: ", "bold"), plain(name))


def layer(name: str) -> Text:
    """A module's name without what every name of a file begins with."""
    return plain(name.removeprefix("denoiser.").removeprefix("lora_unet_"))


def table(*headings: str, left: Sequence[str] = ()) -> Table:
    """A table whose columns are numbers, but for those named in `left`; the first folds."""
    made = Table(box=box.SIMPLE_HEAD, padding=_PADDING, pad_edge=False)
    for index, heading in enumerate(headings):
        if index == 0:
            made.add_column(heading, overflow="fold")
        else:
            made.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return made


def facts(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Labels and values; rows without a value are left out."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for label, value in rows:
        if value is not None:
            made.add_row(Text(label), Text(value) if isinstance(value, str) else value)
    return made


def listed(
    console: Console, heading: str, names: Sequence[str], *, style: str = "yellow", most: int = 10
) -> None:
    """Print a few names under a heading; nothing without any."""
    if not names:
        return
    console.print(Text(f"{heading}: {len(names)}", style=style))
    for name in names[:most]:
        console.print(Text("  ").append_text(plain(name)))
    if len(names) > most:
        console.print(Text(f"  and {len(names) - most} more; --json lists all"))


def counts(found: Mapping[Any, int], *, most: int = 6) -> str:
    """`64 (700), 32 (92)`: values with how often each comes, the most frequent where not all are shown."""
    items = list(found.items())
    if len(items) > most:
        items = sorted(items, key=lambda item: -item[1])[:most]
    shown = [f"{_short(value)} ({count})" for value, count in items]
    if len(found) > most:
        shown.append(f"{len(found) - most} more")
    return ", ".join(shown) or "-"


def number(value: float | None) -> str:
    """Three digits, `-` for none."""
    return "-" if value is None else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """A fraction in per cent; a small one as 4e-05 %, not as a nought that it is not."""
    if fraction is None:
        return "-"
    value = 100.0 * fraction
    if 0 < abs(value) < 0.001:
        return f"{value:.0e} %"
    return f"{value:.3f} %" if 0 < abs(value) < 1 else f"{value:.3g} %"


def span(ranks: tuple[int, int] | None) -> str:
    """`16` or `4-64`."""
    if ranks is None:
        return "-"
    return str(ranks[0]) if ranks[0] == ranks[1] else f"{ranks[0]}-{ranks[1]}"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
