"""What each stage took of the accelerators: their time, and their memory."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.records.run import Run, Stage
from sigmascope.records.stage_seconds import device_seconds
from sigmascope.reports.stage_rows import new_table, stage_name, with_depth
from sigmascope.units import UNKNOWN, mib, mib_change, seconds


def accelerator_table(run: Run) -> Table | None:
    """A row for each stage; None where no device was watched. A host that only queues work is done before the device."""
    if not any(stage.peak and stage.peak.accelerators for stage in run.walk()):
        return None
    made = new_table("\nAccelerator (memory in MiB)")
    made.add_column("Stage", overflow="fold")
    for name in ("GPU time", "GPU +/-", "GPU peak", "at"):
        made.add_column(name, justify="right", no_wrap=True)
    for depth, stage in with_depth(run):
        row: list[RenderableType] = [
            stage_name(depth, stage),
            _time(stage),
            _gpu_change(stage),
            *_gpu_peak(stage),
        ]
        made.add_row(*row)
    return made


def untimed_lines(run: Run) -> Iterator[RenderableType]:
    """A line for each stage of which the accelerator timed some steps and not all."""
    for stage in run.walk():
        column = stage.steps.gpu_seconds
        missing = column.count(None)
        if 0 < missing < len(column):
            why = stage.steps.unavailable.get("gpu_seconds", "no reason is on record")
            yield Text(f"{stage.name}: GPU time of {missing} of {len(column)} steps is not known ({why}).")


def _time(stage: Stage) -> str:
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
