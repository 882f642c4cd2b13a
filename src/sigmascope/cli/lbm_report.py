"""What `sigmascope lbm infer` tells: one line, a table of stages, or JSON."""

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope.records.run import Run, Stage

MIB = 1024**2


def report(run: Run, summary: Mapping[str, Any], *, as_json: bool, verbose: bool) -> None:
    """Print the outcome: JSON on stdout, or a line on stdout and, if verbose, the stages on stderr."""
    if as_json:
        typer.echo(json.dumps({**summary, **run_facts(run)}, indent=2))
        return
    if verbose:
        Console(stderr=True).print(stage_table(run))
    dormant = summary["lora"]["dormant_modules"] if summary["lora"] else []
    if dormant:
        message = f"{len(dormant)} LoRA modules never ran, so they had no effect: {', '.join(dormant[:3])}"
        Console(stderr=True).print(Text(message, style="yellow"))
    size = f"{summary['width']}×{summary['height']}"
    typer.echo(f"Wrote {summary['output_path']} ({size}) in {run.seconds:.1f} s")


def run_facts(run: Run) -> dict[str, Any]:
    """Seconds of the run and of every stage, with peaks in MiB and each stage's own facts."""
    return {
        "seconds": run.seconds,
        "stages": [
            {
                "name": stage.name,
                "seconds": stage.seconds,
                "peak_rss_mb": _peak_mib(stage),
                "steps": list(stage.steps.seconds),
                "facts": dict(stage.facts),
            }
            for stage in run.walk()
        ],
    }


def stage_table(run: Run) -> Table:
    """Time, steps and peak memory of every stage."""
    table = Table(title="Stages")
    table.add_column("stage")
    for column in ("seconds", "steps", "peak RSS MiB"):
        table.add_column(column, justify="right")
    for stage in run.walk():
        peak = _peak_mib(stage)
        memory = "not measured" if peak is None else f"{peak:.0f}"
        table.add_row(stage.name, f"{stage.seconds:.3f}", str(len(stage.steps) or ""), memory)
    return table


def _peak_mib(stage: Stage) -> float | None:
    if stage.peak is None or stage.peak.rss_bytes is None:
        return None
    return stage.peak.rss_bytes / MIB
