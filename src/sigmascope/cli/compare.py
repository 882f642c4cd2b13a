"""`sigmascope compare`: two sets of saved runs beside each other, without a judgement.

`sigmascope check` reads its runs with `load_sides` too.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from sigmascope import units
from sigmascope.cli.console import plain, print_json, table
from sigmascope.cli.options import AsJson
from sigmascope.errors import RecordError

if TYPE_CHECKING:
    from sigmascope.analysis.run_comparison import FigureComparison, WorkComparison
    from sigmascope.records.performance import BeforeAfterDict, ComparedGenerationDict
    from sigmascope.records.run import Run

EPILOG = """Examples:

sigmascope compare after.json --baseline before.json

sigmascope compare after --baseline before --by-step
"""

_UNCHANGED = 0.0005
"""Changes of a ratio below this are shown as none."""


def path_argument(help_text: str) -> Any:
    """An argument of runs, shown without a default."""
    return typer.Argument(help=help_text, show_default=False)


def compare(
    runs: Annotated[list[Path], path_argument("Runs: files written by Run.save, or folders of them.")],
    baseline: Annotated[
        list[Path],
        typer.Option("--baseline", help="Runs before the change; several may follow.", show_default=False),
    ],
    by_step: Annotated[
        bool, typer.Option("--by_step", help="Also each step by its number, the first among them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare runs with those before a change: times of stages and steps, and peaks of memory.

    The ratio is that of the medians, with its 95 % bootstrap interval where there
    are three runs on each side. What differs in machine, versions, pipeline and
    call is told first. Runs of a benchmark are compared case by case. For a
    verdict and an exit code use sigmascope check.
    """
    from sigmascope.analysis.run_comparison import compare_work, require_pairs

    pairs, missing = require_pairs(*load_sides(runs, baseline), named=runs[0])
    found = tuple(compare_work(work, *sides, by_step=by_step) for work, sides in pairs.items())
    if as_json:
        print_json(_plain(found, missing))
    else:
        print_comparisons(Console(), found, missing)


def _plain(found: "tuple[WorkComparison, ...]", missing: dict[str, str]) -> dict[str, Any]:
    return {"comparisons": [one.as_dict() for one in found], "missing": missing}


def load_sides(new: Sequence[Path], baseline: Sequence[Path]) -> "tuple[list[Run], list[Run]]":
    """The runs of both sides of a comparison.

    Raises:
        RecordError: As `load_runs`; and for a run that both sides have, which would be found the same as itself.
    """
    ours, theirs = load_runs(new), load_runs(baseline)
    ids = {run.id for run in theirs}
    twin = next((run for run in ours if run.id in ids and run in theirs), None)
    if twin is not None:
        message = f"the run {units.printable(twin.id)} is in the baseline too."
        raise RecordError(new[0], message, hint="Compare runs with earlier ones, not with themselves.")
    return ours, theirs


def load_runs(paths: Sequence[Path]) -> "list[Run]":
    """The runs in these files, and in the .json files of these folders, by name.

    Raises:
        RecordError: A path does not exist, a folder holds no .json, a file is no run or holds times that cannot be, or two
            files are the same run.
    """
    from sigmascope.records.run import impossible_times
    from sigmascope.records.serialization import load_run

    found = {path: load_run(path) for given in paths for path in _files(given)}  # each file once
    for path, run in found.items():
        for wrong in impossible_times(run):
            raise RecordError(path, f"is damaged: {wrong}.", hint="Leave it out, or record the run again.")
    _refuse_copies(found)
    return list(found.values())


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise RecordError(
            path, "holds no saved run.", hint="Name a folder of .json files written by Run.save."
        )
    return found


def _refuse_copies(runs: "dict[Path, Run]") -> None:
    """A run that counted twice would be taken for two that agree."""
    seen: dict[str, list[Path]] = {}
    for path, run in runs.items():
        known = seen.setdefault(run.id, [])
        twin = next((one for one in known if runs[one] == run), None)
        if twin is not None:
            raise RecordError(path, f"is the same run as {twin}.", hint="Give each run once.")
        known.append(path)


