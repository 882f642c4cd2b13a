"""`sigmascope lora convert`: carry a LoRA to the format that another tool reads."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope.cli.lora.options import Precision
from sigmascope.cli.progress import progress_bar

if TYPE_CHECKING:
    from sigmascope.lora.convert import ConversionReport

EPILOG = """Examples:

sigmascope lora convert my_lora.safetensors my_lora_kohya.safetensors --format kohya

sigmascope lora convert civitai.safetensors for_diffusers.safetensors --format peft
"""

_MIB = 1024**2
_MOST_NAMES = 10
_NEXT = {
    "peft": "pipeline.load_lora_weights(...) in diffusers; on a model alone load_lora_adapter(..., prefix=...)",
    "kohya": "ComfyUI, Forge, sd-scripts; diffusers through pipeline.load_lora_weights(...)",
    "comfyui": "ComfyUI's LoRA loaders",
    "native": "sigmascope lora validate, merge, inspect; sigmascope lbm infer --lora_path",
}


class TargetFormat(StrEnum):
    """`--format`."""

    KOHYA = "kohya"
    PEFT = "peft"
    COMFYUI = "comfyui"
    NATIVE = "native"


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="LoRA to read, in any format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="LoRA to write, .safetensors. Replaced when there.")
    ],
    target_format: Annotated[
        TargetFormat,
        typer.Option(
            "--format",
            metavar="<name>",
            help="kohya: lora_unet_*, for ComfyUI, Forge and sd-scripts. peft: lora_A/lora_B, for diffusers. "
            "comfyui: diffusion_model.*. native: the model's own names, as LBM has them.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Model that the LoRA is for: tells what flattened names mean, and native names are its own.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help="Of the model, where the LoRA does not tell: lbm, sd15, sd2, sdxl, sd3, flux, wan, qwen_image.",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix",
            help="Before the denoiser's names in peft and native: unet, transformer, denoiser, or none.",
        ),
    ] = None,
    save_precision: Annotated[
        Precision | None,
        typer.Option("--save_precision", help="Storage of the factors; as they are when left out."),
    ] = None,
    drop_unsupported: Annotated[
        bool,
        typer.Option("--drop_unsupported", help="Leave out what the format cannot hold, and list it."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Convert a LoRA to the format of another tool.

    The change of every layer stays the same. Alpha becomes the rank, with the
    scale multiplied into the up factor, and the header keeps what is still true.
    """
    from sigmascope.lora.convert import convert_lora
    from sigmascope.lora.extraction.options import STORAGE_DTYPES

    with progress_bar("Converting") as progress:
        report = convert_lora(
            source,
            target,
            target_format.value,
            model=model,
            family=family,
            prefix="" if prefix == "none" else prefix,
            dtype=None if save_precision is None else STORAGE_DTYPES[save_precision.value],
            drop_unsupported=drop_unsupported,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(Console(), report)


def _print(console: Console, report: "ConversionReport") -> None:
    console.print(Text.assemble(("LoRA conversion: ", "bold"), report.source.name))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _facts(report):
        table.add_row(label, value)
    console.print(table)
    for left_out in report.left_out[:_MOST_NAMES]:
        console.print(Text(f"left out: {left_out.name} ({left_out.reason})", overflow="fold"))
    if len(report.left_out) > _MOST_NAMES:
        console.print(Text(f"and {len(report.left_out) - _MOST_NAMES} more; --json lists all"))
    size = f"{report.file_bytes / _MIB:.2f} MB"
    console.print(Text(f"Written: {report.target} ({size})", overflow="fold"))


def _facts(report: "ConversionReport") -> list[tuple[str, Text]]:
    facts = [
        ("Format", Text(f"{report.source_format} to {report.format}")),
        ("Model family", Text(report.family)),
        ("Modules", Text(str(report.modules))),
    ]
    if report.changes:
        facts.append(("Other changes", Text(str(report.changes))))
    if report.widened:
        facts.append(
            ("Widened to float32", Text(f"{len(report.widened)} (their scale would have rounded them)"))
        )
    if report.left_out:
        facts.append(("Left out", Text(str(len(report.left_out)), style="yellow")))
    facts.append(("For", Text(_NEXT[report.format])))
    return facts
