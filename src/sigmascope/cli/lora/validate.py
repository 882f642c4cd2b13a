"""`sigmascope lora validate`: prove a LoRA against the models that it was made from.

With `--images`, the models also translate a folder of pictures: `check_image_flags` refuses bad flags before the
weights are measured, `run_images` translates, and `print_images` shows how far apart the results are.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import (
    Console,
    check_picture,
    facts,
    findings,
    needs_extra,
    percent,
    plain,
    print_json,
    progress_bar,
    say,
    span,
    table,
    title,
)
from sigmascope.cli.options import AsJson, PairFlags, Verbose, found_model, option_groups
from sigmascope.errors import ConfigError, WriteError
from sigmascope.units import counted, printable

if TYPE_CHECKING:
    from sigmascope.lbm.image_validation import ImageReport, OutputError
    from sigmascope.lora.validate import Band, BlockError, ModuleError, ValidationReport

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora validate my_lora.safetensors

sigmascope lora validate --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--lora_path my_lora.safetensors --picture errors.svg

sigmascope lora validate --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--lora_path my_lora.safetensors --images photos/
"""

_BAND_STYLE = {"excellent": "green", "good": "cyan", "poor": "yellow", "noise": "bold red"}
_MOST_FAILURES = 10
_IMAGES_PANEL = "On pictures (LBM only)"

_MOST_PICTURES_SHOWN = 5
"""How many pictures are listed without --verbose, those with the largest error first."""


def _image_option(name: str, help_text: str, default: str | bool = True, **more: Any) -> Any:
    return typer.Option(name, help=help_text, show_default=default, rich_help_panel=_IMAGES_PANEL, **more)


def _model_option(name: str, help_text: str) -> Any:
    return typer.Option(name, help=help_text, show_default="as <LORA>_config.yaml says", callback=found_model)


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """Flags of the pictures to translate, as typed; None for a flag that was not given."""

    images: Annotated[
        Path | None,
        _image_option(
            "--images",
            "Also translate the pictures in this folder with base, base + LoRA and tuned model, and compare them.",
            metavar="<folder>",
        ),
    ] = None
    config_path: Annotated[
        Path | None, _image_option("--config_path", "The models' YAML.", "beside each model")
    ] = None
    num_inference_steps: Annotated[
        int | None, _image_option("--num_inference_steps", "Steps along the bridge.", "1")
    ] = None
    seed: Annotated[
        int | None, _image_option("--seed", "Seed of the noise, the same for all models.", "0")
    ] = None
    resolution: Annotated[
        int | None, _image_option("--resolution", "Side of the square working size.", "the config's")
    ] = None
    torch_dtype: Annotated[
        str | None, _image_option("--torch_dtype", "Dtype of the models: float32, bf16, fp16.", "float32")
    ] = None
    device: Annotated[
        str | None, _image_option("--device", "Where the models run: auto, cpu, cuda.", "auto")
    ] = None


