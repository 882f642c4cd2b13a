"""`sigmascope lora inspect`: what is in a LoRA file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from sigmascope.cli.lora.op_tables import (
    counts,
    facts,
    layer,
    listed,
    number,
    percent,
    plain,
    span,
    table,
    title,
)
from sigmascope.cli.lora.options import AsJson
from sigmascope.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sigmascope.lora.inspect import LoraInspection, ModuleStrength

EPILOG = "Example: sigmascope lora inspect my_lora.safetensors --verbose"


def inspect(
    lora: Annotated[Path, typer.Argument(help="LoRA file of any format.", show_default=False)],
    full_spectrum: Annotated[
        bool,
        typer.Option("--full_spectrum", help="Spectra of ranks above 512 too: a second or more a module."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every module; with --json all singular values.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a LoRA holds: ranks, strength, spectra, damage, training data.

    Strength is ‖ΔW‖ at LoRA strength 1, from the factors alone: the model is
    not needed. The effective rank says how many directions a module really
    uses; far below its rank, the LoRA can be resized almost for nothing.
    """
    from sigmascope.lora.inspect import inspect_lora

    with progress_bar("Inspecting") as progress:
        report = inspect_lora(lora, full_spectrum=full_spectrum, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.as_dict(spectra=verbose), indent=2))
    else:
        print_inspection(Console(), report, verbose=verbose)


def print_inspection(console: Console, report: "LoraInspection", *, verbose: bool) -> None:
    """Show totals, blocks, the strongest modules or all, what is wrong, and what the header says."""
    console.print(title("LoRA", report.path.name))
    console.print(facts(_totals(report)))
    console.print(_blocks(report))
    shown = report.modules if verbose else report.strongest
    console.print(_modules("Every module" if verbose else f"Strongest {len(shown)} modules", shown))
    listed(console, "Modules with NaN or Inf", report.not_finite, style="bold red")
    listed(console, "Modules that do almost nothing", report.near_zero)
    dead = [f"{name}: {columns} of its columns" for name, columns in report.dead_columns.items()]
    listed(console, "Modules with columns that change nothing", dead)
    waiting = [module.name for module in report.modules if module.problem == "needs_base"]
    listed(console, "Measured only beside their base model", waiting, style="cyan")
    listed(console, "Keys that belong to no module", report.unused_keys)
    console.print(facts(_header(report)))


def _totals(report: "LoraInspection") -> "list[tuple[str, RenderableType | None]]":
    from sigmascope.lora.ranking.sizes import format_size

    kinds = dict(report.kinds)
    return [
        ("Format", plain(report.format)),
        ("Size", f"{format_size(report.file_bytes)}, {report.parameters:,} parameters"),
        ("Modules", counts(kinds)),
        ("Ranks", counts(report.ranks)),
        ("Scale alpha/rank", counts(report.scales)),
        ("Stored as", counts(report.dtypes)),
        ("Strength ‖ΔW‖", number(report.norm)),
    ]


def _blocks(report: "LoraInspection") -> Table:
    made = table("Block", "Modules", "Rank", "Effective", "Strength", "Share")
    for block in report.blocks:
        made.add_row(
            plain(block.name),
            str(block.modules),
            span(block.ranks),
            number(block.effective_rank),
            number(block.norm),
            percent(block.share),
        )
    return made


def _modules(heading: str, modules: "Sequence[ModuleStrength]") -> Table:
    made = table("Module", "Rank", "Effective", "Stable", "Strength")
    made.title, made.title_justify = heading, "left"
    for module in modules:
        made.add_row(
            layer(module.name),
            "-" if module.rank is None else str(module.rank),
            number(module.effective_rank),
            number(module.stable_rank),
            number(module.norm) if module.problem is None else plain(module.problem, style="red"),
        )
    return made


def _header(report: "LoraInspection") -> "list[tuple[str, RenderableType | None]]":
    """The header's own words. They are anybody's, so they are shown as plain text."""
    training = report.training
    rows: list[tuple[str, RenderableType | None]] = [
        (name.capitalize(), plain(value)) for name, value in training.training.items()
    ]
    if training.trigger_phrase is not None:
        rows.append(("Trigger phrase", plain(training.trigger_phrase)))
    if training.tags:
        rows.append(("Frequent tags", plain(", ".join(f"{tag} ({count})" for tag, count in training.tags))))
    for heading, fields in (("Modelspec", training.modelspec), ("Made by Sigmascope", training.provenance)):
        rows += [(f"{heading} {plain(name).plain}"[:40], plain(value)) for name, value in fields.items()]
    if training.others:
        rows.append(("Other fields", plain(", ".join(training.others))))
    return rows
