"""`sigmascope lora extract`: make a LoRA from two checkpoints."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from sigmascope.cli.console import (
    Console,
    facts,
    findings,
    needs_extra,
    percent,
    plain,
    print_json,
    print_loads,
    print_written,
    progress_bar,
    title,
)
from sigmascope.cli.lora.validate import block_table, module_table
from sigmascope.cli.options import (
    ONE_OF_FORMATS,
    AsJson,
    BasePath,
    PairFlags,
    Precision,
    RankFlags,
    Ridge,
    SaveTo,
    Statistics,
    TunedPath,
    Verbose,
    option_groups,
    rank_choice,
)
from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.lora.format_names import ExtractFormat

if TYPE_CHECKING:
    from PIL import Image

    from sigmascope.lora.extract import ExtractionReport
    from sigmascope.lora.statistics import ModelStatistics

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora extract --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--save_to my_lora.safetensors --rank 32 --conv_rank 16

sigmascope lora extract --base_model_path base.safetensors --tuned_model_path tuned.safetensors
--save_to best_100MB.safetensors --max_size 100MB --exclude conv_out
"""


class TargetCoverage(StrEnum):
    """`--target_coverage`."""

    FULL = "full"
    ATTENTION = "attention"
    EXTENDED = "extended"


Workers = Annotated[
    int | None,
    typer.Option("--workers", help="CPU threads.", show_default="one for each core, up to 8"),
]


