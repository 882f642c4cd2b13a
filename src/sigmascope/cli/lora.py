"""`sigmascope lora`: make a LoRA from two checkpoints, and prove it."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sigmascope.cli.extras import needs_extra
from sigmascope.cli.lora_tables import print_extraction, print_validation
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import CheckpointError, ConfigError, WriteError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make LoRAs from fine-tuned models and prove them.",
)


class Precision(StrEnum):
    """`--save_precision`."""

    FLOAT = "float"
    FP16 = "fp16"
    BF16 = "bf16"


class TargetCoverage(StrEnum):
    """`--target_coverage`."""

    FULL = "full"
    ATTENTION = "attention"
    EXTENDED = "extended"


BasePath = Annotated[
    Path,
    typer.Option(
        "--base_model_path",
        help="Checkpoint that the LoRA is put on.",
        show_default=False,
    ),
]
TunedPath = Annotated[
    Path,
    typer.Option("--tuned_model_path", help="Fine-tuned checkpoint.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every layer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")]


@app.command(
    epilog="Example: sigmascope lora extract --base_model_path base.safetensors "
    "--tuned_model_path tuned.safetensors --save_to my_lora.safetensors --rank 32 --conv_rank 16"
)
def extract(
    base_model_path: BasePath,
    tuned_model_path: TunedPath,
    save_to: Annotated[
        Path,
        typer.Option(
            "--save_to",
            help="LoRA to write, .safetensors. Replaced when there.",
            show_default=False,
        ),
    ],
    rank: Annotated[int, typer.Option("--rank", help="Rank of Linear layers. 9999: full rank.")] = 32,
    conv_rank: Annotated[
        int, typer.Option("--conv_rank", help="Rank of Conv2d layers. 9999: full rank.")
    ] = 16,
    save_precision: Annotated[
        Precision,
        typer.Option(
            "--save_precision",
            help="Storage of the factors. fp16 rounds 8 times finer than bf16 at the same size.",
        ),
    ] = Precision.FP16,
    min_diff: Annotated[
        float,
        typer.Option("--min_diff", help="Leave out layers whose largest change is below this."),
    ] = 0.0,
    target_coverage: Annotated[
        TargetCoverage,
        typer.Option(
            "--target_coverage",
            metavar="<name>",
            help="attention: attn1 and attn2. extended: also ff, proj_in, proj_out. full: all Linear and Conv2d.",
        ),
    ] = TargetCoverage.FULL,
    device: Annotated[
        str, typer.Option("--device", help="Where to decompose: auto, cpu, cuda, cuda:1.")
    ] = "auto",
    create_base_model: Annotated[
        bool,
        typer.Option(
            "--create_base_model",
            help="Make the base model from its backbone when it is missing.",
        ),
    ] = False,
    backbone_signature: Annotated[
        str | None,
        typer.Option(
            "--backbone_signature",
            help="With --create_base_model: diffusers folder or hub name to start from.",
        ),
    ] = None,
    config_path: Annotated[
        Path | None,
        typer.Option("--config_path", help="With --create_base_model: YAML of the model."),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Extract a LoRA from a fine-tuned model: base + LoRA ≈ tuned.

    Every Linear and Conv2d layer of the denoiser is compared and its change
    is decomposed (SVD) at the given rank. The errors shown are those of the
    factors as stored. A YAML file beside the LoRA describes the extraction.
    """
    _require_base(base_model_path, create=create_base_model, backbone=backbone_signature, config=config_path)
    from sigmascope.lora.extract import ExtractOptions, extract_lora

    options = ExtractOptions(
        rank=rank,
        conv_rank=conv_rank,
        save_precision=save_precision.value,
        min_diff=min_diff,
        target_coverage=target_coverage.value,
        device=device,
    )
    with progress_bar("Extracting") as progress:
        report = extract_lora(base_model_path, tuned_model_path, save_to, options, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_extraction(Console(), report, verbose=verbose)


@app.command(
    epilog="Example: sigmascope lora validate --base_model_path base.safetensors "
    "--tuned_model_path tuned.safetensors --lora_path my_lora.safetensors"
)
def validate(
    base_model_path: BasePath,
    tuned_model_path: TunedPath,
    lora_path: Annotated[Path, typer.Option("--lora_path", help="LoRA to prove.", show_default=False)],
    layer_names: Annotated[
        Path | None,
        typer.Option(
            "--layer_names",
            help="Where to list the LoRA's layers, for training.",
            show_default="lora_layer_names.txt beside the LoRA",
        ),
    ] = None,
    min_success_rate: Annotated[
        float,
        typer.Option(
            "--min_success_rate",
            help="Exit with 1 below this percentage.",
            min=0,
            max=100,
        ),
    ] = 100.0,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Measure how well base + LoRA reproduces the fine-tuned model.

    Bands of relative error: excellent below 5 %, good to 50 %, poor to 100 %,
    above that more noise than signal. The success rate is over all layers
    that changed and all modules of the LoRA; below --min_success_rate the
    exit code is 1. Lower it for a LoRA that leaves layers out on purpose.
    """
    from sigmascope.lora.validate import validate_lora

    names_path = _names_path(layer_names, lora_path, (base_model_path, tuned_model_path, lora_path))
    with progress_bar("Validating") as progress:
        report = validate_lora(base_model_path, tuned_model_path, lora_path, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.as_dict() | {"layer_names": str(names_path)}, indent=2))
    else:
        print_validation(Console(), report, verbose=verbose)
    _write_names(names_path, report.layer_names, required=layer_names is not None, quiet=as_json)
    if report.success_rate < min_success_rate:
        raise typer.Exit(1)


def _names_path(asked: Path | None, lora: Path, inputs: Sequence[Path]) -> Path:
    """Where the layer names go, refused before the work if it is no place for them.

    Raises:
        ConfigError: The LoRA is a folder, or the list would replace an input or is not named `.txt`.
    """
    from sigmascope.lora.paths import exists

    if exists(lora) and lora.is_dir():
        raise ConfigError(f"--lora_path {lora} is a folder.", hint="Name the LoRA's file in it.")
    path = asked or lora.parent / "lora_layer_names.txt"
    if path.suffix != ".txt":
        raise ConfigError(
            f"--layer_names {path} is not named as text.", hint="Give a name that ends in .txt."
        )
    for file in inputs:
        if exists(path) and exists(file) and path.samefile(file):
            raise ConfigError(
                f"--layer_names {path} is the input {file}.", hint="Give the name of a new text file."
            )
    return path


def _write_names(path: Path, names: Sequence[str], *, required: bool, quiet: bool) -> None:
    """Write the list after the report is shown: a place that nobody asked for may be read-only.

    Raises:
        WriteError: The place was asked for and cannot be written.
    """
    from sigmascope.lora.validate import write_layer_names

    try:
        write_layer_names(path, names)
    except WriteError as error:
        if required:
            raise
        typer.echo(f"Layer names are not written: {error.message} Use --layer_names.", err=True)
        return
    if not quiet:
        Console().print(f"Layer names: {path}", markup=False, highlight=False)


def _require_base(base: Path, *, create: bool, backbone: str | None, config: Path | None) -> None:
    """Make the base model when it is missing and that was asked for; otherwise refuse to start without one.

    Raises:
        ConfigError: An option of base creation that has no effect, or a backbone that cannot be had.
        CheckpointError: The base does not exist.
    """
    for flag, value in (("--backbone_signature", backbone), ("--config_path", config)):
        if value is not None and not create:
            raise ConfigError(
                f"{flag} {value} is for --create_base_model only.", hint="Add it, or leave both out."
            )
    from sigmascope.lora.paths import exists

    if exists(base):
        return
    if not create:
        raise CheckpointError(
            base,
            "there is no base model.",
            hint="Give the checkpoint that the fine-tuning started from, or add --create_base_model.",
        )
    with needs_extra("lbm"):
        from sigmascope.lbm.base import create_base
        from sigmascope.lbm.config import LbmConfig, load_config

    with progress_bar("Creating base") as progress:
        create_base(
            load_config(config) if config else LbmConfig(), base, backbone=backbone, progress=progress
        )
