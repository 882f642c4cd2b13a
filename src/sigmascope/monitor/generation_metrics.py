"""From a generation's record to its row of metrics (SPEC section 6)."""

from statistics import fmean

from sigmascope.analysis.score import meets_target, performance_score
from sigmascope.analysis.step_times import is_timed_on_device, known, step_seconds
from sigmascope.monitor.generation_steps import STEPS_OF_OTHERS
from sigmascope.monitor.step_tally import StepTally
from sigmascope.records.host import HostFacts
from sigmascope.records.memory import MemorySnapshot
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.run import Stage

_GB = 1e9


def fill_times(metrics: PerformanceMetrics, total: float | None, per_step: float | None) -> None:
    """Total, step time, and what follows from them for the target."""
    metrics.total_generation_time = total
    metrics.generation_time_per_step = per_step
    metrics.target_met = meets_target(total, metrics.target_generation_time)
    metrics.performance_score = performance_score(total, metrics.target_generation_time)


def mean_step_seconds(stage: Stage | None, tally: StepTally) -> float | None:
    """Mean of the steps: by the accelerator's clock of those it was seen to finish, else by the host's.

    A step that is still on the device when the generation ends is none of them; the record says how many there were.

    Args:
        stage: The generation's record.
        tally: What was counted while it ran; the host's clock only sees how long a step took to queue.
    """
    parts = () if stage is None else tuple(stage.walk())
    own = [part for part in parts if part.name not in STEPS_OF_OTHERS and is_timed_on_device(part)]
    seconds = [one for part in own for one in step_seconds(part)]
    on_device = known(seconds)
    return fmean(on_device) if on_device and len(seconds) == tally.count else tally.mean_seconds()


def fill_memory(metrics: PerformanceMetrics, stage: Stage | None, host: HostFacts | None) -> None:
    """Memory and hardware, from the stage's end and its peak; None for what was not measured."""
    snapshot = MemorySnapshot() if stage is None or stage.memory is None else stage.memory.current
    device = snapshot.device_in_use()
    memory = snapshot.accelerator(device or "")
    peak = None if stage is None or stage.peak is None or device is None else stage.peak.accelerator(device)
    used = memory.allocated_bytes if peak is None else peak.allocated_bytes
    metrics.device = device or "cpu"
    metrics.gpu_memory_used_gb = _gb(used)
    metrics.gpu_memory_total_gb = _gb(memory.total_bytes)
    metrics.gpu_memory_utilization_percent = _percent(used, memory.total_bytes)
    metrics.system_memory_used_gb = _gb(snapshot.ram_used_bytes)
    metrics.system_memory_utilization_percent = snapshot.ram_percent_used()
    facts = next((one for one in (host.accelerators if host else ()) if one.device == device), None)
    metrics.gpu_name = None if facts is None else facts.name
    metrics.driver_version = None if facts is None else facts.driver_version


def _gb(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / _GB


def _percent(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole * 100
