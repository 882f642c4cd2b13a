"""What `sigmascope lbm train` tells: lines while it runs, the table of a dry run, the outcome."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sigmascope.lbm.train import StepLog, TrainReport
    from sigmascope.lbm.training.dry_run import DryRun
    from sigmascope.lbm.training.settings import TrainSettings
    from sigmascope.lbm.training.validation import Validation

_MIB = 1024**2


def say_log(console: Console, log: "StepLog", total_steps: int | None) -> None:
    """One line for a log file."""
    left = "" if not total_steps else f", {_clock(log.step_seconds * (total_steps - log.step))} left"
    total = f"/{total_steps}" if total_steps else ""
    console.print(
        Text(
            f"step {log.step}{total}  loss {log.loss:.4g}  lr {log.learning_rate:.3g}  "
            f"{log.step_seconds:.3g} s/step{left}"
        )
    )


def say_validation(console: Console, found: "Validation", sheet: Path) -> None:
    """One line on a validation."""
    values = ", ".join(f"{_steps(count)} {value:.2f} dB" for count, value in found.psnr.items())
    console.print(Text(f"step {found.step}  validation: {values}  ({sheet})"), soft_wrap=True)


def print_dry_run(found: "DryRun", *, as_json: bool) -> None:
    """Show what would be trained: a table, the data and the memory; or all of it as JSON."""
    if as_json:
        facts = {**asdict(found), "resumes": None if found.resumes is None else str(found.resumes)}
        facts["memory"]["total"] = found.memory.total
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console(highlight=False)
    console.print(_table(found))
    for name, text in _facts(found).items():
        console.print(Text(f"{name:<18}{text}"), soft_wrap=True)


def print_report(report: "TrainReport", settings: "TrainSettings", *, as_json: bool) -> None:
    """Show how a training ended: JSON on stdout, or a few lines."""
    if as_json:
        typer.echo(json.dumps(_outcome(report, settings), indent=2))
        return
    err = Console(stderr=True, highlight=False)
    for finding in report.run.findings:
        err.print(Text(f"{finding.message} {finding.advice or ''}".rstrip(), style="yellow"), soft_wrap=True)
    if report.skipped.count:
        what = "1 sample was" if report.skipped.count == 1 else f"{report.skipped.count} samples were"
        text = f"{what} left out, first {report.skipped.first[0]}"
        err.print(Text(text, style="yellow"), soft_wrap=True)
    if report.stopped_by is not None:
        where = report.checkpoint or "no checkpoint yet"
        typer.echo(f"Stopped by {report.stopped_by} after step {report.step}: {where}")
        typer.echo("Next: the same command goes on from there.")
        return
    typer.echo(f"Trained {_steps(report.step)} in {_clock(report.run.seconds)}{_gained(report)}")
    for file in report.files:
        typer.echo(f"Wrote {file}")


def _table(found: "DryRun") -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Block and kind", overflow="fold")
    for name in ("Layers", "Trained", "Rank", "Values trained", "Values frozen"):
        table.add_column(name, justify="right")
    for row in found.rows:
        table.add_row(
            f"{row.block} {row.kind}",
            str(row.modules),
            str(row.trained_modules),
            row.rank_text,
            f"{row.trained_parameters:,}",
            f"{row.frozen_parameters:,}",
            style=None if row.trained_parameters else "dim",
        )
    return table


def _facts(found: "DryRun") -> dict[str, str]:
    memory = found.memory
    share = found.trained_parameters / max(1, found.trained_parameters + found.frozen_parameters)
    width, height = found.picture_size
    count = "unknown" if found.samples is None else str(found.samples)
    parts = ", ".join(
        f"{name} {getattr(memory, name) / _MIB:,.1f}"
        for name in ("weights", "gradients", "optimizer", "average", "activations")
        if getattr(memory, name)
    )
    return {
        "Trained": f"{found.trained_parameters:,} values ({share:.2%} of all)",
        "Data": f"{count} samples in {len(found.shards)} shards, first batch {width}×{height}",
        "Validation": f"{found.validation_samples} samples" if found.validation_samples else "none",
        "Steps": "unknown" if found.total_steps is None else str(found.total_steps),
        "Memory, about": f"{memory.total / _MIB:,.1f} MiB a process ({parts})",
        "Begins": "anew" if found.resumes is None else f"from {found.resumes}",
    }


def _outcome(report: "TrainReport", settings: "TrainSettings") -> Mapping[str, Any]:
    return {
        "step": report.step,
        "resumed_from": report.resumed_from,
        "stopped_by": report.stopped_by,
        "seconds": report.run.seconds,
        "logs": [asdict(log) for log in report.logs],
        "validations": [{"step": found.step, "psnr": dict(found.psnr)} for found in report.validations],
        "checkpoint": None if report.checkpoint is None else str(report.checkpoint),
        "files": [str(file) for file in report.files],
        "set_aside": None if report.set_aside is None else str(report.set_aside),
        "skipped_samples": report.skipped.count,
        "findings": [asdict(finding) for finding in report.run.findings],
        "run_path": str(settings.save_ckpt_path / "run.json"),
    }


def _gained(report: "TrainReport") -> str:
    """What validation says of the whole session."""
    if not report.validations:
        return ""
    first, last = report.validations[0], report.validations[-1]
    count = next(iter(last.psnr))
    if first is last:
        return f": {last.psnr[count]:.2f} dB at step {last.step}"
    return f": {first.psnr[count]:.2f} dB at step {first.step}, {last.psnr[count]:.2f} dB at step {last.step}"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
