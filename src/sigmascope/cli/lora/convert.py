"""`sigmascope lora convert`: carry a LoRA to the format that another tool reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from sigmascope.cli.console import facts, listed, print_json, print_written, progress_bar, title
from sigmascope.cli.options import LoraFormatName, Precision

if TYPE_CHECKING:
    from sigmascope.lora.convert import ConversionReport


EPILOG = """Examples:

sigmascope lora convert my_lora.safetensors my_lora_kohya.safetensors --format kohya

sigmascope lora convert civitai.safetensors for_diffusers.safetensors --format peft
"""


_NEXT = {
    "peft": "pipeline.load_lora_weights(...) in diffusers; on a model alone load_lora_adapter(..., prefix=...)",
    "kohya": "ComfyUI, Forge, sd-scripts, LyCORIS",
    "comfyui": "ComfyUI's LoRA loaders",
    "native": "sigmascope lora validate, merge, inspect; sigmascope lbm infer --lora_path",
}
# Families whose pipelines read kohya's files; for others `peft` is the format for diffusers.
_KOHYA_IN_DIFFUSERS = ("sd15", "sd2", "sdxl", "qwen_image")


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="LoRA to read, in any format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="LoRA to write, .safetensors. Replaced when there.")
    ],
    target_format: Annotated[
        LoraFormatName,
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
    from sigmascope.lora.writer import STORAGE_DTYPES

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
        print_json(report.as_dict())
    else:
        _print(Console(), report)


def _print(console: Console, report: "ConversionReport") -> None:
    console.print(title("LoRA conversion", report.source.name))
    console.print(facts(_facts(report)))
    listed(console, "Left out", [f"{module.name} ({module.reason})" for module in report.left_out])
    print_written(console, report.target, report.file_bytes)


def _facts(report: "ConversionReport") -> list[tuple[str, RenderableType | None]]:
    widened = f"{len(report.widened)} (their scale would have rounded them)"
    return [
        ("Format", f"{report.source_format} to {report.format}"),
        ("Model family", report.family),
        ("Modules", str(report.modules)),
        ("Other changes", str(report.changes) if report.changes else None),
        ("Widened to float32", widened if report.widened else None),
        ("For", Text(_for(report))),
    ]


def _for(report: "ConversionReport") -> str:
    in_diffusers = report.format == "kohya" and report.family in _KOHYA_IN_DIFFUSERS
    return _NEXT[report.format] + (
        "; diffusers through pipeline.load_lora_weights(...)" if in_diffusers else ""
    )
