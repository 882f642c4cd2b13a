"""The record of a run in the terminal: the verdict, where the time went, what to do. Fits 80 columns.

In full there are stages, devices, memory, tensors and all findings as well. The profile of a denoiser's steps has two
tables more: which blocks and which operators take its time. All of it is shown without what it could make the terminal
do.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sigmascope.analysis.breakdown import (
    TimeShare,
    failure_places,
    failures,
    headline,
    in_words,
    large_places,
    large_rows,
    run_findings,
    times_in_words,
)
from sigmascope.analysis.lora_acting import acting_lora
from sigmascope.analysis.memory import PeakOwner, peak_owners
from sigmascope.plain_text import Harmless, in_one_line
from sigmascope.records.performance import (
    PROCESS,
    BlockProfile,
    DeviceUtilization,
    StepsProfile,
    host_stacks,
    profiles_of,
    readable_utilization,
)
from sigmascope.records.recorded import Recorded, run_of
from sigmascope.records.run import (
    Finding,
    Folded,
    Run,
    Stage,
    TensorFacts,
    device_seconds,
    folded_in_words,
    impossible_times,
    names_in,
)
from sigmascope.units import UNKNOWN, counted, mib, mib_change, percent, seconds, statistic, took

NO_ACCELERATOR = "No accelerator was found: GPU time and memory were not measured."
SEVERITY_STYLE = {"info": "cyan", "warning": "yellow", "error": "red", "critical": "bold red"}

# How many lines of these are shown at most.
_MOST_DAMAGE: Final = 5
_MOST_FINDINGS: Final = 5
_MOST_OPERATORS = 10
_BAR_CELLS: Final = 24


def print_run(run: Recorded, console: Console | None = None, *, full: bool = False) -> None:
    """Print a record: the verdict in a sentence, where the time went, and the findings that weigh most.

    Args:
        run: The record, or what has one, such as a `Watch`.
        console: Where to print; standard output by default, without colour if it is not a terminal.
        full: Whether to print every stage, device, tensor and finding as well.
    """
    shown = run_of(run)
    (console or Console()).print(render_run(shown) if full else render_summary(shown))


def render_summary(run: Run) -> RenderableType:
    """Return what to know first: the headline, a bar for each part of the time, and five findings at most."""
    findings = run_findings(run)
    verdict = headline(run, with_whole_error=False)
    state = "" if run.complete else " (not complete)"
    parts: list[RenderableType] = [
        Rule(Text(f"Run: {in_one_line(run.name)}{state}")),
        Text(verdict, style="bold"),
        *_acting(run),
        *_raised_at(run, " → "),
        *_time_bars(run),
        *_damage(run),
        *_short_findings(findings[:_MOST_FINDINGS], verdict),
    ]
    left = len(findings) - _MOST_FINDINGS
    more = f"{counted(left, 'more finding')}, stages" if left > 0 else "Stages"
    parts.append(Text(f"{more}, memory and tensors: run.print(full=True), or --full", style="dim"))
    return Harmless(Group(*parts))


def _acting(run: Run) -> Iterator[Text]:
    acts = acting_lora(run)
    if acts is not None:
        yield Text(acts)


def _short_findings(findings: Sequence[Finding], verdict: str) -> Iterator[Text]:
    """Each finding, but for those of which all is told by the verdict and the findings before."""
    told, advised = verdict, set[str | None]()
    ids = {finding.id for finding in findings}
    for finding in findings:
        if _NOTHING_FITS in ids and _says_it_of_all(finding):
            continue
        is_told, is_advised = _is_in(finding.message, told), finding.advice in advised
        if not is_told or not is_advised:
            yield _short_finding(replace(finding, advice=None) if is_advised else finding, told)
        told += f"\n{finding.message}"
        advised.add(finding.advice)


_NOTHING_FITS: Final = "lora_matches_nothing"
"""A finding that gives the reason, too."""


def _says_it_of_all(finding: Finding) -> bool:
    """Whether a finding only repeats that no module of a file fits, or none is loaded."""
    modules = finding.evidence.get("modules")
    of_all = modules is not None and modules == finding.evidence.get("of")
    return finding.id == "lora_not_loaded" or (of_all and finding.id != _NOTHING_FITS)


def _is_in(message: str, told: str) -> bool:
    """Whether something was told already: after a colon it begins with a small letter, and of a model modules are weights."""
    forms = (message, message[:1].lower() + message[1:], re.sub(r"\bmodule(s?)\b", r"weight\1", message))
    return any(form in told for form in forms)


def _short_finding(finding: Finding, verdict: str) -> Text:
    """What was seen, unless the verdict says it, and what to do."""
    text = Text.assemble((finding.severity, SEVERITY_STYLE.get(finding.severity, "")), " ")
    callback = finding.evidence.get("callback")
    is_told = _is_in(finding.message, verdict) or (isinstance(callback, str) and callback in verdict)
    lines = [*([] if is_told else [finding.message]), *([finding.advice] if finding.advice else [])]
    return text.append("\n  ".join(lines or [finding.message]))


def _time_bars(run: Run) -> Iterator[RenderableType]:
    rows, small = large_rows(run)
    if not rows:
        return
    table = new_table("")
    table.add_column("Where the time went", overflow="fold")
    for name in ("Time", "Share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        share = min(row.seconds / run.seconds, 1.0) if run.seconds > 0 else 0.0
        table.add_row(
            Text(row.label),
            seconds(row.seconds),
            percent(row.seconds, run.seconds),
            Text("█" * max(1, round(_BAR_CELLS * share)), style="cyan"),
            Text(_row_note(row), style="dim"),
        )
        for place in large_places(row, run):
            table.add_row(
                Text(f"  {place.function or place.where}", style="dim"),
                Text(seconds(place.seconds), style="dim"),
                Text(percent(place.seconds, run.seconds), style="dim"),
                "",
                Text(place.where if place.function else "", style="dim"),
            )
    if small > 0:
        table.add_row("all else", seconds(small), percent(small, run.seconds))
    yield table
    if sum(row.seconds for row in rows) > 1.01 * run.seconds:
        yield Text("Stages ran side by side, so that the shares sum to more than 100 %.", style="dim")


def _stacks(run: Run) -> Iterator[RenderableType]:
    """The parts of the time with places in the program's own code, and what looking for them cost."""
    stacks = host_stacks(run)
    if stacks is not None:
        yield from _time_bars(run)
        yield Text(
            f"Indented rows are by {stacks.samples:,} samples of stacks, which took {100 * stacks.cost_share:.2f} % of the time.",
            style="dim",
        )


