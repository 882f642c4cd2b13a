"""The words of the live line."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from sigmascope import units
from sigmascope.monitor.guard import describe
from sigmascope.monitor.step_progress import StepProgress
from sigmascope.records.performance import PerformanceMetrics

_NAME_CELLS = 24


def running_text(
    metrics: PerformanceMetrics, progress: StepProgress, busy_percent: Mapping[str, float]
) -> str:
    """How a running generation is doing: `FLUX 12/20 · 412 ms a step · 4.90 s of 8.20 s, target 5.00 s missed · GPU 97 %`.

    Args:
        metrics: Its name.
        progress: Where it is.
        busy_percent: Of each device.
    """
    parts = [_name(metrics)]
    if progress.step:
        planned = f"/{progress.steps}" if progress.steps else ""
        parts = [
            f"{_name(metrics)} {progress.step}{planned}",
            f"{units.seconds(progress.step_seconds)} a step",
        ]
    parts.append(_times(progress))
    if busy_percent:
        parts.append("GPU " + ", ".join(f"{percent:.0f} %" for percent in busy_percent.values()))
    return " · ".join(parts)


def _times(progress: StepProgress) -> str:
    elapsed, target = units.seconds(progress.elapsed_seconds), units.seconds(progress.target_seconds)
    ahead = progress.step and progress.steps > progress.step
    whole = f"{elapsed} of {units.seconds(progress.projected_seconds)}" if ahead else elapsed
    return f"{whole}, target {target}" + (" missed" if progress.misses_target else "")


def over_text(metrics: PerformanceMetrics, error: BaseException | None) -> str:
    """How a generation ended: `FLUX: 4.83 s, meets the target of 5.00 s (score 100.0)`."""
    took = units.seconds(metrics.total_generation_time)
    if error is not None:
        return printable(f"{_name(metrics)}: ended after {took} by {describe(error)}")
    relation = "meets" if metrics.target_met else "misses"
    target = units.seconds(metrics.target_generation_time)
    return f"{_name(metrics)}: {took}, {relation} the target of {target} (score {metrics.performance_score})"


def together(texts: Sequence[str]) -> str:
    """Several generations in one line, with their number in front: the line may be too narrow for all."""
    return " | ".join(texts) if len(texts) < 2 else f"{len(texts)} running: " + " | ".join(texts)


def fitted(text: str, width: int) -> str:
    """The text in exactly that many cells of a terminal: cut with "…", or filled with spaces."""
    if cell_len(text) > width:
        text = set_cell_size(text, max(0, width - 1)) + "…"
    return set_cell_size(text, max(0, width))


def printable(text: str) -> str:
    """The text in one line, without characters that would move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _name(metrics: PerformanceMetrics) -> str:
    name = printable(metrics.model_name) or "generation"
    return name if cell_len(name) <= _NAME_CELLS else set_cell_size(name, _NAME_CELLS - 1) + "…"