def print_comparisons(console: Console, found: "Sequence[WorkComparison]", missing: dict[str, str]) -> None:
    """Print each comparison, and what could not be compared."""
    for one in found:
        _print_comparison(console, one)
    for work, reason in missing.items():
        console.print(Text.assemble(plain(work or "other runs"), f": {reason}", style="yellow"))


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
    if any(one.folded):
        earlier = (
            "Steps and the median generation leave out earlier generations, folded: {:,} before, {:,} now."
        )
        console.print(Text(earlier.format(*one.folded), style="dim"))
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


def amount(value: float, unit: str) -> str:
    """Seconds or bytes as people read them."""
    return units.seconds(value) if unit == "seconds" else f"{units.mib(round(value))} MB"


def _change(one: "FigureComparison") -> Text:
    """Coloured where the interval leaves no doubt about the direction."""
    if one.ratio is None:
        return Text(units.UNKNOWN)
    sure = one.lower is not None and one.upper is not None and not one.lower <= 1 <= one.upper
    style = "dim" if not sure else "green" if one.ratio < 1 else "red"
    text = "0.0 %" if abs(one.ratio - 1) < _UNCHANGED else f"{100 * (one.ratio - 1):+.1f} %"
    return Text(text, style=style)


def interval(one: "FigureComparison") -> str:
    """Of the ratio; a dash where it could not be reckoned."""
    return units.UNKNOWN if one.lower is None or one.upper is None else f"{one.lower:.3f}-{one.upper:.3f}"


def print_left_out(console: Console, figures: "Iterable[FigureComparison]") -> None:
    """Say of which figures some runs are left out, and why."""
    for one in figures:
        if "runs" in one.unavailable:
            console.print(Text.assemble(plain(one.name), f": {one.unavailable['runs']}", style="yellow"))


def _in_words(found: "BeforeAfterDict") -> Text:
    """Such as "16.00 s → 2.40 s: 85.0 % less, 6.7x as fast; score 31.2 → 100.0; target missed → met"."""
    before, after, improvement = found["before"], found["after"], found["improvement"]
    parts = [f"{units.seconds(before['total_time'])} → {units.seconds(after['total_time'])}"]
    percent, factor = improvement["total_time_percent"], found["summary"]["improvement_factor"]
    if percent is not None and factor is not None:
        times = f"{factor:.1f}x as fast" if factor >= 1 else f"{1 / factor:.1f}x as long"
        parts[0] += f": {abs(percent):.1f} % {'less' if percent >= 0 else 'more'}, {times}"
    if not (before.get("target_assumed") and after.get("target_assumed")):
        parts.append(f"score {_score(before)} → {_score(after)}")
        parts.append(f"target {_met(before)} → {_met(after)}")
    return Text.assemble(("Median generation ", "bold"), "; ".join(parts), ".")


def _score(side: "ComparedGenerationDict") -> str:
    score = None if side.get("target_assumed") else side["performance_score"]
    return units.UNKNOWN if score is None else f"{score:.1f}"


def _met(side: "ComparedGenerationDict") -> str:
    met = side["target_met"]
    return "none" if side.get("target_assumed") else "unknown" if met is None else "met" if met else "missed"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


class ManyBaselines(TyperCommand):
    """A command whose `--baseline` takes all that follows it up to the next option, as a shell's `*.json` gives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values."""
        return super().parse_args(ctx, repeated(args, "--baseline"))


def repeated(args: Sequence[str], option: str) -> list[str]:
    """The arguments with `option a b` written as `option a option b`. What follows `--` stays as it is."""
    written: list[str] = []
    takes = False
    for index, arg in enumerate(args):
        if arg == "--":
            return written + list(args[index:])
        if arg == option:
            takes = True
        elif arg.startswith("-") and arg != "-":
            takes = False
            written.append(arg)
        elif takes:
            written += [option, arg]
        else:
            written.append(arg)
    return written + ([option] if takes and args[-1] == option else [])
