"""`sigmascope check`: have saved runs become slower or hungrier than earlier ones?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from sigmascope.cli.compare import amount, interval, load_sides, path_argument, print_left_out
from sigmascope.cli.console import plain, table
from sigmascope.errors import SigmascopeError

if TYPE_CHECKING:
    from sigmascope.analysis.run_comparison import RegressionCheck

EPILOG = """Examples:

sigmascope check today/*.json --baseline yesterday/*.json

sigmascope check today --baseline yesterday --max_slowdown 5% --json
"""

REGRESSED = 1
TROUBLE = 2
"""Exit code of every error, so that a script can tell it from a regression."""

_VERDICT_STYLE = {"regressed": "bold red", "higher": "yellow", "undecided": "yellow", "lower": "green"}


def check(
    runs: Annotated[list[Path], path_argument("New runs: files written by Run.save, or folders of them.")],
    baseline: Annotated[
        list[Path],
        typer.Option(
            "--baseline", help="Earlier runs of the same work; several may follow.", show_default=False
        ),
    ],
    max_slowdown: Annotated[
        str, typer.Option("--max_slowdown", help="How much longer a time may be.", metavar="<share>")
    ] = "3%",
    max_growth: Annotated[
        str, typer.Option("--max_growth", help="How much higher a peak of memory may be.", metavar="<share>")
    ] = "3%",
    alpha: Annotated[
        float, typer.Option("--alpha", help="How likely a false alarm may be, of one figure.")
    ] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check runs against a baseline: times of stages and steps, and peaks of memory.

    A figure has regressed if it is higher beyond chance (Mann-Whitney) and by
    more than is allowed. Five runs on each side can show it; ten show 5 %. The
    exit code is 0 without a regression, 1 with one, 2 for an error. Runs of a
    benchmark are checked case by case.
    """
    from sigmascope.units import parse_share

    try:
        found, missing = _checked(
            runs,
            baseline,
            max_slowdown=parse_share(max_slowdown, "--max_slowdown"),
            max_growth=parse_share(max_growth, "--max_growth"),
            alpha=alpha,
        )
    except SigmascopeError as error:
        error.exit_code = TROUBLE
        raise
    if as_json:
        typer.echo(json.dumps(_plain(found, missing), indent=2))
    else:
        _print_all(Console(), found, missing)
    if any(one.check.regressed for one in found.values()):
        raise typer.Exit(REGRESSED)


def _checked(
    runs: list[Path], baseline: list[Path], *, max_slowdown: float, max_growth: float, alpha: float
) -> "tuple[dict[str, _Checked], dict[str, str]]":
    """Checks by the work that was done, and the work that one side lacks."""
    from sigmascope.analysis.run_comparison import check_regression, require_pairs, set_up_differences

    pairs, missing = require_pairs(*load_sides(runs, baseline), named=runs[0])
    found = {}
    for work, (new, old) in pairs.items():
        check = check_regression(new, old, max_slowdown=max_slowdown, max_growth=max_growth, alpha=alpha)
        found[work] = _Checked(check, set_up_differences(new, old))
    return found, missing


class _Checked(NamedTuple):
    """A check, and what of the set-up differs as (before, now)."""

    check: "RegressionCheck"
    differences: dict[str, tuple[str, str]]


def _plain(found: "dict[str, _Checked]", missing: dict[str, str]) -> dict[str, Any]:
    """One check as it is; those of several cases by name."""
    plainly = {
        work: {**one.check.as_dict(), "set_up_differences": one.differences} for work, one in found.items()
    }
    if list(found) == [""]:
        return {**plainly[""], "missing": {**plainly[""]["missing"], **missing}}
    return {
        "regressed": [f"{work}: {name}" for work, one in plainly.items() for name in one["regressed"]],
        "cases": plainly,
        "missing": missing,
    }


def _print_all(console: Console, found: "dict[str, _Checked]", missing: dict[str, str]) -> None:
    for work, one in found.items():
        if work:
            console.print(plain(work, style="bold underline"))
        if one.differences:
            changes = (f"{name} {before} → {now}" for name, (before, now) in one.differences.items())
            console.print(Text("The set-up differs: ", style="yellow").append_text(plain("; ".join(changes))))
        _print(console, one.check)
    for work, reason in missing.items():
        console.print(Text.assemble(plain(work or "other runs"), f": {reason}", style="yellow"))


def _print(console: Console, found: "RegressionCheck") -> None:
    made = table("Figure", "Before", "Now", "Ratio", "95 % interval", "Verdict", left=("Verdict",))
    for figure in found.figures:
        one = figure.comparison
        made.add_row(
            plain(one.name),
            amount(one.baseline, one.unit),
            amount(one.new, one.unit),
            "-" if one.ratio is None else f"{one.ratio:.3f}",
            interval(one),
            Text(figure.verdict, style=_VERDICT_STYLE.get(figure.verdict, "")),
        )
    console.print(made)
    for name, reason in found.missing.items():
        console.print(Text.assemble(plain(name), f": {reason}", style="yellow"))
    print_left_out(console, [figure.comparison for figure in found.figures])
    for figure in found.figures:
        if figure.verdict in ("regressed", "undecided"):
            style = _VERDICT_STYLE[figure.verdict]
            console.print(
                Text.assemble((figure.verdict, style), " ", plain(figure.comparison.name), f": {figure.why}")
            )
    sides = [figure.comparison.runs for figure in found.figures]  # some figures are without some of them
    before, after = (max(counts) for counts in zip(*sides, strict=True)) if sides else (0, 0)
    count = len(found.regressed)
    outcome = f"{count} figures regressed" if count != 1 else "1 figure regressed"
    console.print(
        Text(f"{outcome} ({after} runs against {before}).", style="bold red" if count else "bold green")
    )
