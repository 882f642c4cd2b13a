"""`sigmascope lora resize`: another rank for a LoRA, without its models."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sigmascope.cli.console import print_json, progress_bar
from sigmascope.cli.lora.tables import print_reduction
from sigmascope.cli.options import AsJson, Format, ResizeFlags, SavePrecision, Verbose, option_groups
from sigmascope.errors import ConfigError

EPILOG = """Examples:

sigmascope lora resize big.safetensors small.safetensors --rank 16 --conv_rank 8

sigmascope lora resize big.safetensors small.safetensors --max_size 50MB
"""


@option_groups
def resize(
    *,
    lora: Annotated[Path, typer.Argument(metavar="IN", help="LoRA of any format.", show_default=False)],
    save_to: Annotated[
        Path, typer.Argument(metavar="OUT", help="LoRA to write, .safetensors.", show_default=False)
    ],
    ranks: ResizeFlags,
    save_precision: SavePrecision = None,
    lora_format: Format = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Give a LoRA another rank, without the models it was made from.

    Every layer becomes the nearest change of its new rank, and the errors
    shown are those of what is stored. Give a rank, a method by which each
    layer's singular values decide, or a size or error for the whole file.
    """
    plan = ranks.plan()
    if plan is None:
        raise ConfigError(
            "how much rank is not said.",
            hint="Give --rank 16, --rank_method energy:0.95, --max_size 50MB, or more.",
        )
    from sigmascope.lora.resize import resize_lora

    with progress_bar("Resizing") as progress:
        report = resize_lora(
            lora,
            save_to,
            plan,
            save_precision=None if save_precision is None else save_precision.value,
            format=None if lora_format is None else lora_format.value,
            progress=progress,
        )
    if as_json:
        print_json(report.as_dict())
    else:
        print_reduction(Console(), "LoRA resize", report, verbose=verbose)
