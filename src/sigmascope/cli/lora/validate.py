"""`sigmascope lora validate`: prove a LoRA against the models that it was made from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sigmascope.cli.lora import image_options as pictures
from sigmascope.cli.lora import pair_options as pairs
from sigmascope.cli.lora.image_tables import print_images
from sigmascope.cli.lora.options import AsJson, BasePath, TunedPath, Verbose
from sigmascope.cli.lora.tables import print_validation
from sigmascope.cli.progress import progress_bar
from sigmascope.errors import ConfigError, WriteError

if TYPE_CHECKING:
    from sigmascope.lora.validate import ValidationReport

EPILOG = """Examples:

sigmascope lora validate --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--lora_path my_lora.safetensors --picture errors.svg

sigmascope lora validate --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--lora_path my_lora.safetensors --images photos/
"""


def validate(
    base_model_path: BasePath,
    tuned_model_path: TunedPath,
    lora_path: Annotated[
        Path, typer.Option("--lora_path", help="LoRA to prove, of any format.", show_default=False)
    ],
    layer_names: Annotated[
        Path | None,
        typer.Option(
            "--layer_names",
            help="Where to list the LoRA's layers, for training.",
            show_default="lora_layer_names.txt beside the LoRA",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Draw the errors of layers and blocks into this .svg file."),
    ] = None,
    min_success_rate: Annotated[
        float,
        typer.Option("--min_success_rate", help="Exit with 1 below this percentage.", min=0, max=100),
    ] = 100.0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", help="Threads, a core each.", show_default="one for each core, up to 8", min=1
        ),
    ] = None,
    images: pictures.Images = None,
    config_path: pictures.ConfigPath = None,
    num_inference_steps: pictures.Steps = None,
    seed: pictures.Seed = None,
    resolution: pictures.Resolution = None,
    torch_dtype: pictures.TorchDtype = None,
    device: pictures.Device = None,
    parts: pairs.Parts = "denoiser",
    on_missing: pairs.OnMissing = pairs.Unfit.ERROR,
    on_shape_change: pairs.OnShapeChange = pairs.Unfit.ERROR,
    on_integer: pairs.OnInteger = pairs.Unfit.ERROR,
    on_mixed_dtypes: pairs.OnMixedDtypes = pairs.MixedDtypes.COMPARE,
    variant: pairs.Variant = None,
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

    inputs = (base_model_path, tuned_model_path, lora_path)
    names_path = _names_path(layer_names, lora_path, inputs)
    _check_picture(picture, (*inputs, names_path))
    models = {"base": base_model_path, "tuned": tuned_model_path}
    flags = pictures.ImageFlags(
        images, config_path, num_inference_steps, seed, resolution, torch_dtype, device
    )
    pictures.check_image_flags(flags, models)
    options = pairs.pair_options(parts, on_missing, on_shape_change, on_integer, on_mixed_dtypes, variant)
    with progress_bar("Validating") as progress:
        report = validate_lora(*inputs, options, workers=workers, progress=progress)
    seen = pictures.run_images(flags, models, lora_path)
    if as_json:
        extra = {"layer_names": str(names_path), "images": None if seen is None else seen.as_dict()}
        typer.echo(json.dumps(report.as_dict() | extra, indent=2))
    else:
        print_validation(Console(), report, verbose=verbose)
        if seen is not None:
            print_images(Console(), seen, verbose=verbose)
    _draw(picture, report, quiet=as_json)
    _write_names(names_path, report.layer_names, required=layer_names is not None, quiet=as_json)
    if report.success_rate < min_success_rate:
        raise typer.Exit(1)


def _check_picture(path: Path | None, others: Sequence[Path]) -> None:
    """Refuse a place that a picture cannot go to, before the work.

    Raises:
        ConfigError: It is not named `.svg`, or would replace something else.
        WriteError: Its folder does not exist.
    """
    if path is None:
        return
    from sigmascope.lora.paths import exists

    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--picture {path} is not named as SVG.", hint="Give a name that ends in .svg.")
    if not exists(path.parent):
        raise WriteError(path, "its folder does not exist.", hint=f"Create {path.parent}.")
    if exists(path) and any(exists(other) and path.samefile(other) for other in others):
        raise ConfigError(f"--picture {path} is an input.", hint="Give the name of a new file.")


def _draw(path: Path | None, report: "ValidationReport", *, quiet: bool) -> None:
    if path is None:
        return
    from sigmascope.lora.validation.validation_picture import save_validation_picture

    save_validation_picture(path, report)
    if not quiet:
        Console().print(f"Picture: {path}", markup=False, highlight=False)


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
