"""What `sigmascope lbm infer` tells: one line, the record of every stage, or JSON."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from sigmascope.records.run import Run, Stage

MIB = 1024**2
NAMED = 3
"""How many modules a warning names."""


def report(run: "Run", summary: Mapping[str, Any], *, as_json: bool, verbose: bool) -> None:
    """Print the outcome: JSON on stdout, or a line on stdout and, if verbose, the stages on stderr."""
    if as_json:
        typer.echo(json.dumps({**summary, **_measured(run)}, indent=2))
        return
    console = Console(stderr=True)
    if verbose:
        from sigmascope.reports import print_run

        print_run(run, console)
    dormant = summary["lora"]["dormant_modules"] if summary["lora"] else []
    if dormant:
        names = ", ".join(dormant[:NAMED])
        console.print(
            Text(f"{len(dormant)} LoRA modules never ran and had no effect: {names}", style="yellow")
        )
    size = f"{summary['width']}×{summary['height']}"
    typer.echo(f"Wrote {summary['output_path']} ({size}) in {run.seconds:.1f} s")


def _measured(run: "Run") -> dict[str, Any]:
    """Seconds of the run and of every stage, with peaks in MiB, steps, and each stage's own facts."""
    return {"seconds": run.seconds, "stages": [_stage(stage) for stage in run.walk()]}


def _stage(stage: "Stage") -> dict[str, Any]:
    peak = None if stage.peak is None else stage.peak.rss_bytes
    return {
        "name": stage.name,
        "seconds": stage.seconds,
        "step_seconds": list(stage.steps.seconds),
        "peak_rss_mb": None if peak is None else peak / MIB,
        "facts": dict(stage.facts),
    }
