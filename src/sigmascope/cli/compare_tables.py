"""What `sigmascope compare` prints. Fits 80 columns."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope import units
from sigmascope.cli.lora.op_tables import plain, table

if TYPE_CHECKING:
    from sigmascope.analysis.compare_report import WorkComparison
    from sigmascope.analysis.compare_runs import FigureComparison
    from sigmascope.records.performance import BeforeAfterDict

_UNCHANGED = 0.0005


def print_comparisons(console: Console, found: "Sequence[WorkComparison]", missing: dict[str, str]) -> None:
    """Print each comparison, and what could not be compared."""
    for one in found:
        _print_comparison(console, one)
    for work, reason in missing.items():
        console.print(Text.assemble(plain(work or "other runs"), f": {reason}", style="yellow"))


def amount(value: float, unit: str) -> str:
    """Seconds or bytes as people read them."""
    return units.seconds(value) if unit == "seconds" else f"{units.mib(round(value))} MB"


def interval(one: "FigureComparison") -> str:
    """Of the ratio; a dash where it could not be reckoned."""
    return units.UNKNOWN if one.lower is None or one.upper is None else f"{one.lower:.3f}-{one.upper:.3f}"


def print_left_out(console: Console, figures: "Iterable[FigureComparison]") -> None:
    """Say of which figures some runs are left out, and why."""
    for one in figures:
        if "runs" in one.unavailable:
            console.print(Text.assemble(plain(one.name), f": {one.unavailable['runs']}", style="yellow"))


def _print_comparison(console: Console, one: "WorkComparison") -> None:
    if one.work:
        console.print(plain(one.work, style="bold underline"))
    if one.differences:
        console.print(_differences(one.differences))
    console.print(_figures("Figure", one.figures))
    if any(steps.lower is not None for steps in one.pooled_steps):
        before, now = one.runs
        console.print(_figures(f"Steps of {before} and {now} runs, pooled", one.pooled_steps))
    if one.steps:
        console.print(_figures("Step by step", one.steps))
    for name, reason in one.missing.items():
        console.print(Text.assemble(plain(name), f": {reason}", style="yellow"))
    print_left_out(console, one.figures)
    if one.before_after is not None:
        console.print(_in_words(one.before_after))
    before, now = one.runs
    console.print(Text(f"{now} {_runs(now)} against {before}.", style="dim"))


def _differences(differences: dict[str, tuple[str, str]]) -> Table:
    made = table("Set-up that differs", "Before", "Now", left=("Before", "Now"))
    for column in made.columns:
        column.no_wrap, column.overflow = False, "fold"
    for name, (before, now) in differences.items():
        made.add_row(plain(name), plain(before), plain(now))
    return made


def _figures(heading: str, figures: "Iterable[FigureComparison]") -> Table:
    made = table(heading, "Before", "Now", "Change", "Ratio", "95 % interval")
    for one in figures:
        made.add_row(
            plain(one.name),
            amount(one.baseline, one.unit),
            amount(one.new, one.unit),
            _change(one),
            units.UNKNOWN if one.ratio is None else f"{one.ratio:.3f}",
            interval(one),
        )
    return made


def _change(one: "FigureComparison") -> Text:
    """Coloured where the interval leaves no doubt about the direction."""
    if one.ratio is None:
        return Text(units.UNKNOWN)
    sure = one.lower is not None and one.upper is not None and not one.lower <= 1 <= one.upper
    style = "dim" if not sure else "green" if one.ratio < 1 else "red"
    text = "0.0 %" if abs(one.ratio - 1) < _UNCHANGED else f"{100 * (one.ratio - 1):+.1f} %"
    return Text(text, style=style)


def _in_words(found: "BeforeAfterDict") -> Text:
    """Such as "16.00 s → 2.40 s: 85.0 % less, 6.7x as fast; score 31.2 → 100.0; target missed → met"."""
    before, after, improvement = found["before"], found["after"], found["improvement"]
    parts = [f"{units.seconds(before['total_time'])} → {units.seconds(after['total_time'])}"]
    percent, factor = improvement["total_time_percent"], found["summary"]["improvement_factor"]
    if percent is not None and factor is not None:
        times = f"{factor:.1f}x as fast" if factor >= 1 else f"{1 / factor:.1f}x as long"
        parts[0] += f": {abs(percent):.1f} % {'less' if percent >= 0 else 'more'}, {times}"
    parts.append(f"score {_score(before['performance_score'])} → {_score(after['performance_score'])}")
    parts.append(f"target {_met(before['target_met'])} → {_met(after['target_met'])}")
    return Text.assemble(("Median generation ", "bold"), "; ".join(parts), ".")


def _score(score: float | None) -> str:
    return units.UNKNOWN if score is None else f"{score:.1f}"


def _met(met: bool | None) -> str:
    return "unknown" if met is None else "met" if met else "missed"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"
