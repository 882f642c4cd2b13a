"""`sigmascope lora plan`: how large a LoRA of two checkpoints has to be, before one is made."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from sigmascope.cli.console import (
    Console,
    check_picture,
    facts,
    layer,
    percent,
    print_json,
    progress_bar,
    say,
    table,
    title,
)
from sigmascope.cli.lora.extract import TargetCoverage, Workers
from sigmascope.cli.lora.validate import (
    ImageFlags,
    check_image_flags,
    likeness_cells,
    run_images,
)
from sigmascope.cli.options import (
    AsJson,
    PairFlags,
    Precision,
    Ridge,
    Statistics,
    found_model,
    option_groups,
)
from sigmascope.errors import ConfigError
from sigmascope.units import format_size, parse_size

if TYPE_CHECKING:
    from sigmascope.lbm.image_validation import ImageReport
    from sigmascope.lora.extract import ExtractOptions
    from sigmascope.lora.size_plan import LoraPlan, PlannedLora

app = typer.Typer(rich_markup_mode="rich")
EPILOG = """Examples:

sigmascope lora plan base.safetensors tuned.safetensors

sigmascope lora plan base.safetensors tuned.safetensors --statistics stats.safetensors --picture plan.svg

sigmascope lora plan base.safetensors tuned.safetensors --try 1MB,2MB,4MB --images photos
"""


@app.command("plan", epilog=EPILOG)
@option_groups
def plan(
    *,
    base_model: Annotated[
        Path,
        typer.Argument(
            metavar="BASE",
            help="The base model: the checkpoint that the LoRA will be for.",
            callback=found_model,
        ),
    ],
    tuned_model: Annotated[
        Path, typer.Argument(metavar="TUNED", help="The fine-tuned checkpoint.", callback=found_model)
    ],
    statistics: Statistics = None,
    ridge: Ridge = 1e-3,
    max_rank: Annotated[
        int, typer.Option("--max_rank", help="Try fixed ranks in powers of two up to this.")
    ] = 32,
    save_precision: Annotated[
        Precision, typer.Option("--save_precision", help="Dtype of the stored factors.")
    ] = Precision.FP16,
    target_coverage: Annotated[
        TargetCoverage,
        typer.Option(
            "--target_coverage", metavar="<name>", help="Which layers to extract, as in lora extract."
        ),
    ] = TargetCoverage.FULL,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="<pattern>", help="Leave out matching layers. Repeatable."),
    ] = None,
    pairing: PairFlags,
    tries: Annotated[
        str | None,
        typer.Option(
            "--try",
            metavar="<sizes>",
            help="Make LoRAs of these sizes, such as 1MB,2MB,4MB, and measure the pictures of --images with them. "
            "They are not kept.",
        ),
    ] = None,
    images: ImageFlags,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Plot error against size in this .svg or .png file.")
    ] = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Show how the error of a LoRA depends on its size, before you extract it.

    Nothing is written. The table compares each fixed rank with the best ranks
    for the same bytes (extract --max_size). Beyond the size called the knee,
    more bytes gain little.
    """
    sizes = [] if tries is None else [parse_size(size, "--try") for size in tries.split(",")]
    if sizes and images.images is None:
        raise ConfigError("--try needs pictures to measure.", hint="Add --images FOLDER.")
    if images.images is not None and not sizes:
        raise ConfigError("--images is for --try.", hint="Add --try 1MB,2MB,4MB, or leave it out.")
    models = {"base": base_model, "tuned": tuned_model}
    check_image_flags(images if sizes else replace(images, device=None), models)
    check_picture(picture, dict.fromkeys(models.values(), "is an input"))
    from sigmascope.lora.extract import ExtractOptions
    from sigmascope.lora.ranks import FULL_RANK, FixedRank, RankRules
    from sigmascope.lora.size_plan import plan_lora, save_plan_picture

    options = ExtractOptions(
        rules=RankRules(FixedRank(FULL_RANK, FULL_RANK), (), tuple(exclude or ())),
        save_precision=save_precision.value,
        target_coverage=target_coverage.value,
        pairing=pairing.options(),
        device=images.device or "auto",
        workers=workers,
        statistics=statistics,
        ridge=ridge,
    )
    with progress_bar("Decomposing") as progress:
        lora_plan = plan_lora(base_model, tuned_model, options, most_rank=max_rank, progress=progress)
    tried = dict(_tried(sizes, models, options, images))
    if picture is not None:
        save_plan_picture(picture, lora_plan)
    if as_json:
        print_json(lora_plan.as_dict() | {"tried": [_tried_as_dict(*one) for one in tried.items()]})
    else:
        flags = _typed(pairing, exclude or [], ridge, save_precision, target_coverage, images.device)
        _print(Console(), lora_plan, tried, flags)
        if picture is not None:
            say(f"Picture: {picture}")


