"""The record of a run in the terminal: stages, memory, tensors, findings. Fits 80 columns."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sigmascope.records.facts import TensorFacts
from sigmascope.records.finding import Finding
from sigmascope.records.run import Run, Stage
from sigmascope.records.times import impossible_times
from sigmascope.reports.accelerators import accelerator_table, untimed_lines
from sigmascope.reports.devices import device_lines
from sigmascope.reports.harmless import Harmless
from sigmascope.reports.owners import owner_lines
from sigmascope.reports.stage_rows import new_table, stage_name, with_depth
from sigmascope.units import UNKNOWN, mib, mib_change, percent, seconds, statistic

NO_ACCELERATOR = "No accelerator was found: GPU time and memory were not measured."
_MOST_DAMAGE: Final = 5
SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}


def print_run(run: Run, console: Console | None = None) -> None:
    """Print the whole record.

    Args:
        run: The record.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    (console or Console()).print(render_run(run))


def render_run(run: Run) -> RenderableType:
    """Return the record as one renderable: header, stages, tensors, devices, errors, findings."""
    parts: list[RenderableType] = [Rule(Text(f"Run: {run.name}")), *_header(run), _stage_table(run)]
    devices = accelerator_table(run)
    if devices is not None:
        parts.append(devices)
    parts += untimed_lines(run)
    if any(stage.tensors for stage in run.walk()):
        parts.append(_tensor_table(run))
    parts += owner_lines(run)
    parts += device_lines(run)
    parts += [
        Text(f"Damaged: {wrong}.", style="yellow") for wrong in islice(impossible_times(run), _MOST_DAMAGE)
    ]
    parts += _errors(run)
    parts += [_finding(finding) for finding in _all_findings(run)]
    return Harmless(Group(*parts))


def _header(run: Run) -> Iterator[RenderableType]:
    state = "" if run.complete else " (not complete)"
    yield Text(f"Started {run.started_at}, took {seconds(run.seconds)}{state}")
    host = run.host
    if host is None:
        return
    ram = f"{mib(host.ram_total_bytes)} MiB RAM" if host.ram_total_bytes is not None else "RAM unknown"
    cores = host.cpu_count_logical if host.cpu_count_logical is not None else UNKNOWN
    yield Text(f"{host.cpu_model or 'CPU unknown'}, {cores} logical CPUs, {ram}, {host.os or 'OS unknown'}")
    for device in host.accelerators:
        yield Text(f"{device.device}: {device.name or 'unnamed'}, {mib(device.total_bytes)} MiB")
    if not host.accelerators:
        yield Text(NO_ACCELERATOR, style="dim")


def _stage_table(run: Run) -> Table:
    table = new_table("Stages (memory in MiB)")
    table.add_column("Stage", overflow="fold")
    for name in ("Time", "Share", "Steps", "RAM +/-", "RAM peak", "at"):
        table.add_column(name, justify="right", no_wrap=True)
    for depth, stage in with_depth(run):
        row: list[RenderableType] = [
            stage_name(depth, stage),
            seconds(stage.seconds),
            _share(stage, run),
            _steps(stage),
        ]
        row += [_rss_change(stage), *_rss_peak(stage)]
        table.add_row(*row)
    return table


def _share(stage: Stage, run: Run) -> str:
    return percent(stage.seconds, run.seconds)


def _steps(stage: Stage) -> str:
    count = len(stage.steps)
    return f"{count} × {seconds(sum(stage.steps.seconds) / count)}" if count else ""


def _rss_change(stage: Stage) -> str:
    if stage.memory is None:
        return UNKNOWN
    return mib_change(stage.memory.baseline.process_rss_bytes, stage.memory.current.process_rss_bytes)


def _rss_peak(stage: Stage) -> tuple[str, str]:
    if stage.peak is None:
        return UNKNOWN, UNKNOWN
    return mib(stage.peak.rss_bytes), seconds(stage.peak.rss_at_seconds)


def _tensor_table(run: Run) -> Table:
    table = new_table("\nTensors by stage")
    table.add_column("Tensor", overflow="fold")
    table.add_column("Shape", overflow="fold")
    table.add_column("Type")
    for name in ("MiB", "Min", "Max", "Mean", "Std", "NaN\nInf"):
        table.add_column(name, justify="right", no_wrap=True)
    for outermost in run.stages:
        rows = [_tensor_row(*item) for stage in outermost.walk() for item in stage.tensors.items()]
        if rows:
            table.add_row(Text(outermost.name, style="bold"))
        for row in rows:
            table.add_row(*row)
    return table


def _tensor_row(name: str, facts: TensorFacts) -> tuple[RenderableType, ...]:
    counts = (facts.nan_count, facts.inf_count)
    broken = UNKNOWN if None in counts else str(sum(count or 0 for count in counts))
    return (
        Text(f"  {name}"),
        "×".join(map(str, facts.shape)) or "scalar",
        Text(facts.dtype.removeprefix("torch.")),
        mib(facts.nbytes),
        *(statistic(value) for value in (facts.min, facts.max, facts.mean, facts.std)),
        Text(broken, style="red" if broken not in ("0", UNKNOWN) else ""),
    )


def _errors(run: Run) -> Iterator[RenderableType]:
    for stage in run.walk():
        if stage.error is not None:
            yield Text.assemble(("✗ ", "red"), f"{stage.name} failed: {stage.error}")


def _all_findings(run: Run) -> Iterator[Finding]:
    yield from run.findings
    for stage in run.walk():
        yield from stage.findings


def _finding(finding: Finding) -> RenderableType:
    where = f" [{finding.stage}]" if finding.stage else ""
    text = Text.assemble(
        (finding.severity, SEVERITY_STYLE.get(finding.severity, "")), f"{where} {finding.message}"
    )
    if finding.evidence:
        text.append("\n  " + ", ".join(f"{key} {value}" for key, value in finding.evidence.items()))
    if finding.advice:
        text.append(f"\n  What to do: {finding.advice}")
    return text