@app.command("extract", epilog=EPILOG)
@option_groups
def extract(
    *,
    base_model_path: BasePath,
    tuned_model_path: TunedPath,
    save_to: SaveTo,
    ranks: RankFlags,
    save_precision: Annotated[
        Precision,
        typer.Option(
            "--save_precision",
            help="Dtype of the stored factors. At the same size, fp16 rounds 8 times finer than bf16.",
        ),
    ] = Precision.FP16,
    lora_format: Annotated[
        ExtractFormat,
        typer.Option(
            "--format",
            metavar="<name>",
            help=f"{ONE_OF_FORMATS}. auto: native for LBM, peft for folders, comfyui for single files.",
        ),
    ] = "auto",
    min_diff: Annotated[
        float, typer.Option("--min_diff", help="Leave out layers whose largest change is below this.")
    ] = 0.0,
    target_coverage: Annotated[
        TargetCoverage,
        typer.Option(
            "--target_coverage",
            metavar="<name>",
            help="Which layers to extract. attention: attn1 and attn2. extended: also ff, proj_in, proj_out. full: all.",
        ),
    ] = TargetCoverage.FULL,
    biases_and_norms: Annotated[
        bool,
        typer.Option(
            "--biases_and_norms",
            help="Also store the changes of biases, norms and embeddings, in full, as diff tensors.",
        ),
    ] = False,
    budget_weights: Annotated[
        str,
        typer.Option(
            "--budget_weights",
            help="With --max_size or --max_error, how errors count. relative: compared with the size of the layer's weight. "
            "plain: as they are. Or a JSON file with a weight for each layer.",
        ),
    ] = "relative",
    statistics: Statistics = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate",
            help="For an LBM: make the statistics first, on the pictures in this folder.",
            show_default=False,
        ),
    ] = None,
    ridge: Ridge = 1e-3,
    pairing: PairFlags,
    device: Annotated[
        str, typer.Option("--device", help="Where to decompose: auto, cpu, cuda, cuda:1.")
    ] = "auto",
    workers: Workers = None,
    create_base_model: Annotated[
        bool,
        typer.Option("--create_base_model", help="If the base model is missing, make it from its backbone."),
    ] = False,
    backbone_signature: Annotated[
        str | None,
        typer.Option(
            "--backbone_signature",
            help="With --create_base_model: the backbone, as a diffusers folder, single-file checkpoint or hub name.",
        ),
    ] = None,
    config_path: Annotated[
        Path | None,
        typer.Option("--config_path", help="With --create_base_model or --calibrate: the model's YAML."),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Extract a LoRA from a fine-tuned model: base + LoRA ≈ tuned.

    The change of every Linear and convolution layer of the denoiser is
    decomposed (SVD), at the rank you give or at the best ranks for a file size
    or an error. The errors shown are those of the stored factors. A YAML file
    beside the LoRA describes the extraction. If a run is killed, the same
    command continues it.
    """
    choice = rank_choice(ranks)
    if calibrate is not None and statistics is not None:
        raise ConfigError(
            "--calibrate makes new statistics, and --statistics names a file of them.",
            hint="Give only one of the two.",
        )
    pictures = None if calibrate is None else calibration_pictures(calibrate)
    require_base(
        base_model_path,
        create=create_base_model,
        backbone=backbone_signature,
        config=config_path,
        calibrates=calibrate is not None,
    )
    from sigmascope.lora.extract import ExtractOptions, check_extraction
    from sigmascope.pipeline.lora_loading import extract_lora

    options = ExtractOptions(
        rules=choice.rules,
        budget=choice.budget,
        save_precision=save_precision.value,
        format=lora_format,
        min_diff=min_diff,
        target_coverage=target_coverage.value,
        biases_and_norms=biases_and_norms,
        pairing=pairing.options(),
        device=device,
        workers=workers,
        budget_weights=budget_weights,
        statistics=statistics,
        ridge=ridge,
    )
    with TemporaryDirectory() as folder:
        if pictures is not None:
            made = Path(folder) / "statistics.safetensors"
            options = replace(options, statistics=made)
            check_extraction(base_model_path, tuned_model_path, save_to, options)
            calibrated(tuned_model_path, pictures, config_path, device).save(made)
        with progress_bar("Extracting") as progress:
            report = extract_lora(base_model_path, tuned_model_path, save_to, options, progress=progress)
    if as_json:
        print_json(report.as_dict())
    else:
        print_extraction(Console(), report, verbose=verbose)


def calibration_pictures(folder: Path) -> "list[Image.Image]":
    """The pictures of a folder, read before anything is computed.

    Raises:
        ConfigError: The folder is missing or holds no picture, or a picture cannot be read.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.images import find_images, load_image
    return [load_image(path) for path in find_images(folder)[0]]


def calibrated(
    model: Path, pictures: "list[Image.Image]", config: Path | None, device: str
) -> "ModelStatistics":
    """Statistics of an LBM while it translates pictures.

    Raises:
        CheckpointError: The model is not an LBM, or cannot be loaded.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.devices import resolve_device
        from sigmascope.lbm.lbm_statistics import lbm_statistics
    with progress_bar("Calibrating") as progress:
        return lbm_statistics(
            model, pictures, config_path=config, device=resolve_device(device), progress=progress
        )


def require_base(
    base: Path, *, create: bool, backbone: str | None, config: Path | None, calibrates: bool = False
) -> None:
    """Make a missing base model if asked to; otherwise refuse to start without one.

    Raises:
        ConfigError: An option of base creation that has no effect, or a backbone that cannot be loaded.
        CheckpointError: The base does not exist.
    """
    for flag, value in (
        ("--backbone_signature", backbone),
        ("--config_path", None if calibrates else config),
    ):
        if value is not None and not create:
            raise ConfigError(
                f"{flag} {value} is for --create_base_model only.",
                hint=f"Add --create_base_model, or leave {flag} out.",
            )
    from sigmascope.checkpoints.checkpoint import is_existing

    if is_existing(base):
        return
    if not create:
        from sigmascope.checkpoints.reader import what_is_there

        advice = "Give the checkpoint that the fine-tuning started from, or add --create_base_model."
        raise CheckpointError(
            base, "there is no base model.", hint=f"{what_is_there(base)} {advice}".lstrip()
        )
    with needs_extra("lbm"):
        from sigmascope.lbm.base import create_base
        from sigmascope.lbm.config import LbmConfig, load_config

    with progress_bar("Creating base") as progress:
        create_base(
            load_config(config) if config else LbmConfig(),
            base,
            backbone=backbone,
            both=False,
            progress=progress,
        )


def print_extraction(console: Console, report: "ExtractionReport", *, verbose: bool) -> None:
    """Show what an extraction wrote: blocks, totals, what is left out, and how to go on."""
    console.print(title("LoRA extraction", report.lora.name))
    console.print(block_table(report.blocks, "In LoRA"))
    if verbose:
        console.print(module_table("Every layer", report.errors))
    console.print(facts(_extraction_facts(report)))
    console.print(findings(report.findings))
    print_written(console, report.lora, report.file_bytes)
    console.print(Text("         ").append_text(plain(report.sidecar)))
    print_loads(console, report.loads)
    following = "Next: sigmascope lora validate "
    console.print(Text(following).append_text(plain(report.lora)))


def _extraction_facts(report: "ExtractionReport") -> list[tuple[str, RenderableType]]:
    reasons = [layer.reason for layer in report.left_out]
    left_out = ", ".join(
        f"{reasons.count(reason)} {reason.replace('_', ' ')}" for reason in sorted(set(reasons))
    )
    coverage = (
        f"{report.total_lora_modules} of {report.total_analyzed_layers} layers "
        f"({report.coverage_percentage:.1f} %)"
    )
    return [
        ("Layers in the LoRA", coverage),
        ("Left out", left_out or "none"),
        ("Error, overall", percent(report.relative_error)),
        ("Error, average", percent(report.average_error)),
        *([] if report.weighted_error is None else [("Error, weighted", percent(report.weighted_error))]),
        ("Precision", report.options.save_precision),
        ("Time", f"{report.seconds:.1f} s"),
    ]