def _row_note(row: TimeShare) -> str:
    if row.callback is not None:
        return row.callback
    if row.packages:
        return in_words(row.packages)
    return times_in_words(row)


def _damage(run: Run) -> Iterator[Text]:
    for wrong in islice(impossible_times(run), _MOST_DAMAGE):
        yield Text(f"Damaged: {wrong}.", style="yellow")


def render_run(run: Run) -> RenderableType:
    """Return the record in full: headline, machine, stages, tensors, devices, errors, findings."""
    parts: list[RenderableType] = [
        Rule(Text(f"Run: {in_one_line(run.name)}")),
        Text(headline(run, with_whole_error=False), style="bold"),  # `_errors` has all of it
        *_acting(run),
        *_header(run),
        *_stacks(run),
        _stage_table(run),
    ]
    if run.folded is not None:
        parts.append(_folded_table(run.folded))
    devices = accelerator_table(run)
    if devices is not None:
        parts.append(devices)
    parts += untimed_lines(run)
    if any(stage.tensors for stage in run.walk()):
        parts.append(_tensor_table(run))
    parts += owner_lines(run)
    parts += device_lines(run)
    parts += _damage(run)
    parts += _errors(run)
    parts += map(_finding, run_findings(run))
    return Harmless(Group(*parts))


def _header(run: Run) -> Iterator[RenderableType]:
    state = "" if run.complete else " (not complete)"
    yield Text(f"Started {run.started_at}, {took(run.seconds)}{state}")
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