@app.command("validate", no_args_is_help=True, epilog=EPILOG)
@option_groups
def validate(
    *,
    lora: Annotated[
        Path | None,
        typer.Argument(
            metavar="LORA", help="The LoRA to validate, in any format, or its hub name.", show_default=False
        ),
    ] = None,
    base_model_path: Annotated[
        Path | None,
        _model_option("--base_model_path", "The base model: the checkpoint that the LoRA is for."),
    ] = None,
    tuned_model_path: Annotated[
        Path | None, _model_option("--tuned_model_path", "The fine-tuned checkpoint.")
    ] = None,
    lora_path: Annotated[
        Path | None, typer.Option("--lora_path", help="The LoRA, instead of LORA.", show_default=False)
    ] = None,
    layer_names: Annotated[
        Path | None,
        typer.Option(
            "--layer_names",
            help="Text file for the names of the LoRA's layers, for training.",
            show_default="lora_layer_names.txt beside the LoRA",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Draw the errors of layers and blocks in this .svg or .png file."),
    ] = None,
    min_success_rate: Annotated[
        float,
        typer.Option("--min_success_rate", help="Exit with 1 below this percentage.", min=0, max=100),
    ] = 100.0,
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="CPU threads.", show_default="one for each core, up to 8", min=1),
    ] = None,
    images: ImageFlags,
    pairing: PairFlags,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Measure how well base + LoRA reproduces the fine-tuned model.

    Bands of relative error: excellent below 5 %, good to 50 %, poor to 100 %,
    and noise above. The success rate counts all layers that changed and all
    modules of the LoRA. Below --min_success_rate the exit code is 1, and neither
    the list of layers nor the picture is written. Lower it for a LoRA that
    leaves layers out on purpose.

    The YAML that lora extract writes beside a LoRA names both models, so that
    the LoRA alone is enough.
    """
    from sigmascope.lora.sidecar import find_sidecar, models_of
    from sigmascope.lora.validate import validate_lora

    made = _the_lora(lora, lora_path)
    base, tuned = models_of(made, base_model_path, tuned_model_path)
    named = [f"base {base}"] * (base_model_path is None) + [f"tuned {tuned}"] * (tuned_model_path is None)
    if named:
        say(f"As {find_sidecar(made).name} says: {', '.join(named)}", err=True)
    inputs = (base, tuned, made)
    names_path = _names_path(layer_names, made, inputs)
    uses = {**dict.fromkeys(inputs, "is an input"), names_path: "is where the layer names go"}
    check_picture(picture, uses)
    models = {"base": base, "tuned": tuned}
    check_image_flags(images, models)
    options = pairing.options()
    with progress_bar("Validating") as progress:
        report = validate_lora(*inputs, options, workers=workers, progress=progress)
    seen = run_images(images, models, made)
    passed = report.success_rate >= min_success_rate
    lists_names = passed and bool(report.layer_names)
    if as_json:
        extra = {
            "layer_names": str(names_path) if lists_names else None,
            "images": None if seen is None else seen.as_dict(),
        }
        print_json(report.as_dict() | extra)
    else:
        print_validation(Console(), report, verbose=verbose)
        if seen is not None:
            print_images(Console(), seen, verbose=verbose)
    if passed:
        _draw(picture, report, quiet=as_json)
    elif picture is not None:
        say(f"The picture {picture} was not drawn, because the success rate is too low.", err=True)
    if lists_names:
        _write_names(names_path, report.layer_names, required=layer_names is not None, quiet=as_json)
    else:
        reason = "the LoRA changes no layer" if passed else "the success rate is too low"
        say(f"Layer names were not written to {names_path}: {reason}.", err=True)
    if not passed:
        raise typer.Exit(1)


def _the_lora(argument: Path | None, option: Path | None) -> Path:
    """The LoRA, given in one of two ways.

    Raises:
        ConfigError: It is given in both or in neither, or is a folder.
    """
    lora = argument or option
    if lora is None or (argument is not None and option is not None):
        given = "no LoRA" if lora is None else f"two LoRAs, {argument} and {option}"
        raise ConfigError(
            f"lora validate got {given}.", hint="For example: sigmascope lora validate my_lora.safetensors"
        )
    from sigmascope.checkpoints.checkpoint import is_folder
    from sigmascope.lora.sidecar import lora_file

    file = lora_file(lora)
    if is_folder(file):
        raise ConfigError(f"The LoRA {lora} is a folder.", hint="Name the LoRA's file in it.")
    return file


def _names_path(asked: Path | None, lora: Path, inputs: Sequence[Path]) -> Path:
    """The file for the layer names; a bad one is refused before the work begins.

    Raises:
        ConfigError: The list would replace an input or is not named `.txt`.
    """
    from sigmascope.checkpoints.checkpoint import is_same_file
    from sigmascope.checkpoints.hub import rest_command

    # The hub's cache is not ours to write to.
    path = asked or Path("" if rest_command(lora.absolute()) else lora.parent, "lora_layer_names.txt")
    if path.suffix != ".txt":
        raise ConfigError(f"--layer_names {path} is not a .txt file.", hint="Give a name that ends in .txt.")
    for file in inputs:
        if is_same_file(path, file):
            raise ConfigError(
                f"--layer_names {path} would replace the input {file}.",
                hint="Give the name of a new text file.",
            )
    return path


def check_image_flags(flags: ImageFlags, models: Mapping[str, Path]) -> None:
    """Refuse flags that cannot work, before the weights are measured.

    Args:
        flags: As given.
        models: The base and the tuned model.

    Raises:
        ConfigError: Flags without --images, values that make no sense, no picture in the folder, a model that
            needs more than pictures, or the extra is not installed.
    """
    if flags.images is None:
        lonely = [name for name, value in asdict(flags).items() if value is not None]
        if lonely:
            raise ConfigError(
                f"--{lonely[0]} is for --images only.", hint="Add --images FOLDER, or leave it out."
            )
        return
    with needs_extra("lbm"):
        from sigmascope.lbm.bridge import bridge_sigmas
        from sigmascope.lbm.devices import resolve_device, resolve_dtype
        from sigmascope.lbm.image_validation import require_source_only
        from sigmascope.lbm.images import check_resolution, find_images
        from sigmascope.lbm.infer import SEEDS
    bridge_sigmas(1 if flags.num_inference_steps is None else flags.num_inference_steps)
    check_resolution(flags.resolution, "bucket")
    if flags.seed is not None and not 0 <= flags.seed < SEEDS:
        raise ConfigError(f"--seed: expected 0 to {SEEDS - 1}, got {flags.seed}.", hint="Leave it out for 0.")
    resolve_dtype(flags.torch_dtype or "float32")
    resolve_device(flags.device or "auto")
    require_source_only(tuple(models.values()), flags.config_path)
    find_images(flags.images)


def run_images(flags: ImageFlags, models: Mapping[str, Path], lora: Path) -> "ImageReport | None":
    """Compare the models on the folder's pictures, if there is one.

    Args:
        flags: As given.
        models: `base` and `tuned`.
        lora: The LoRA.
    """
    if flags.images is None:
        return None
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device, resolve_dtype
        from sigmascope.lbm.image_validation import ImageOptions, validate_images
    options = ImageOptions(
        num_inference_steps=1 if flags.num_inference_steps is None else flags.num_inference_steps,
        seed=0 if flags.seed is None else flags.seed,
        resolution=flags.resolution,
        dtype=resolve_dtype(flags.torch_dtype or "float32"),
        device=resolve_device(flags.device or "auto"),
    )
    with progress_bar("Translating") as progress:
        return validate_images(
            models["base"],
            models["tuned"],
            lora,
            flags.images,
            options,
            config=flags.config_path,
            progress=progress,
        )


def print_validation(console: Console, report: "ValidationReport", *, verbose: bool) -> None:
    """Show how well a LoRA reproduces the tuned model: fidelity, applied modules, blocks, bands, worst layers."""
    said_first = [finding for finding in report.findings if finding.id == "lora.other_model"]
    console.print(title("LoRA validation", report.lora.name))
    console.print(facts(_headline(report)))
    console.print(findings(said_first))
    console.print(block_table(report.blocks, "Applied"))
    console.print(
        module_table("Every layer", report.modules) if verbose else module_table("Worst layers", report.worst)
    )
    console.print(facts(_validation_facts(report)))
    if verbose or not said_first:
        console.print(_failures(report.failures))
    console.print(findings([finding for finding in report.findings if finding not in said_first]))


def _headline(report: "ValidationReport") -> list[tuple[str, RenderableType]]:
    """Two figures: how close the tuned model is reached, and how much of the LoRA could be applied."""
    fidelity = "-" if report.fidelity is None else f"{report.fidelity:.1f} %"
    applied = f"{report.success_rate:.1f} % ({report.applied} of {counted(len(report.modules), 'module')})"
    return [
        ("Fidelity", Text.assemble(fidelity, " of the change  ", _band(report.band))),
        ("Applied", Text(applied, style="green" if not report.failures else "bold red")),
    ]


def _validation_facts(report: "ValidationReport") -> list[tuple[str, RenderableType]]:
    counts = Text("  ").join(
        Text(f"{band} {count}", style=_BAND_STYLE[band] if count else "dim")
        for band, count in report.bands.items()
    )
    overall = Text.assemble(percent(report.relative_error), "  ", _band(report.band))
    return [
        ("Error, overall", overall),
        ("Error, average", percent(report.average_error)),
        ("Layers by band", counts),
        ("Unchanged layers", f"{report.unchanged_layers} (they need no module)"),
        ("Time", f"{report.seconds:.1f} s"),
    ]


def _failures(failures: Sequence["ModuleError"]) -> Group:
    lines = [
        Text.assemble(
            f"{failure.status.replace('_', ' ')}: ",
            plain(failure.name),
            f" ({failure.detail})" if failure.detail else "",
        )
        for failure in failures[:_MOST_FAILURES]
    ]
    if len(failures) > _MOST_FAILURES:
        lines.append(Text(f"and {len(failures) - _MOST_FAILURES} more; --json lists all"))
    return Group(*lines)


def block_table(blocks: Sequence["BlockError"], applied: str) -> Table:
    """Ranks and errors by block; `applied` is the heading of the column that counts modules."""
    made = table("Block", applied, "Rank", "Change", "Error", "Mean", "Worst", "Band", left=("Band",))
    for block in blocks:
        complete = block.applied == block.modules
        made.add_row(
            Text(block.name),
            Text(f"{block.applied}/{block.modules}", style="" if complete else "bold red"),
            span(block.ranks),
            f"{block.delta_norm:.3g}",
            percent(block.relative_error),
            percent(block.average_error),
            percent(block.largest_error),
            _band(block.band),
        )
    return made


def _band(band: "Band | None") -> Text:
    return Text(band or "-", style=_BAND_STYLE.get(band or "", ""))


def module_table(heading: str, modules: Sequence["ModuleError"]) -> Table:
    """The error of each layer."""
    made = table("Layer", "Rank", "Error", title=heading)
    for module in modules:
        error = percent(module.relative_error) if module.status == "applied" else module.status
        rank = "-" if module.rank is None else str(module.rank)
        style = _BAND_STYLE.get(module.band or "", "")
        made.add_row(Text(module.name.removeprefix("denoiser.")), rank, Text(error, style=style))
    return made


def print_images(console: Console, report: "ImageReport", *, verbose: bool) -> None:
    """Show how far base and base + LoRA are from the tuned model's pictures."""
    farthest = sorted(report.pictures, key=lambda picture: picture.with_lora.psnr)
    shown = report.pictures if verbose else farthest[:_MOST_PICTURES_SHOWN]
    overall = [(f"all {len(report.pictures)}", report.overall)] if len(report.pictures) > 1 else []
    rows: Iterator[tuple[Text | str, ...]] = (
        (Text(label), model, *_cells(error))
        for name, picture in (*((picture.picture, picture) for picture in shown), *overall)
        for label, model, error in ((name, "base", picture.base), ("", "base + LoRA", picture.with_lora))
    )
    heading = "Against the tuned model's pictures"
    lpips = () if report.overall.with_lora.lpips is None else ("LPIPS",)
    console.print(
        table(
            "Picture",
            "Model",
            "PSNR",
            "SSIM",
            *lpips,
            "Image",
            "Latent",
            left=("Model",),
            title=heading,
            rows=rows,
        )
    )
    left = report.overall.remaining
    if left is not None:
        console.print(Text(f"The LoRA leaves {percent(left)} of the way from base to tuned latents."))
    if len(shown) < len(report.pictures):
        console.print(
            Text(
                f"and {counted(len(report.pictures) - _MOST_PICTURES_SHOWN, 'more picture')}; --verbose or --json lists all"
            )
        )
    for file in report.unreadable:
        console.print(Text(f"unreadable: {file.file} ({file.reason})", overflow="fold"))
    if report.not_applied:
        console.print(
            Text(
                f"{counted(len(report.not_applied), 'module fits', 'modules fit')} no layer of the model, and had no effect."
            )
        )


