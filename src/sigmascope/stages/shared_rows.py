"""Rows that the summaries of several stages have: peaks of memory, and what was raised."""

from collections.abc import Iterator, Mapping
from typing import Any

from sigmascope.stages.figures import mb, printable, reason_for, seconds, unknown
from sigmascope.stages.summary import Row

NO_ACCELERATOR = "no accelerator was found: GPU memory was not measured"
BAD = "red"

_LAST_LINES = 6  # of a traceback

Facts = Mapping[str, Any]


def part(facts: Facts, name: str) -> Facts:
    """A dict inside a dict; empty where something else, or nothing, stands there."""
    found = facts.get(name)
    return found if isinstance(found, Mapping) else {}


def peak_rows(analysis: Facts) -> Iterator[Row]:
    """The peaks of an analysis (SPEC section 2), of the process, the machine and each device, or why there are none."""
    peak = part(analysis, "peak_memory")
    if not peak:
        yield Row("Peaks", unknown(reason_for(analysis, "peak_memory")))
        return
    process, ram = part(peak, "process"), part(peak, "ram")
    yield Row("Process", f"{mb(process.get('peak_rss_mb'))} at {seconds(process.get('peak_rss_at_seconds'))}")
    yield Row("RAM", f"{mb(ram.get('peak_used_mb'))} at {seconds(ram.get('peak_used_at_seconds'))}")
    for device, gpu in part(peak, "gpus").items():
        for what in ("allocated", "reserved"):
            at = seconds(gpu.get(f"peak_{what}_at_seconds"))
            yield Row(f"{printable(device)} {what}", f"{mb(gpu.get(f'peak_{what}_mb'))} at {at}")


def error_rows(analysis: Facts) -> Iterator[Row]:
    """What the watched code raised, with the last lines of its traceback."""
    if analysis.get("error"):
        yield Row("Error", printable(analysis["error"]), BAD)
    details = part(analysis, "exception_details")
    for line in str(details.get("traceback", "")).splitlines()[-_LAST_LINES:]:
        yield Row("  ", printable(line, 160))
