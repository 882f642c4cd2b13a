"""Series of runs made visible: in the terminal, as one HTML file, as Markdown; a series as a picture, a check as Markdown.

Each says how a figure stands and where it changed: when, from what to what, and what differs between the runs before and
after. `trend.html.jinja`, `trend.md.jinja` and `check.md.jinja` lay them out.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any, Final

from markupsafe import Markup
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sigmascope import svg
from sigmascope.__about__ import __version__
from sigmascope.analysis.run_comparison import RegressionCheck
from sigmascope.analysis.run_figures import Unit
from sigmascope.analysis.trend import FEWEST_BEFORE, FEWEST_NEW, Series, ToldChange
from sigmascope.analysis.what_changed import WhatChanged
from sigmascope.plain_text import in_one_line
from sigmascope.reports.html import template
from sigmascope.reports.markdown import as_text
from sigmascope.units import UNKNOWN, counted, first_few, format_size, percent_change, seconds

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_COLUMNS: Final = 60
_MOST_CHANGES: Final = 10
_MOST_CAUSES: Final = 3
_LONGEST_HEADLINE: Final = 800
_MOST_DOTS: Final = 600
_WIDTH, _HEIGHT, _EDGE = 960, 180, 12
_UP, _DOWN, _LEVEL, _DOT = "var(--bad)", "var(--good)", "var(--c1)", "var(--c0)"
NONE_CHANGED: Final = "no change point"


def amount(value: float, unit: Unit) -> str:
    """Seconds or bytes as people read them."""
    return seconds(value) if unit == "seconds" else format_size(round(value))


def title(series: Series) -> str:
    """Such as "Flux 1024×768, 4 steps, NVIDIA H200": what the runs have in common."""
    kind = series.kind
    name = str(kind.get("pipeline") or kind.get("work") or "runs").removesuffix("Pipeline")
    size = f" {kind['width']}×{kind['height']}" if kind.get("width") and kind.get("height") else ""
    parts = [
        f"{name}{size}",
        None if kind.get("steps") is None else counted(kind["steps"], "step"),
        None if kind.get("batch_size") in (None, 1) else f"batch of {kind['batch_size']}",
        None if kind.get("num_frames") in (None, 1) else counted(kind["num_frames"], "frame"),
        kind.get("model"),
        kind.get("hardware") or kind.get("device"),
    ]
    return in_one_line(", ".join(str(part) for part in parts if part is not None))


def change_in_words(series: Series, told: ToldChange) -> str:
    """Such as "10.0 s → 12.0 s (+20.4 %)"."""
    change = told.change
    share = "" if change.share is None else f" ({percent_change(change.share)})"
    return f"{amount(change.before, series.unit)} → {amount(change.after, series.unit)}{share}"


def causes_in_words(told: ToldChange) -> str:
    """What differs there; or why the two sides are not comparable."""
    if told.unavailable is not None:
        return f"not comparable: {told.unavailable}"
    if told.causes is None:
        return "not looked at"
    return in_one_line(first_few(told.causes, _MOST_CAUSES)) or "nothing in the recipe explains it"


def state_in_words(series: Series) -> str:
    """A sentence on the whole series."""
    count = len(series.runs)
    if count < FEWEST_BEFORE + FEWEST_NEW:
        more = counted(FEWEST_BEFORE + FEWEST_NEW - count, "more is needed", "more are needed")
        return f"{counted(count, 'run')}: too few to tell, {more}."
    certain = [told for told in series.changes if told.unavailable is None]
    level = UNKNOWN if series.trend.level is None else amount(series.trend.level, series.unit)
    if not certain:
        text = f"{level}, {NONE_CHANGED} in {counted(count, 'run')}"
    else:
        last = certain[-1]
        since = series.runs[last.change.at :]
        text = (
            f"{change_in_words(series, last)} since {day(last.started_at)}, {counted(len(since), 'run')} ago"
        )
    if series.trend.drift is not None:
        text += f"; from run to run it moved by {percent_change(series.trend.drift)} in all since then"
    return f"{text}."


def notes(series: Series) -> list[str]:
    """What one has to know to believe it."""
    said = []
    if series.left_out:
        said.append(f"{counted(series.left_out, 'run')} without a value left out")
    if series.wrong_clocks:
        said.append(
            f"{counted(series.wrong_clocks, 'run')} of a clock that was wrong: runs stand in the order in which they were kept"
        )
    if series.recipes > 1:
        said.append(f"{series.recipes} recipes; --by_recipe parts them")
    return said


def day(moment: str) -> str:
    """A moment in ISO 8601 in the user's time zone, to the minute."""
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")


