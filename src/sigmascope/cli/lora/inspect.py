"""`sigmascope lora inspect`: what is in a LoRA file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.table import Table

from sigmascope.cli.lora.inspect_model import OnModel, judge, print_on_model
from sigmascope.cli.lora.inspect_picture import check_picture, save_inspection_picture
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
from sigmascope.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sigmascope.lora.inspect import LoraInspection, ModuleStrength

EPILOG = "Example: sigmascope lora inspect my_lora.safetensors --model sdxl.safetensors --picture blocks.svg"


def inspect(
    lora: Annotated[Path, typer.Argument(help="LoRA file of any format.", show_default=False)],
    full_spectrum: Annotated[
        bool,
        typer.Option("--full_spectrum", help="Spectra of ranks above 512 too: a second or more a module."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every module; with --json all singular values.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Checkpoint, file or folder: which modules match it, and why others do not.",
            show_default=False,
        ),
    ] = None,
    relative_strength: Annotated[
        bool,
        typer.Option(
            "--relative_strength", help="With --model: ‖ΔW‖/‖W‖ too, which reads the changed weights."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Draw strength by block, as .svg or .png.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a LoRA holds: ranks, strength, spectra, damage, training data.

    Strength is ‖ΔW‖ at LoRA strength 1, from the factors alone: the model is
    not needed. The effective rank says how many directions a module really
    uses; far below its rank, the LoRA can be resized almost for nothing.

    With --model the exit code is 1 where a module matches no weight of it, or
    holds NaN or Inf. Only the model's header is read.
    """
    from sigmascope.lora.inspect import inspect_lora

    if relative_strength and model is None:
        raise ConfigError("--relative_strength has no model.", hint="Give the checkpoint with --model.")
    if picture is not None:
        check_picture(picture, lora, model)
    with progress_bar("Inspecting") as progress:
        report = inspect_lora(lora, full_spectrum=full_spectrum, progress=progress)
    found = None if model is None else judge(lora, model, relative=relative_strength)
    if picture is not None:
        save_inspection_picture(picture, report, found)
    if as_json:
        own = report.as_dict(spectra=verbose)
        typer.echo(json.dumps(own if found is None else own | {"model": found.as_dict()}, indent=2))
    else:
        _print(report, found, picture, verbose=verbose)
    if found is not None and not found.verdict.fits:
        raise typer.Exit(1)


def _print(report: "LoraInspection", found: OnModel | None, picture: Path | None, *, verbose: bool) -> None:
    console = Console()
    print_inspection(console, report, verbose=verbose)
    if found is not None:
        print_on_model(console, found, verbose=verbose)
    if picture is not None:
        console.print(title("Picture", picture))


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
