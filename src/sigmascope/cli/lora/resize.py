"""`sigmascope lora resize`: another rank for a LoRA, without its models."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sigmascope.cli.console import progress_bar
from sigmascope.cli.lora.tables import print_reduction
from sigmascope.cli.options import (
    AsJson,
    DynamicMethod,
    DynamicParam,
    Exclude,
    Format,
    MaxConvRank,
    MaxError,
    MaxRank,
    MaxSize,
    MinRank,
    RankFlags,
    RankFor,
    RankMethod,
    ReducedConvRank,
    ReducedRank,
    SavePrecision,
    Verbose,
    WeightFor,
    rank_plan,
)
from sigmascope.errors import ConfigError

EPILOG = """Examples:

sigmascope lora resize big.safetensors small.safetensors --rank 16 --conv_rank 8

sigmascope lora resize big.safetensors small.safetensors --max_size 50MB
"""


def resize(
    lora: Annotated[Path, typer.Argument(metavar="IN", help="LoRA of any format.", show_default=False)],
    save_to: Annotated[
        Path, typer.Argument(metavar="OUT", help="LoRA to write, .safetensors.", show_default=False)
    ],
    rank: ReducedRank = None,
    conv_rank: ReducedConvRank = None,
    max_size: MaxSize = None,
    max_error: MaxError = None,
    weight_for: WeightFor = None,
    rank_method: RankMethod = None,
    dynamic_method: DynamicMethod = None,
    dynamic_param: DynamicParam = None,
    max_rank: MaxRank = None,
    max_conv_rank: MaxConvRank = None,
    min_rank: MinRank = None,
    rank_for: RankFor = None,
    exclude: Exclude = None,
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
    flags = RankFlags(
        rank=rank,
        conv_rank=conv_rank,
        max_size=max_size,
        max_error=max_error,
        weight_for=weight_for,
        rank_method=rank_method,
        dynamic_method=dynamic_method,
        dynamic_param=dynamic_param,
        max_rank=max_rank,
        max_conv_rank=max_conv_rank,
        min_rank=min_rank,
        rank_for=rank_for,
        exclude=exclude,
    )
    plan = rank_plan(flags)
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
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_reduction(Console(), "LoRA resize", report, verbose=verbose)
