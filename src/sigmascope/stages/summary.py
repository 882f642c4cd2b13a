"""Summaries in the terminal: sections of labelled rows, at most 80 columns wide.

Every stage's summary is made of these; an analysis that has no summary of its own is shown as it is. Foreign
text is never interpreted: no markup, no control character.

A dict read from a file may hold anything where a figure should be. What is unknown is a dash, with the reason
if there is one. The figures are those of `sigmascope.units`.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from rich.console import Console
from rich.text import Text

from sigmascope import units
from sigmascope.plain_text import in_encoding
from sigmascope.units import UNKNOWN

WIDTH = 80
_INDENT, _MOST_ROWS, _MOST_ITEMS, _DEEPEST = 3, 60, 12, 4
_LONGEST_TEXT = 400
_HARMLESS_FORMAT = frozenset("\u200c\u200d\ufe0e\ufe0f")
NO_ACCELERATOR = "no accelerator was found: GPU memory was not measured"
GOOD, NOTABLE, BAD = "green", "yellow", "red"
SEVERITIES = {"info": ("🔍", "cyan"), "warning": ("⚠️ ", NOTABLE)}
"""Mark and style of findings; all others are bad."""
_LAST_LINES = 6  # of a traceback
Facts = Mapping[str, Any]


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
    """Print sections under a title."""
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


def print_analysis(
    title: str,
    analysis: Mapping[str, Any] | None,
    sections: Callable[[Mapping[str, Any]], Iterable[Section]],
    console: Console | None = None,
) -> None:
    """Print an analysis as sections under a title, or one line if there is no analysis."""
    none = [Section("", "", [Row("❌ Error", "there is no analysis to show", BAD)])]
    print_summary(title, none if analysis is None else sections(analysis), console)


def print_line(console: Console, *parts: tuple[str, str], indent: int = 0) -> None:
    """Print texts with their styles in one line, folded at 80 columns; nothing in them is interpreted."""
    text = Text.assemble(*((in_encoding(part, console.encoding), style) for part, style in parts))
    width = min(WIDTH, console.width)
    lines = text.wrap(console, max(1, width - indent), overflow="fold")
    for line in lines:
        line.rstrip()  # Rich before 14.3 takes ⚠️ for one column, and filled such a line past the last
        line.pad_left(indent)
    console.print(
        Text("\n").join(lines), width=width, emoji=False, no_wrap=True, overflow="ignore", crop=False
    )


def as_it_is(analysis: Mapping[str, Any]) -> Iterator[Section]:
    """The sections of any analysis: one for its plain values, one for each dict in it."""
    plain = [Row(label_of(name), shown(value)) for name, value in analysis.items() if not _is_dict(value)]
    yield Section("📋", "OVERVIEW", plain)
    for name, value in analysis.items():
        if _is_dict(value) and name != "unavailable":
            rows = list(_nested_rows(value))
            if len(rows) > _MOST_ROWS:
                rows = [*rows[:_MOST_ROWS], Row("…", f"{len(rows) - _MOST_ROWS} more")]
            yield Section("📊", label_of(name).upper(), rows)


def _is_dict(value: object) -> bool:
    return isinstance(value, Mapping)


def _nested_rows(facts: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[Row]:
    for name, value in facts.items():
        label = f"{prefix}{label_of(name)}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            if name != "unavailable":
                yield from _nested_rows(value, f"{label} › ", depth + 1)
        else:
            yield Row(label, f"{len(value)} entries" if isinstance(value, Mapping) else shown(value))


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


def peak_rows(analysis: Facts) -> Iterator[Row]:
    """The peaks of an analysis of the process, the machine and each device, or why there are none."""
    peak = part(analysis, "peak_memory")
    if not peak:
        yield Row("Peaks", unknown(reason_for(analysis, "peak_memory")))
        return
    process, ram = part(peak, "process"), part(peak, "ram")
    yield Row("Process", f"{mb(process.get('peak_rss_mb'))} at {seconds(process.get('peak_rss_at_seconds'))}")
    yield Row("RAM", f"{mb(ram.get('peak_used_mb'))} at {seconds(ram.get('peak_used_at_seconds'))}")
    for device, gpu in part(peak, "gpus").items():
        for what in ("allocated", "reserved"):
            at = seconds(gpu.get(f"peak_{what}_at_seconds"))
            yield Row(f"{printable(device)} {what}", f"{mb(gpu.get(f'peak_{what}_mb'))} at {at}")


def memory_rows(analysis: Facts) -> Iterator[Row]:
    """RAM, the process and each device before and after, or why that is not known."""
    impact = part(analysis, "memory_impact")
    ram, process, gpus = part(impact, "ram"), part(impact, "process"), part(impact, "gpus")
    if not ram:
        yield Row("Memory", unknown(reason_for(analysis, "memory_impact")))
        return
    yield Row("RAM used", _before_and_after(ram, "used_mb", mb_change(ram.get("used_change_mb"))))
    available = mb(ram.get("current_available_mb"))
    yield Row("RAM available", f"{available}, {mb_change(ram.get('available_change_mb'))}")
    change = mb_change(process.get("rss_change_mb"), process.get("rss_change_pct"))
    yield Row("Process", _before_and_after(process, "rss_mb", change))
    if not gpus:
        yield Row("GPU", NO_ACCELERATOR)
    for device, gpu in gpus.items():
        for what in ("allocated", "reserved"):
            change = mb_change(gpu.get(f"{what}_change_mb"), gpu.get(f"{what}_change_pct"))
            yield Row(f"{printable(device)} {what}", _before_and_after(gpu, f"{what}_mb", change))


def _before_and_after(figures: Facts, name: str, change: str) -> str:
    return f"{mb(figures.get(f'baseline_{name}'))} → {mb(figures.get(f'current_{name}'))}, {change}"


def statistics_row(tensor: Facts) -> Row:
    """The values of a tensor, or why they are not known."""
    statistics = part(tensor, "statistics")
    if statistics.get("mean") is None:
        return Row("Statistics", unknown(reason_for(tensor, "mean")))
    values = (f"{name} {number(statistics.get(name))}" for name in ("min", "max", "mean", "std"))
    return Row("Statistics", ", ".join(values))


def check_row(label: str, check: Facts) -> Row:
    """Whether a check passed."""
    states: dict[Any, tuple[str, str]] = {True: ("passed", GOOD), False: ("FAILED", BAD)}
    return Row(label, *states.get(check.get("passed"), ("not checked", "")))


def finding_rows(findings: Iterable[Facts]) -> Iterator[Row]:
    """Severity, message and advice of each finding."""
    for finding in findings:
        severity = str(finding.get("severity", ""))
        mark, style = SEVERITIES.get(severity, ("❌", BAD))
        advice = f" {finding['advice']}" if finding.get("advice") else ""
        yield Row(
            f"{mark} {severity.capitalize()}", printable(f"{finding.get('message')}{advice}", 600), style
        )


def error_rows(analysis: Facts) -> Iterator[Row]:
    """What the watched code raised, with the last lines of its traceback."""
    if analysis.get("error"):
        yield Row("Error", printable(analysis["error"]), BAD)
    details = part(analysis, "exception_details")
    for line in str(details.get("traceback", "")).splitlines()[-_LAST_LINES:]:
        yield Row("  ", printable(line, 160))


def part(facts: Facts, name: str) -> Facts:
    """A dict inside a dict; empty where something else, or nothing, stands there."""
    held = facts.get(name)
    return held if isinstance(held, Mapping) else {}


def figure(facts: Facts, name: str, show: Callable[[Any], str]) -> str:
    """A figure of a dict as its unit is shown; a dash, with the reason that the dict gives, where it has none."""
    amount = facts.get(name)
    return show(amount) if is_number(amount) else unknown(reason_for(facts, name))


def mb(amount: object) -> str:
    """MiB; the text says MB."""
    return f"{units.mebibytes(amount)} MB" if is_number(amount) else UNKNOWN


def is_number(amount: object) -> TypeGuard[int | float]:
    """Whether it can be shown as a figure."""
    return isinstance(amount, int | float) and not isinstance(amount, bool)


def mb_change(amount: object, percent: object = None) -> str:
    """A signed change in MiB, with its percentage if that is known."""
    if not is_number(amount):
        return UNKNOWN
    share = f" ({units.signed(percent)} %)" if is_number(percent) else ""
    return f"{units.mebibytes_change(amount)} MB{share}"


def seconds(amount: object) -> str:
    """A duration with the unit that suits it."""
    return units.seconds(amount) if is_number(amount) else UNKNOWN


def number(amount: object) -> str:
    """A count in full, another number with four significant digits."""
    return units.number(amount) if is_number(amount) else UNKNOWN


def shape(sizes: object) -> str:
    """A shape as torch writes it."""
    if not isinstance(sizes, list | tuple):
        return UNKNOWN
    return "(" + ", ".join(map(str, sizes)) + ("," if len(sizes) == 1 else "") + ")"


def unknown(reason: str | None = None) -> str:
    """A dash, with the reason in parentheses."""
    return f"{UNKNOWN} ({printable(reason)})" if reason else UNKNOWN


def reason_for(facts: Mapping[str, object], name: str) -> str | None:
    """Why a figure is not there, from the `unavailable` of its dict."""
    reasons = facts.get("unavailable")
    reason = reasons.get(name) if isinstance(reasons, Mapping) else None
    return reason if isinstance(reason, str) else None


def printable(text: object, longest: int = _LONGEST_TEXT) -> str:
    r"""Foreign text for a terminal: on one line, cut, and whatever could act on the terminal as `\x1b`."""
    shown = str(text)
    rest = f"… ({len(shown):,} characters)" if len(shown) > longest else ""
    return "".join(map(_escaped, shown[:longest])) + rest


def _escaped(character: str) -> str:
    if character in _HARMLESS_FORMAT:
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character
