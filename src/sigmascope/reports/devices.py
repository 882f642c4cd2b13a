"""How busy the devices were, and what profiles saw, for the record of a run in the terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from sigmascope.records.profile import profiles_of
from sigmascope.records.run import Run
from sigmascope.records.utilization import DeviceUtilization, readable_utilization
from sigmascope.reports.profile import render_profile


def device_lines(run: Run) -> Iterator[RenderableType]:
    """A line for each stage and device that was sampled, then the tables of each profile.

    What a caller's own facts of these names hold is left to whoever put it there.
    """
    for stage in run.walk():
        for device in readable_utilization(stage):
            yield Text(f"{stage.name}, {device.device}: {_words(device)}")
    for stage in run.walk():
        try:
            yield from map(render_profile, profiles_of(stage))
        except (TypeError, ValueError):
            continue


def _words(device: DeviceUtilization) -> str:
    busy, warmth, power = device.busy_percent, device.temperature_celsius, device.power_watts
    parts = [f"busy {busy.mean:.0f} % (highest {busy.highest:.0f} %)"] if busy else ["business unknown"]
    parts += [f"up to {warmth.highest:.0f} °C"] if warmth else []
    parts += [f"{power.mean:.0f} W"] if power else []
    parts += [f"slowed by heat {device.heat_percent:.0f} %"] if device.heat_percent else []
    parts += [f"at its power limit {device.power_cap_percent:.0f} %"] if device.power_cap_percent else []
    return ", ".join(parts)
