"""`sigmascope check`: have saved runs become slower or hungrier than earlier ones?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from sigmascope import units
from sigmascope.cli.lora.op_tables import plain, table
from sigmascope.cli.run_files import load_runs, path_argument
from sigmascope.errors import SigmascopeError

if TYPE_CHECKING:
    from sigmascope.analysis.compare_runs import FigureComparison
    from sigmascope.analysis.regression import RegressionCheck

EPILOG = """Examples:

sigmascope check today/*.json --baseline yesterday/*.json

sigmascope check today --baseline yesterday --max-slowdown 5% --json
"""
REGRESSED = 1
TROUBLE = 2
"""Exit code of every error, so that a script can tell it from a regression."""

_STYLE = {"regressed": "bold red", "higher": "yellow", "undecided": "yellow", "lower": "green"}


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
    exit code is 0 without a regression, 1 with one, 2 for an error.
    """
    from sigmascope.analysis.regression import check_regression
    from sigmascope.lora.ranking.sizes import parse_share

    try:
        found = check_regression(
            load_runs(runs),
            load_runs(baseline),
            max_slowdown=parse_share(max_slowdown, "--max_slowdown"),
            max_growth=parse_share(max_growth, "--max_growth"),
            alpha=alpha,
        )
    except SigmascopeError as error:
        error.exit_code = TROUBLE
        raise
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _print(Console(), found)
    if found.regressed:
        raise typer.Exit(REGRESSED)


def _print(console: Console, found: "RegressionCheck") -> None:
    made = table("Figure", "Before", "Now", "Ratio", "95 % interval", "Verdict", left=("Verdict",))
    for figure in found.figures:
        one = figure.comparison
        made.add_row(
            plain(one.name),
            _amount(one.baseline, one.unit),
            _amount(one.new, one.unit),
            "-" if one.ratio is None else f"{one.ratio:.3f}",
            _interval(one),
            Text(figure.verdict, style=_STYLE.get(figure.verdict, "")),
        )
    console.print(made)
    for name, reason in found.missing.items():
        console.print(Text.assemble(plain(name), f": {reason}", style="yellow"))
    for figure in found.figures:
        if figure.verdict in ("regressed", "undecided"):
            style = _STYLE[figure.verdict]
            console.print(
                Text.assemble((figure.verdict, style), " ", plain(figure.comparison.name), f": {figure.why}")
            )
    before, after = found.figures[0].comparison.runs if found.figures else (0, 0)
    count = len(found.regressed)
    outcome = f"{count} figures regressed" if count != 1 else "1 figure regressed"
    console.print(
        Text(f"{outcome} ({after} runs against {before}).", style="bold red" if count else "bold green")
    )


def _amount(value: float, unit: str) -> str:
    return units.seconds(value) if unit == "seconds" else f"{units.mib(round(value))} MB"


def _interval(one: "FigureComparison") -> str:
    return "-" if one.lower is None or one.upper is None else f"{one.lower:.3f}-{one.upper:.3f}"
