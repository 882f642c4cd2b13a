"""`sigmascope lora diff`: two LoRAs, module by module."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import (
    counts,
    facts,
    layer,
    listed,
    number,
    percent,
    plain,
    print_json,
    progress_bar,
    table,
    title,
)
from sigmascope.cli.options import AsJson
from sigmascope.errors import SigmascopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sigmascope.lora.compare import LoraComparison, LoraSummary, ModuleDifference

EPILOG = "Example: sigmascope lora diff trained.safetensors converted.safetensors"

_TROUBLE = 2
_VERDICT_STYLE = {"same": "green", "scaled": "yellow", "different": "bold red"}


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="LoRA file of any format.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="Relative difference of a module that counts as the same.", min=0.0),
    ] = 0.01,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every module.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two LoRAs: the same change, a scaled version of it, or another.

    What counts is the change that a LoRA makes, whatever its format, rank,
    alpha and precision; those are listed too. Exit code as of diff: 0 the
    same within the tolerance, 1 scaled or different, 2 trouble.
    """
    from sigmascope.lora.compare import compare_loras

    try:
        with progress_bar("Comparing") as progress:
            report = compare_loras(a, b, tolerance=tolerance, progress=progress)
    except SigmascopeError as error:
        error.exit_code = _TROUBLE  # 1 says that they differ
        raise
    if as_json:
        print_json(report.as_dict())
    else:
        print_comparison(Console(), report, verbose=verbose)
    if report.verdict != "same":
        raise typer.Exit(1)


def print_comparison(console: Console, report: "LoraComparison", *, verbose: bool) -> None:
    """Show both files, the verdict, what only one has, and the modules that differ most or all."""
    console.print(title("LoRA A", report.a.path))
    console.print(title("LoRA B", report.b.path))
    console.print(_sides(report.a, report.b))
    console.print(facts(_measures(report)))
    listed(console, "Only in A", report.only_a)
    listed(console, "Only in B", report.only_b)
    listed(console, "Known only beside a base model, so not compared", report.not_measured)
    shapes = [
        f"{module.name}: {module.a.shape} and {module.b.shape}"
        for module in report.modules
        if module.presence == "other_shape" and module.a is not None and module.b is not None
    ]
    listed(console, "For weights of different shape", shapes)
    shown = report.modules if verbose else report.most_different
    if shown and (verbose or report.verdict != "same"):
        console.print(_modules("Every module" if verbose else "Most different modules", shown))
    fields = [f"{field.name}: {_shown(field.a)} | {_shown(field.b)}" for field in report.metadata]
    listed(console, "Header fields that differ (A | B)", fields, style="cyan")


def _sides(a: "LoraSummary", b: "LoraSummary") -> Table:
    made = table("", "A", "B", left=("A", "B"))
    made.add_row("Format", plain(a.format), plain(b.format))
    made.add_row("Modules", str(a.modules), str(b.modules))
    made.add_row("Parameters", f"{a.parameters:,}", f"{b.parameters:,}")
    made.add_row("Ranks", counts(a.ranks, most=2), counts(b.ranks, most=2))
    made.add_row("Stored as", counts(a.dtypes, most=2), counts(b.dtypes, most=2))
    made.add_row("Strength ‖ΔW‖", number(a.norm), number(b.norm))
    return made


def _measures(report: "LoraComparison") -> "list[tuple[str, RenderableType | None]]":
    words = {
        "same": f"the same change (within {percent(report.tolerance)} in every module)",
        "scaled": f"a scaled version: B = {number(report.factor)} · A",
        "different": "different",
    }
    verdict = report.verdict
    return [
        ("Verdict", Text(words[verdict], style=_VERDICT_STYLE[verdict])),
        ("Cosine of the changes", number(report.cosine)),
        ("Difference ‖A-B‖/‖A‖", percent(report.relative_difference)),
    ]


def _modules(heading: str, modules: "Sequence[ModuleDifference]") -> Table:
    made = table("Module", "Ranks", "Differ", "Cosine", "Columns", "Rows")
    made.title, made.title_justify = heading, "left"
    for module in modules:
        made.add_row(
            layer(module.name),
            _ranks(module),
            percent(module.relative_difference)
            if module.presence == "both"
            else module.presence.replace("_", " "),
            number(module.cosine),
            number(module.column_overlap),
            number(module.row_overlap),
        )
    return made


def _ranks(module: "ModuleDifference") -> str:
    ranks = [
        str(side.rank) if side is not None and side.rank is not None else "-" for side in (module.a, module.b)
    ]
    return ranks[0] if ranks[0] == ranks[1] else " / ".join(ranks)


def _shown(value: str | None) -> str:
    return "-" if value is None else plain(value, limit=60).plain
