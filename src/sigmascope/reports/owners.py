"""Whose the highest memory of a run is, as lines."""

from collections.abc import Iterator

from rich.text import Text

from sigmascope.analysis.peak_owners import PeakOwner, peak_owners
from sigmascope.records.memory_over_time import PROCESS
from sigmascope.records.run import Run
from sigmascope.units import mib, seconds


def owner_lines(run: Run) -> Iterator[Text]:
    """A line for the process and for each device, where the peak lies in a component's work."""
    for owner in peak_owners(run):
        if owner.component is not None:
            yield Text(_line(owner))


def _line(owner: PeakOwner) -> str:
    what = "Peak of the process" if owner.where == PROCESS else f"Peak on {owner.where}"
    stage = owner.stage.rsplit("/", 1)[-1]
    by = owner.component if stage == owner.component else f"{owner.component} in {stage}"
    at = "" if owner.at_seconds is None else f" at {seconds(owner.at_seconds)}"
    return f"{what}: {mib(owner.bytes)} MiB{at}, {by}{_shares(owner)}"


def _shares(owner: PeakOwner) -> str:
    grown = None if owner.grown_bytes is None else f"{mib(owner.grown_bytes)} MiB more than before"
    weights = None if owner.component_bytes is None else f"its weights {mib(owner.component_bytes)} MiB"
    told = ", ".join(one for one in (grown, weights) if one is not None)
    return f" ({told})" if told else ""