def _folded_table(folded: Folded) -> Table:
    table = new_table(f"\nAnd {folded_in_words(folded)}")
    table.add_column("Stages", overflow="fold")
    for name in ("Count", "Together", "Each", "Longest", "Failed", "Steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for path, sums in sorted(folded.stages.items()):
        *around, name = names_in(path)
        together = [
            seconds(duration) for duration in (sums.seconds, sums.seconds / sums.count, sums.longest_seconds)
        ]
        steps = f"{sums.steps:,} × {seconds(sums.step_seconds / sums.steps)}" if sums.steps else ""
        table.add_row(
            Text("  " * len(around) + in_one_line(name)),
            f"{sums.count:,}",
            *together,
            f"{sums.failures or ''}",
            steps,
        )
    return table


def new_table(title: str | Text) -> Table:
    """An empty table with one space between its columns, whose rows fit 80 columns."""
    return Table(
        title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False, collapse_padding=True
    )


def with_depth(run: Run) -> Iterator[tuple[int, Stage]]:
    """Each stage, outer ones before those in them, with the number of stages around it."""

    def below(stage: Stage, depth: int) -> Iterator[tuple[int, Stage]]:
        yield depth, stage
        for child in stage.children:
            yield from below(child, depth + 1)

    for stage in run.stages:
        yield from below(stage, 0)


def stage_name(depth: int, stage: Stage) -> Text:
    """A mark of success and the stage's name, indented by its depth."""
    mark, style = ("✓", "green") if stage.success else ("✗", "red")
    return Text("  " * depth).append(mark, style).append(f" {in_one_line(stage.name)}")


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
            table.add_row(Text(in_one_line(outermost.name), style="bold"))
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
    for name, error in failures(run):
        yield Text.assemble(("✗ ", "red"), f"{name} failed: {error}")
    yield from _raised_at(run, "\n  ")


def _raised_at(run: Run, between: str) -> Iterator[Text]:
    """The way to where the failure was raised."""
    places = failure_places(run)
    if places:
        yield Text("Raised at" + between.replace("→ ", "") + between.join(places), style="dim")


def _finding(finding: Finding) -> RenderableType:
    where = f" [{in_one_line(finding.stage)}]" if finding.stage else ""
    text = Text.assemble(
        (finding.severity, SEVERITY_STYLE.get(finding.severity, "")), f"{where} {finding.message}"
    )
    text.append(f" [{finding.id}]", "dim")
    if finding.evidence:
        known = (f"{key} {value}" for key, value in finding.evidence.items() if value is not None)
        text.append("\n  " + ", ".join(known))
    if finding.advice:
        text.append(f"\n  What to do: {finding.advice}")
    return text


def accelerator_table(run: Run) -> Table | None:
    """A row for each stage; None where no device was watched.

    A host that only queues work is done before the device.
    """
    if not any(stage.peak and stage.peak.accelerators for stage in run.walk()):
        return None
    table = new_table("\nAccelerator (memory in MiB)")
    table.add_column("Stage", overflow="fold")
    for name in ("GPU time", "GPU +/-", "GPU peak", "at"):
        table.add_column(name, justify="right", no_wrap=True)
    for depth, stage in with_depth(run):
        row: list[RenderableType] = [
            stage_name(depth, stage),
            _gpu_time(stage),
            _gpu_change(stage),
            *_gpu_peak(stage),
        ]
        table.add_row(*row)
    return table


def _gpu_time(stage: Stage) -> str:
    return seconds(device_seconds(stage))


def _gpu_change(stage: Stage) -> str:
    if stage.memory is None:
        return UNKNOWN
    before = {m.device: m.allocated_bytes for m in stage.memory.baseline.accelerators}
    return "\n".join(
        mib_change(before.get(m.device), m.allocated_bytes) for m in stage.memory.current.accelerators
    )


def _gpu_peak(stage: Stage) -> tuple[str, str]:
    if stage.peak is None:
        return UNKNOWN, UNKNOWN
    devices = stage.peak.accelerators
    return (
        "\n".join(mib(device.allocated_bytes) for device in devices),
        "\n".join(seconds(device.allocated_at_seconds) for device in devices),
    )


def untimed_lines(run: Run) -> Iterator[RenderableType]:
    """A line for each stage of which the accelerator timed some steps and not all."""
    for stage in run.walk():
        column = stage.steps.gpu_seconds
        missing = column.count(None)
        if 0 < missing < len(column):
            why = stage.steps.unavailable.get("gpu_seconds", "no reason is on record")
            yield Text(
                f"{in_one_line(stage.name)}: GPU time of {missing} of {len(column)} steps is not known ({why})."
            )


def owner_lines(run: Run) -> Iterator[Text]:
    """A line for the process and for each device, where the peak lies in a component's work."""
    for owner in peak_owners(run):
        if owner.component is not None:
            yield Text(_owner_line(owner))


def _owner_line(owner: PeakOwner) -> str:
    what = "Peak of the process" if owner.where == PROCESS else f"Peak on {owner.where}"
    stage = in_one_line(names_in(owner.stage)[-1])
    by = owner.component if stage == owner.component else f"{owner.component} in {stage}"
    at = "" if owner.at_seconds is None else f" at {seconds(owner.at_seconds)}"
    return f"{what}: {mib(owner.bytes)} MiB{at}, {by}{_owner_figures(owner)}"


def _owner_figures(owner: PeakOwner) -> str:
    grown = None if owner.grown_bytes is None else f"{mib(owner.grown_bytes)} MiB more than before"
    weights = None if owner.component_bytes is None else f"its weights {mib(owner.component_bytes)} MiB"
    figures = ", ".join(words for words in (grown, weights) if words is not None)
    return f" ({figures})" if figures else ""


def device_lines(run: Run) -> Iterator[RenderableType]:
    """A line for each stage and device that was sampled, then the tables of each profile.

    What a caller's own facts of these names hold is left to whoever put it there.
    """
    for stage in run.walk():
        for device in readable_utilization(stage):
            yield Text(f"{in_one_line(stage.name)}, {device.device}: {_utilization_words(device)}")
    for stage in run.walk():
        try:
            yield from map(render_profile, profiles_of(stage))
        except (TypeError, ValueError):
            continue


def _utilization_words(device: DeviceUtilization) -> str:
    busy, warmth, power = device.busy_percent, device.temperature_celsius, device.power_watts
    parts = [f"busy {busy.mean:.0f} % (highest {busy.highest:.0f} %)"] if busy else ["load unknown"]
    parts += [f"up to {warmth.highest:.0f} °C"] if warmth else []
    parts += [f"{power.mean:.0f} W"] if power else []
    parts += [f"slowed by heat {device.heat_percent:.0f} %"] if device.heat_percent else []
    parts += [f"at its power limit {device.power_cap_percent:.0f} %"] if device.power_cap_percent else []
    return ", ".join(parts)


def render_profile(profile: StepsProfile) -> RenderableType:
    """Return both tables, or why there are none. Times are a call's mean, of the device where there is one."""
    numbers = ", ".join(map(str, profile.steps)) or "none"
    title = f"\nProfile of {profile.class_name}, steps: {numbers}"
    parts: list[RenderableType] = [_block_table(title, profile) if profile.whole else Text(title)]
    if profile.operators:
        parts.append(_operator_table(profile))
    parts += [Text(f"Not seen: {name}: {reason}", style="dim") for name, reason in _profile_gaps(profile)]
    parts += [Text(f"Trace: {path}") for path in profile.traces]
    return Harmless(Group(*parts))


def _block_table(title: str, profile: StepsProfile) -> Table:
    table = new_table(Text(title))
    table.add_column("Block", overflow="fold")
    for name in ("Calls", "Device" if profile.device else "CPU", "Share", "Python", "MiB", "growth"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = profile.whole or BlockProfile("", profile.class_name, 0, 0.0, 0.0)
    for block in (*profile.blocks, whole):
        table.add_row(
            Text(block.name or "all", style="" if block.name else "bold"),
            str(block.calls),
            seconds(_block_seconds(block) / max(1, block.calls)),
            percent(_block_seconds(block), _block_seconds(whole)),
            percent(block.self_cpu_seconds, block.cpu_seconds),
            mib(block.allocated_bytes),
            mib(block.peak_growth_bytes),
        )
    return table


def _block_seconds(block: BlockProfile) -> float:
    return block.cpu_seconds if block.device_seconds is None else block.device_seconds


def _operator_table(profile: StepsProfile) -> Table:
    table = new_table(Text("\nOperators by their own time"))
    table.add_column("Operator", overflow="fold")
    for name in ("Calls", "CPU", "Device"):
        table.add_column(name, justify="right", no_wrap=True)
    for operator in profile.operators[:_MOST_OPERATORS]:
        device = UNKNOWN if operator.self_device_seconds is None else seconds(operator.self_device_seconds)
        table.add_row(Text(operator.name), str(operator.calls), seconds(operator.self_cpu_seconds), device)
    return table


def _profile_gaps(profile: StepsProfile) -> list[tuple[str, str]]:
    """What is worth a line: that there is no accelerator shows in the heading already."""
    return [(name, why) for name, why in profile.unavailable.items() if name != "device_seconds"]
