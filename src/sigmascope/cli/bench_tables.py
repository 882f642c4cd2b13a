"""What `sigmascope bench` prints: a row a case, the stages of a single one, and what to know. Fits 80 columns."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmascope import units
from sigmascope.cli.lora.op_tables import facts, plain, table
from sigmascope.printable import printable

if TYPE_CHECKING:
    from sigmascope.analysis.bench_summary import BenchSummary, Latency
    from sigmascope.pipeline.bench import CaseResult
    from sigmascope.records.finding import Finding
    from sigmascope.records.run import Run


def print_bench(
    console: Console,
    name: str,
    load_seconds: float,
    results: "Sequence[CaseResult]",
    output: Path,
    *,
    target: float | None,
) -> None:
    """Print all results.

    Args:
        console: Where to.
        name: Of the pipeline.
        load_seconds: What loading took.
        results: Of every case.
        output: Where the runs lie.
        target: Seconds that a generation may take; None: none was given.
    """
    measured = [result for result in results if result.summary is not None]
    console.print(facts(_header(name, load_seconds, measured)))
    if measured:
        console.print(_case_table(measured))
    if len(results) == 1 and results[0].summary is not None:
        console.print(_stage_table(results[0].summary))
    _print_remarks(console, [(_case_name(result), _remarks(result, target)) for result in results])
    if any(result.files for result in results):
        console.print(Text(f"Runs: {output}"), soft_wrap=True)


def _header(name: str, load_seconds: float, measured: "list[CaseResult]") -> list[tuple[str, Text | None]]:
    run = measured[0].runs[0] if measured else None
    first = measured[0].summary.first_seconds if measured and measured[0].summary else None
    return [
        ("Pipeline", plain(name)),
        ("On", None if run is None else plain(_where(run))),
        ("Loaded in", Text(units.seconds(load_seconds))),
        ("First generation", None if first is None else Text(f"{units.seconds(first)} (not counted)")),
    ]


def _where(run: "Run") -> str:
    noted = run.facts.get("benchmark", {})
    device, threads = noted.get("device"), noted.get("threads")
    host = run.host
    if host is None:
        return str(device)
    found = next((one for one in host.accelerators if one.device.startswith(str(device))), None)
    if found is not None:
        return f"{device}: {found.name or 'unnamed'}, {units.mib(found.total_bytes)} MB"
    return f"{device}: {host.cpu_model or 'unknown'}, {threads} of {host.cpu_count_logical or '-'} threads"


def _case_table(measured: "list[CaseResult]") -> Table:
    devices = sorted({name for result in measured for name in _peaks(result) if name != "process"})
    made = table(
        "Case",
        "p50",
        "p90",
        "p99",
        "Step\np50",
        "Samples\n/ s",
        "RAM\nMB",
        *(f"{device}\nMB" for device in devices),
    )
    for result in measured:
        summary = result.summary
        if summary is None:
            continue
        latency, step, peaks = summary.generation, summary.step, summary.peak_bytes
        made.add_row(
            plain(_case_name(result)),
            *(units.seconds(value) for value in (latency.p50, latency.p90, latency.p99)),
            units.seconds(None if step is None else step.p50),
            f"{summary.samples_per_second:.3g}",
            *(units.mib(peaks.get(name)) for name in ("process", *devices)),
        )
    return made


def _peaks(result: "CaseResult") -> list[str]:
    return [] if result.summary is None else list(result.summary.peak_bytes)


def _case_name(result: "CaseResult") -> str:
    """The label, with the size that came out where none was asked for."""
    made, label = result.made, result.case.label
    if result.case.width is None and made is not None and made.width is not None:
        return f"{made.width}x{made.height}-{label}"
    return label


def _stage_table(summary: "BenchSummary") -> Table:
    made = table("Stage", "p50", "p90", "p99", "Share", "Varies by")
    rows = dict(summary.stages)
    if summary.step is not None:
        rows["each step"] = summary.step
    for name, latency in rows.items():
        share = units.percent(latency.mean, summary.generation.mean) if name != "each step" else ""
        made.add_row(
            plain(name),
            *(units.seconds(value) for value in (latency.p50, latency.p90, latency.p99)),
            share,
            _spread(latency),
        )
    return made


def _spread(latency: "Latency") -> str:
    return units.UNKNOWN if latency.spread is None else f"{100 * latency.spread:.1f} %"


def _print_remarks(console: Console, remarks: "list[tuple[str, list[Text]]]") -> None:
    """A line each, after the case's name; once and without a name what is true of all of several cases."""
    common = [one for one in remarks[0][1] if all(one in others for _, others in remarks)] if remarks else []
    for name, lines in remarks:
        for line in lines:
            if line not in common or len(remarks) == 1:
                console.print(plain(name, style="bold").append(": ").append_text(line))
    if len(remarks) > 1:
        for line in common:
            console.print(line)


def _remarks(result: "CaseResult", target: float | None) -> list[Text]:
    """What went wrong, whether the target was met, and what to know."""
    found = []
    if result.failure is not None:
        found.append(Text("✗ ", style="bold red").append_text(plain(result.failure, style="red")))
    if result.summary is None:
        return found
    case, made = result.case, result.made
    if case.width is not None and made is not None and made.width not in (None, case.width):
        found.append(Text(f"what was made is {made.width}x{made.height}.", style="yellow"))
    if target is not None:
        met = sum(seconds <= target for seconds in _seconds(result))
        style = "green" if met == len(result.runs) else "yellow"
        found.append(Text(f"{met} of {len(result.runs)} within {units.seconds(target)}.", style=style))
    found += [plain(note, style="dim") for note in result.summary.notes]
    return found + [_finding(finding) for finding in result.findings()]


def _finding(finding: "Finding") -> Text:
    text = Text(printable(finding.message))
    return text if finding.advice is None else text.append(f" {printable(finding.advice)}", style="cyan")


def _seconds(result: "CaseResult") -> list[float]:
    return [stage.seconds for run in result.runs for stage in run.stages if stage.name == "generation"]
