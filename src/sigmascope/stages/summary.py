"""Summaries in the terminal: sections of labelled rows, at most 80 columns wide.

Every stage's summary is made of these; an analysis that has no summary of its own is shown as it is.
Foreign text is never interpreted: no markup, no control character.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from sigmascope.stages.figures import number, printable
from sigmascope.units import UNKNOWN

WIDTH = 80
_INDENT, _MOST_ROWS, _MOST_ITEMS, _DEEPEST = 3, 60, 12, 4


class Row(NamedTuple):
    """A label and its value; `style` is rich's. The value must be printable already, and may be empty."""

    label: str
    value: str
    style: str = ""


class Section(NamedTuple):
    """A heading with an icon, and rows. Without a title the rows stand by themselves, not indented."""

    icon: str
    title: str
    rows: Sequence[Row]


def print_summary(title: str, sections: Iterable[Section], console: Console | None = None) -> None:
    """Print sections under a title.

    Args:
        title: In capitals by custom.
        sections: Those without rows are left out.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    target = console or Console()
    rule = ("=" * min(WIDTH, target.width), "dim")
    print_line(target, (f"🔍 {title}", "bold"))
    print_line(target, rule)
    for section in sections:
        if not section.rows:
            continue
        if section.title:
            target.print()
            print_line(target, (f"{section.icon} {section.title}:", "bold"))
        for row in section.rows:
            label = f"{row.label}: " if row.value else f"{row.label}:"
            indent = _INDENT if section.title else 0
            print_line(target, (label, ""), (row.value, row.style), indent=indent)
    print_line(target, rule)


def print_line(console: Console, *parts: tuple[str, str], indent: int = 0) -> None:
    """Print texts with their styles in one line, folded at 80 columns; nothing in them is interpreted."""
    text = Text.assemble(*((_encodable(part, console.encoding), style) for part, style in parts))
    text.overflow = "fold"
    padded = Padding(text, (0, 0, 0, indent), expand=False)
    console.print(padded, width=min(WIDTH, console.width), emoji=False)


def _encodable(text: str, encoding: str) -> str:
    """What the terminal's encoding lacks, as an escape, rather than an error in the host."""
    if encoding.lower().replace("-", "").startswith("utf"):
        return text
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode("ascii")


def as_it_is(analysis: Mapping[str, Any]) -> Iterator[Section]:
    """The sections of any analysis: one for its plain values, one for each dict in it."""
    plain = [Row(label_of(name), shown(value)) for name, value in analysis.items() if not _is_dict(value)]
    yield Section("📋", "OVERVIEW", plain)
    for name, value in analysis.items():
        if _is_dict(value) and name != "unavailable":
            rows = list(_rows(value))
            if len(rows) > _MOST_ROWS:
                rows = [*rows[:_MOST_ROWS], Row("…", f"{len(rows) - _MOST_ROWS} more")]
            yield Section("📊", label_of(name).upper(), rows)


def label_of(name: object) -> str:
    """A key as a label: `total_pixels` becomes `Total pixels`."""
    text = printable(name, 60).replace("_", " ").strip()
    return text[:1].upper() + text[1:]


def shown(value: object) -> str:
    """A value in one line."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple):
        rest = f", … ({len(value)} in all)" if len(value) > _MOST_ITEMS else ""
        if any(_is_dict(item) for item in value):
            return f"{len(value)} entries"
        return ", ".join(shown(item) for item in value[:_MOST_ITEMS]) + rest or "none"
    return printable(value, 200)


def _is_dict(value: object) -> bool:
    return isinstance(value, Mapping)


def _rows(facts: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[Row]:
    for name, value in facts.items():
        label = f"{prefix}{label_of(name)}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            if name != "unavailable":
                yield from _rows(value, f"{label} › ", depth + 1)
        else:
            yield Row(label, f"{len(value)} entries" if isinstance(value, Mapping) else shown(value))