def sparkline(series: Series, columns: int = _COLUMNS) -> Text:
    """A line of blocks, the lowest for the least; red from where it became worse, green where better.

    Several runs share a column where there are more of them, which shows their median.
    """
    values = series.values
    width = min(columns, len(values))
    parts = [
        values[len(values) * column // width : len(values) * (column + 1) // width] for column in range(width)
    ]
    shown = [median(part) for part in parts]
    least, most = min(shown), max(shown)
    marks = {told.change.at * width // len(values): told for told in series.changes}
    text, style = Text(), ""
    for column, value in enumerate(shown):
        if column in marks:
            told = marks[column]
            worse = told.change.after > told.change.before
            style = "yellow" if told.unavailable is not None else "red" if worse else "green"
        share = (value - least) / (most - least) if most > least else 0.0
        text.append(_BLOCKS[round(share * (len(_BLOCKS) - 1))], style=style)
    return text


def render_trends(all_series: Sequence[Series], *, most: int = _MOST_CHANGES) -> Group:
    """All series for the terminal, in 80 columns; each with its last change points."""
    return Group(*(part for series in all_series for part in _rendered(series, most)))


def _rendered(series: Series, most: int) -> Iterator[Any]:
    yield Text(title(series), style="bold", overflow="fold")
    yield Text(f"{series.figure}: {state_in_words(series)}", overflow="fold")
    if len(series.runs) > 1:
        least, greatest = min(series.values), max(series.values)
        yield Text.assemble(
            (f"{amount(least, series.unit)} ", "dim"),
            sparkline(series),
            (f" {amount(greatest, series.unit)}", "dim"),
        )
    if series.changes:
        yield _table(series, most)
    if len(series.changes) > most:
        yield Text(f"{len(series.changes) - most} earlier change points; --json has all", style="dim")
    for note in notes(series):
        yield Text(note, style="dim")
    yield Text("")


def _table(series: Series, most: int) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("Since", "Run", "Change"):
        made.add_column(heading, no_wrap=True)
    made.add_column("What differs there", overflow="fold")
    for told in series.changes[-most:]:
        worse = told.change.after > told.change.before
        style = "yellow" if told.unavailable is not None else "red" if worse else "green"
        made.add_row(
            day(told.started_at),
            Text(in_one_line(told.run)[:8]),
            Text(change_in_words(series, told), style=style),
            Text(causes_in_words(told), overflow="fold"),
        )
    return made


def trends_as_html(all_series: Sequence[Series]) -> str:
    """One page that any browser opens, without network."""
    views = [
        {
            "title": title(series),
            "figure": series.figure,
            "state": state_in_words(series),
            "picture": picture(series),
            "changes": list(_cells(series)),
            "notes": notes(series),
        }
        for series in all_series
    ]
    return template("trend.html.jinja").render(title="trend", series=views, version=__version__)


def trends_as_markdown(all_series: Sequence[Series]) -> str:
    """What to paste into an issue or a pull request: nothing in it is markup, nobody is mentioned."""
    views = [
        {
            "title": as_text(title(series)),
            "figure": as_text(series.figure),
            "state": as_text(state_in_words(series)),
            "changes": [tuple(map(as_text, cells)) for cells in _cells(series)],
        }
        for series in all_series
    ]
    return template("trend.md.jinja").render(series=views)


def _cells(series: Series) -> Iterator[tuple[str, str, str, str]]:
    for told in series.changes[-_MOST_CHANGES:]:
        yield day(told.started_at), told.run, change_in_words(series, told), causes_in_words(told)


def checks_as_markdown(
    checks: Mapping[str, tuple[RegressionCheck, WhatChanged]], missing: Mapping[str, str]
) -> str:
    """A check for a pull request: what regressed, what changed, and the figures, each work by itself."""
    views = [
        {
            "work": as_text(work),
            "outcome": check.outcome,
            "fails_more": changed.fails_more,
            "headline": as_text(changed.headline, _LONGEST_HEADLINE),
            "two_machines": as_text(changed.two_machines or ""),
            "recipe": [tuple(map(as_text, (name, *sides))) for name, sides in changed.recipe.items()],
            "figures": [
                (
                    as_text(figure.comparison.name),
                    amount(figure.comparison.baseline, figure.comparison.unit),
                    amount(figure.comparison.new, figure.comparison.unit),
                    figure.verdict,
                    as_text(figure.why),
                )
                for figure in check.figures
            ],
        }
        for work, (check, changed) in checks.items()
    ]
    left_out = [(as_text(work or "other runs"), as_text(why)) for work, why in missing.items()]
    return template("check.md.jinja").render(checks=views, missing=left_out)


def picture(series: Series) -> Markup:
    """The series as SVG for a page with the house's colours: a dot a run, a line for each level, a tip under the mouse.

    Of more than 600 runs some are left out, evenly; the levels are those of all. What the axes say stands around the SVG, which
    is small on a phone, and its letters would be too.
    """
    values, runs = series.values, series.runs
    most = float(max(values)) or 1.0
    across = max(len(values) - 1, 1)

    def x(index: int) -> float:
        return _EDGE + (_WIDTH - 2 * _EDGE) * index / across

    def y(value: float) -> float:
        return _HEIGHT - _EDGE - (_HEIGHT - 2 * _EDGE) * value / most

    shapes = [svg.line((_EDGE, y(0.0)), (_WIDTH - _EDGE, y(0.0)), "var(--line)")]
    stride = max(1, -(-len(values) // _MOST_DOTS))
    for index in range(0, len(values), stride):
        tip = f"{in_one_line(runs[index].id)[:8]}, {day(runs[index].started_at)}: {amount(values[index], series.unit)}"
        shapes.append(svg.dot(x(index), y(values[index]), 2.5, _DOT, tip))
    starts = [0, *(told.change.at for told in series.changes), len(values)]
    for start, end in pairwise(starts):
        level = y(median(values[start:end]))
        shapes.append(svg.line((x(start), level), (x(max(start, end - 1)), level), _LEVEL))
    for told in series.changes:
        worse = told.change.after > told.change.before
        place = x(told.change.at)
        shapes.append(svg.line((place, _EDGE), (place, y(0.0)), _UP if worse else _DOWN))
    about = svg.plain(f"{series.figure} of {counted(len(values), 'run')}: {state_in_words(series)}")
    days = [svg.plain(day(run.started_at)) for run in (runs[0], *runs[1:][-1:])]
    return Markup(
        f'<div><p class="axis fine"><span>from 0 to {svg.plain(amount(most, series.unit))}</span></p>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{about}" fill="var(--ink)" font-family="system-ui, sans-serif">'
        f"{''.join(shapes)}</svg>"
        f'<p class="axis fine"><span>{"</span><span>".join(days)}</span></p></div>'
    )
