"""What a run took, as the page's table shows it: made from the record and nothing else."""

from typing import Any

from sigmascope.lbm.serving.limits import MIB
from sigmascope.records.run import Run, Stage


def timings(run: Run) -> dict[str, Any]:
    """Seconds, steps and memory peaks of a run and its stages.

    Returns:
        `seconds`, `peak_rss_mib`, `peak_gpu_mib`, and `stages`, each with `name`, `seconds`, `steps` (seconds
        each) and its own two peaks. None where a peak is not known, as of a GPU where there is none.
    """
    peak = run.peak()
    device = peak.busiest_device()
    return {
        "seconds": run.seconds,
        "peak_rss_mib": _mib(peak.rss_bytes),
        "peak_gpu_mib": None if device is None else _mib(peak.accelerator(device).allocated_bytes),
        "stages": [_stage(stage, device) for stage in run.stages],
    }


def _stage(stage: Stage, device: str | None) -> dict[str, Any]:
    peak = stage.peak
    on_device = None if peak is None or device is None else peak.accelerator(device).allocated_bytes
    return {
        "name": stage.name,
        "seconds": stage.seconds,
        "steps": list(stage.steps.seconds),
        "peak_rss_mib": None if peak is None else _mib(peak.rss_bytes),
        "peak_gpu_mib": _mib(on_device),
    }


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB
