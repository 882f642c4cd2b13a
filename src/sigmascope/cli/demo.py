"""`sigmascope demo`: the main job on the pocket model that ships with the package."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope.cli.console import needs_extra, progress_bar
from sigmascope.cli.lora.validate import print_validation
from sigmascope.cli.options import AsJson

if TYPE_CHECKING:
    from sigmascope.lbm.pocket.demo import DemoResult


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the LoRA, the pictures and run.json.")
    ] = Path("sigmascope-demo"),
    source_image: Annotated[
        Path | None,
        typer.Option("--source_image", help="Relight this picture instead of a rendered scene."),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="Rank of Linear layers.")] = 16,
    conv_rank: Annotated[int, typer.Option("--conv_rank", help="Rank of Conv2d layers.")] = 16,
    num_inference_steps: Annotated[
        int, typer.Option("--num_inference_steps", help="Steps along the bridge.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Make, prove, apply and watch a LoRA on a small trained model, in seconds.

    A LoRA is extracted from the pocket model that ships with Sigmascope,
    validated layer by layer and applied at three strengths, and every stage is
    recorded. The exit code is 1 when a check does not hold.
    """
    with needs_extra("lbm"):
        from sigmascope.lbm.pocket.demo import run_demo

    with progress_bar("Demo") as progress:
        result = run_demo(
            output,
            source_image=source_image,
            rank=rank,
            conv_rank=conv_rank,
            num_inference_steps=num_inference_steps,
            progress=progress,
        )
    if as_json:
        typer.echo(_as_json(result))
    else:
        _print(result, Console())
    if not all(check.passed for check in result.checks):
        raise typer.Exit(1)


def _print(result: "DemoResult", console: Console) -> None:
    from sigmascope.reports import print_run

    print_validation(console, result.validation, verbose=False)
    print_run(result.run, console)
    if result.psnr:
        console.print(_quality_table(result.psnr))
    for check in result.checks:
        mark = ("✓ ", "green") if check.passed else ("✗ ", "bold red")
        console.print(Text.assemble(mark, f"{check.claim}: {check.measured}."))
    for what, path in (
        ("Pictures", result.files["sheet"]),
        ("Record", result.files["run"]),
        ("LoRA", result.files["lora"]),
    ):
        console.print(Text(f"{what}: {path}"), soft_wrap=True)


def _quality_table(psnr: dict[str, float]) -> Table:
    table = Table(title="\nAgainst the rendered truth", title_justify="left", box=None, pad_edge=False)
    table.add_column("Picture")
    table.add_column("PSNR, dB", justify="right")
    for name, value in psnr.items():
        table.add_row(Text(name), f"{value:.1f}")
    return table


def _as_json(result: "DemoResult") -> str:
    import json
    from dataclasses import asdict

    return json.dumps(
        {
            "validation": result.validation.as_dict(),
            "psnr_db": result.psnr,
            "checks": [asdict(check) for check in result.checks],
            "files": {name: str(path) for name, path in result.files.items()},
        },
        indent=2,
    )