def likeness_cells(error: "OutputError") -> tuple[str, ...]:
    """PSNR, SSIM, and LPIPS where it was measured."""
    psnr = f"{error.psnr:.1f} dB" if math.isfinite(error.psnr) else "identical"
    return psnr, f"{error.ssim:.3f}", *(() if error.lpips is None else (f"{error.lpips:.3f}",))


def _cells(error: "OutputError") -> tuple[str, ...]:
    return *likeness_cells(error), percent(error.image_error), percent(error.latent_error)


def _draw(path: Path | None, report: "ValidationReport", *, quiet: bool) -> None:
    if path is None:
        return
    from sigmascope.lora.validate import save_validation_picture

    save_validation_picture(path, report)
    if not quiet:
        Console().print(Text(printable(f"Picture: {path}")))


def _write_names(path: Path, names: Sequence[str], *, required: bool, quiet: bool) -> None:
    """Write the list, after the report is shown: the default folder may be read-only.

    Raises:
        WriteError: The place was asked for and cannot be written.
    """
    from sigmascope.lora.layer_names import write_layer_names

    try:
        write_layer_names(path, names)
    except WriteError as error:
        if required:
            raise
        say(
            f"Layer names were not written: {error.message} Choose another file with --layer_names.", err=True
        )
        return
    if not quiet:
        Console().print(Text(printable(f"Layer names: {path}")))
