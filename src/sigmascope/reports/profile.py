"""Which blocks and operators of a denoiser take its time, as tables. Fits 80 columns."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sigmascope.records.profile import BlockProfile, StepsProfile
from sigmascope.reports.harmless import Harmless
from sigmascope.units import UNKNOWN, mib, percent, seconds

_MOST_OPERATORS = 10


def print_profile(profile: StepsProfile, console: Console | None = None) -> None:
    """Print the blocks and the most expensive operators.

    Args:
        profile: What `profile_steps` saw.
        console: Where to; standard output by default, plain when that is no terminal.
    """
    (console or Console()).print(render_profile(profile))


def render_profile(profile: StepsProfile) -> RenderableType:
    """Return both tables, or why there are none. Times are a call's mean, of the device where there is one."""
    numbers = ", ".join(map(str, profile.steps)) or "none"
    title = f"\nProfile of {profile.class_name}, steps: {numbers}"
    parts: list[RenderableType] = [_block_table(title, profile) if profile.whole else Text(title)]
    if profile.operators:
        parts.append(_operator_table(profile))
    parts += [Text(f"Not seen: {name}: {reason}", style="dim") for name, reason in _gaps(profile)]
    parts += [Text(f"Trace: {path}") for path in profile.traces]
    return Harmless(Group(*parts))


def _block_table(title: str, profile: StepsProfile) -> Table:
    table = _table(title)
    table.add_column("Block", overflow="fold")
    for name in ("Calls", "Device" if profile.device else "CPU", "Share", "Python", "MiB", "growth"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = profile.whole or BlockProfile("", profile.class_name, 0, 0.0, 0.0)
    for block in (*profile.blocks, whole):
        table.add_row(
            Text(block.name or "all", style="" if block.name else "bold"),
            str(block.calls),
            seconds(_cost(block) / max(1, block.calls)),
            percent(_cost(block), _cost(whole)),
            percent(block.self_cpu_seconds, block.cpu_seconds),
            mib(block.allocated_bytes),
            mib(block.peak_growth_bytes),
        )
    return table


def _operator_table(profile: StepsProfile) -> Table:
    table = _table("\nOperators by their own time")
    table.add_column("Operator", overflow="fold")
    for name in ("Calls", "CPU", "Device"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in profile.operators[:_MOST_OPERATORS]:
        device = UNKNOWN if one.self_device_seconds is None else seconds(one.self_device_seconds)
        table.add_row(Text(one.name), str(one.calls), seconds(one.self_cpu_seconds), device)
    return table


def _table(title: str) -> Table:
    return Table(
        title=Text(title),
        title_justify="left",
        box=None,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )


def _cost(block: BlockProfile) -> float:
    return block.cpu_seconds if block.device_seconds is None else block.device_seconds


def _gaps(profile: StepsProfile) -> list[tuple[str, str]]:
    """What is worth a line: that there is no accelerator shows in the heading already."""
    return [(name, why) for name, why in profile.unavailable.items() if name != "device_seconds"]
