"""A workflow's summary: its stages, then what each stage's analysis says."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.records.arithmetic import change, mib
from sigmascope.records.finding import Finding
from sigmascope.records.run import Run, Stage
from sigmascope.stages.figures import mb, mb_change, printable, seconds
from sigmascope.stages.latents.report import sections as latent_sections
from sigmascope.stages.lora.report import sections as lora_sections
from sigmascope.stages.shared_rows import NO_ACCELERATOR
from sigmascope.stages.summary import Row, Section, as_it_is
from sigmascope.stages.text.report import sections as text_sections
from sigmascope.units import percent

SUMMARIES = {
    "lora_application": ("LORA APPLICATION", lora_sections),
    "text_encoding": ("TEXT ENCODING", text_sections),
    "latent_encoding": ("LATENT GENERATION", latent_sections),
    "latent_decoding": ("LATENT DECODING", latent_sections),
}
"""By stage: title and sections of its analysis. A stage that is not here has its analysis shown as it is."""


def workflow_sections(run: Run) -> Iterator[Section]:
    """Overview, stages, peaks and findings of a run."""
    yield Section("📋", "WORKFLOW", list(_overview(run)))
    yield Section("⏱️ ", "STEPS", [row for stage in run.stages for row in _stage(stage, run, 0)])
    yield Section("📊", "PEAK MEMORY", list(_peaks(run)))
    yield Section("🚨", "FINDINGS", [_finding(finding) for finding in run.findings])


def analysis_sections(stage: str, analysis: Mapping[str, Any]) -> tuple[str, Iterator[Section]]:
    """Title and sections of one stage's analysis."""
    known = SUMMARIES.get(stage)
    if known is None:
        return f"{stage.replace('_', ' ').upper()}", as_it_is(analysis)
    return known[0], known[1](analysis)


def _overview(run: Run) -> Iterator[Row]:
    yield Row("Name", printable(run.name) or "-")
    yield Row("Started", run.started_at)
    yield Row("Total time", seconds(run.seconds))
    if not run.complete:
        yield Row("Complete", "no, a step is still open or broke off", "yellow")
    if not any(stage.peak and stage.peak.accelerators for stage in run.walk()):
        yield Row("GPU", NO_ACCELERATOR)


def _stage(stage: Stage, run: Run, depth: int) -> Iterator[Row]:
    mark, style = ("✓", "") if stage.success else ("✗", "red")
    parts = [f"{seconds(stage.seconds)} ({percent(stage.seconds, run.seconds)})"]
    if stage.memory is not None:
        before, after = stage.memory.baseline, stage.memory.current
        parts.append(f"process {mb_change(mib(change(before.process_rss_bytes, after.process_rss_bytes)))}")
        for memory in after.accelerators:
            was = before.accelerator(memory.device).allocated_bytes
            parts.append(f"{memory.device} {mb_change(mib(change(was, memory.allocated_bytes)))}")
    if stage.peak is not None:
        parts += [f"{device} peak {mb(mib(nbytes))}" for device, nbytes in _peak_bytes(stage)]
    yield Row(f"{'  ' * depth}{mark} {printable(stage.name, 60)}", ", ".join(parts), style)
    if stage.error is not None:
        yield Row(f"{'  ' * depth}  error", printable(stage.error), "red")
    for child in stage.children:
        yield from _stage(child, run, depth + 1)


def _peak_bytes(stage: Stage) -> Iterator[tuple[str, int | None]]:
    assert stage.peak is not None
    for peak in stage.peak.accelerators:
        yield peak.device, peak.allocated_bytes


def _peaks(run: Run) -> Iterator[Row]:
    peak = run.peak()
    yield Row("Process", f"{mb(mib(peak.rss_bytes))} at {seconds(peak.rss_at_seconds)}")
    yield Row("RAM", f"{mb(mib(peak.ram_used_bytes))} at {seconds(peak.ram_used_at_seconds)}")
    for device in peak.accelerators:
        allocated = f"{mb(mib(device.allocated_bytes))} at {seconds(device.allocated_at_seconds)}"
        reserved = f"{mb(mib(device.reserved_bytes))} at {seconds(device.reserved_at_seconds)}"
        yield Row(device.device, f"allocated {allocated}, reserved {reserved}")


def _finding(finding: Finding) -> Row:
    advice = f" {finding.advice}" if finding.advice else ""
    where = f"{finding.stage}: " if finding.stage else ""
    style = {"info": "cyan", "warning": "yellow"}.get(finding.severity, "red")
    return Row(finding.severity.capitalize(), printable(f"{where}{finding.message}{advice}"), style)
