"""A validation on pictures as a table of 80 columns."""

import math
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sigmascope.lbm.image_errors import ImageReport, OutputError, PictureErrors

_SHOWN = 5
"""Pictures listed one by one unless all are asked for; those that the LoRA leaves farthest off come first."""


def print_images(console: Console, report: "ImageReport", *, verbose: bool) -> None:
    """Show how far base and base + LoRA are from the tuned model's pictures."""
    farthest = sorted(report.pictures, key=lambda picture: picture.with_lora.psnr)
    shown = report.pictures if verbose else farthest[:_SHOWN]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title, table.title_justify = "Against the tuned model's pictures", "left"
    table.add_column("Picture", overflow="fold")
    table.add_column("Model", no_wrap=True)
    for heading in ("PSNR", "Image", "Latent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for picture in shown:
        _add(table, picture.picture, picture)
    if len(report.pictures) > 1:
        _add(table, f"all {len(report.pictures)}", report.overall)
    console.print(table)
    left = report.overall.remaining
    if left is not None:
        console.print(Text(f"The LoRA leaves {_percent(left)} of the way from base to tuned latents."))
    if len(shown) < len(report.pictures):
        console.print(Text(f"{len(report.pictures) - _SHOWN} more pictures: --verbose or --json lists all"))
    for file in report.unreadable:
        console.print(Text(f"unreadable: {file.file} ({file.reason})", overflow="fold"))
    if report.not_applied:
        console.print(
            Text(f"{len(report.not_applied)} modules of the LoRA fit nothing and did nothing here.")
        )


def _add(table: Table, name: str, picture: "PictureErrors") -> None:
    table.add_row(Text(name), "base", *_cells(picture.base))
    table.add_row("", "base + LoRA", *_cells(picture.with_lora))


def _cells(error: "OutputError") -> tuple[str, str, str]:
    psnr = f"{error.psnr:.1f} dB" if math.isfinite(error.psnr) else "identical"
    return psnr, _percent(error.image_error), _percent(error.latent_error)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.3g} %"
