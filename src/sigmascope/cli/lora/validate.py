"""`sigmascope lora validate`: prove a LoRA against the models that it was made from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sigmascope.cli.lora.options import AsJson, BasePath, TunedPath, Verbose
from sigmascope.cli.lora.tables import print_validation
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import ConfigError, WriteError

EPILOG = (
    "Example: sigmascope lora validate --base_model_path base.safetensors "
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