def _typed(
    pairing: PairFlags,
    exclude: list[str],
    ridge: float,
    precision: Precision,
    coverage: TargetCoverage,
    device: str | None,
) -> list[str]:
    """The flags that an extraction needs to do what was planned."""
    given: dict[str, object] = {"ridge": ridge, "save_precision": precision, "target_coverage": coverage}
    usual: dict[str, object] = {
        "ridge": 1e-3,
        "save_precision": Precision.FP16,
        "target_coverage": TargetCoverage.FULL,
    }
    given |= {**asdict(pairing), "device": device}
    usual |= {**asdict(PairFlags()), "device": None}
    changed = [(name, str(value)) for name, value in given.items() if value != usual[name]]
    changed += [("exclude", pattern) for pattern in exclude]
    return [word for name, value in changed for word in (f"--{name}", value)]


def _tried(
    sizes: list[int], models: Mapping[str, Path], options: "ExtractOptions", images: ImageFlags
) -> Iterator[tuple[int, "ImageReport"]]:
    """What pictures a LoRA of each size makes."""
    from sigmascope.lora.budget import Budget
    from sigmascope.lora.extract import extract_lora

    for size in sizes:
        with TemporaryDirectory() as folder:
            lora = Path(folder) / "tried.safetensors"
            budgeted = replace(options, budget=Budget(max_bytes=size))
            with progress_bar(f"Extracting {format_size(size)}") as progress:
                extract_lora(models["base"], models["tuned"], lora, budgeted, progress=progress)
            report = run_images(images, models, lora)
        if report is not None:
            yield size, report


def _tried_as_dict(size: int, report: "ImageReport") -> dict[str, object]:
    return {"max_bytes": size, **report.overall.with_lora.as_dict(), "remaining": report.overall.remaining}


def _print(
    console: Console, lora_plan: "LoraPlan", tried: Mapping[int, "ImageReport"], flags: list[str]
) -> None:
    console.print(title("LoRA plan", lora_plan.tuned.name))
    sizes = table("Size", "One rank", "Error", "Best ranks", "Same error from")
    for fixed, best in zip(lora_plan.fixed, lora_plan.budget, strict=True):
        enough = lora_plan.bytes_for(fixed.weighted_error)
        sizes.add_row(
            format_size(fixed.bytes),
            str(fixed.rank),
            percent(fixed.weighted_error),
            percent(best.weighted_error),
            "-" if enough is None else format_size(enough),
        )
    console.print(sizes)
    console.print(_layers(lora_plan))
    weighed = "the size of its weight" if lora_plan.statistics is None else "its effect on the model's output"
    rows = [
        ("Layers that changed", str(lora_plan.changed)),
        ("Errors", f"of all layers, each by {weighed}"),
        ("Knee", f"{format_size(lora_plan.knee.bytes)}, error {percent(lora_plan.knee.weighted_error)}"),
    ]
    console.print(facts(rows))
    if tried:
        console.print(_pictures(tried))
    say(f"Next: {_command(lora_plan, lora_plan.knee, flags)}")


def _layers(lora_plan: "LoraPlan") -> Table:
    shown = table("Layers with most of the change", "Share", "Rank at the knee")
    for changed in lora_plan.layers:
        shown.add_row(layer(changed.name), percent(changed.share), str(changed.rank))
    return shown


def _pictures(tried: Mapping[int, "ImageReport"]) -> Table:
    lpips = [] if any(report.overall.with_lora.lpips is None for report in tried.values()) else ["LPIPS"]
    made = table("Tried", "PSNR to tuned", "SSIM", *lpips, "Error of the picture", "Remaining distance")
    for size, report in tried.items():
        overall = report.overall
        made.add_row(
            format_size(size),
            *likeness_cells(overall.with_lora),
            percent(overall.with_lora.image_error),
            percent(overall.remaining),
        )
    return made


def _command(lora_plan: "LoraPlan", planned: "PlannedLora", flags: list[str]) -> str:
    """What makes the planned LoRA, to copy; `flags` are those that were typed for the plan."""
    words = ["sigmascope", "lora", "extract", "--base_model_path", str(lora_plan.base)]
    words += ["--tuned_model_path", str(lora_plan.tuned), "--save_to", "my_lora.safetensors"]
    words += ["--max_size", f"{-(-planned.bytes // 1024)}KB"]
    if lora_plan.statistics is not None:
        words += ["--statistics", str(lora_plan.statistics)]
    return shlex.join([*words, *flags])
