"""`sigmascope compare`: two sets of saved runs beside each other, without a judgement."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sigmascope.cli.run_files import load_sides, path_argument

if TYPE_CHECKING:
    from sigmascope.analysis.compare_report import WorkComparison

EPILOG = """Examples:

sigmascope compare after.json --baseline before.json

sigmascope compare after --baseline before --by-step
"""


def compare(
    runs: Annotated[list[Path], path_argument("Runs: files written by Run.save, or folders of them.")],
    baseline: Annotated[
        list[Path],
        typer.Option("--baseline", help="Runs before the change; several may follow.", show_default=False),
    ],
    by_step: Annotated[
        bool, typer.Option("--by_step", help="Also each step by its number, the first among them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare runs with those before a change: times of stages and steps, and peaks of memory.

    The ratio is that of the medians, with its 95 % bootstrap interval where there
    are three runs on each side. What differs in machine, versions, pipeline and
    call is told first. Runs of a benchmark are compared case by case. For a
    verdict and an exit code use sigmascope check.
    """
    from sigmascope.analysis.compare_report import compare_work
    from sigmascope.analysis.work import require_pairs

    pairs, missing = require_pairs(*load_sides(runs, baseline), named=runs[0])
    found = tuple(compare_work(work, *sides, by_step=by_step) for work, sides in pairs.items())
    if as_json:
        typer.echo(json.dumps(_plain(found, missing), indent=2))
    else:
        from sigmascope.cli.compare_tables import print_comparisons

        print_comparisons(Console(), found, missing)


def _plain(found: "tuple[WorkComparison, ...]", missing: dict[str, str]) -> dict[str, Any]:
    return {"comparisons": [one.as_dict() for one in found], "missing": missing}
