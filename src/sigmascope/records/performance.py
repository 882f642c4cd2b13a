"""`PerformanceMetrics`: one generation in one row, and the dicts made of it (SPEC section 6).

Here alone GB is 10⁹ bytes. The defaults stand for "not filled in yet"; what a finished generation could not
measure is None, with the reason in its `Run`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypedDict

from sigmascope.records.structure import from_plain


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass(slots=True)
class PerformanceMetrics:
    """Time, memory and target of one generation. Times are seconds, percentages 0-100.

    Attributes:
        generation_time_per_step: Mean of the steps that were timed; when it is over, of those that the accelerator was seen
            to finish, by its clock, if there are such.
        pipeline_setup_time: From the beginning of the generation to its first step.
        gpu_memory_used_gb: The peak of what PyTorch allocated during the generation, on the device in use.
        system_memory_used_gb: In use on the whole machine at the end.
        performance_score: See `sigmascope.analysis.score.performance_score`.
        image_resolution: (width, height).
        timestamp: When the generation began, ISO 8601 in UTC.
    """

    model_load_time: float | None = 0.0
    generation_time_per_step: float | None = 0.0
    total_generation_time: float | None = 0.0
    pipeline_setup_time: float | None = 0.0
    gpu_memory_used_gb: float | None = 0.0
    gpu_memory_total_gb: float | None = 0.0
    gpu_memory_utilization_percent: float | None = 0.0
    system_memory_used_gb: float | None = 0.0
    system_memory_utilization_percent: float | None = 0.0
    num_inference_steps: int = 0
    image_resolution: tuple[int, int] = (0, 0)
    batch_size: int = 1
    target_met: bool | None = False
    target_generation_time: float = 5.0
    performance_score: float | None = 0.0
    architecture_type: str = "MMDiT"
    model_name: str = ""
    torch_dtype: str | None = "float16"
    device: str | None = "cuda"
    timestamp: str = field(default_factory=_now)
    gpu_name: str | None = ""
    driver_version: str | None = ""

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"image_resolution": list(self.image_resolution)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PerformanceMetrics":
        """Metrics from `as_dict`, or from the `current_metrics` of an exported file; unknown names are left out.

        Raises:
            ValueError: A value is of another type than its field; the message says which.
        """
        known = {one.name for one in fields(cls)}
        return from_plain(
            {name: value for name, value in values.items() if name in known}, cls, "current_metrics"
        )


class CurrentGenerationDict(TypedDict):
    """`current_generation` of a performance summary."""

    total_time: float | None
    per_step_time: float | None
    target_met: bool | None
    performance_score: float | None
    model_name: str
    architecture: str
    steps: int
    resolution: str


class MemoryUsageDict(TypedDict):
    """`memory_usage` of a performance summary; GB are 10⁹ bytes."""

    gpu_memory_gb: float | None
    gpu_utilization_percent: float | None
    system_memory_gb: float | None
    system_utilization_percent: float | None


class HardwareInfoDict(TypedDict):
    """`hardware_info` of a performance summary."""

    gpu_name: str | None
    gpu_total_memory_gb: float | None
    device: str | None
    driver_version: str | None


class TargetConfigurationDict(TypedDict):
    """`target_configuration` of a performance summary."""

    target_time: float
    torch_dtype: str | None


class HistoricalPerformanceDict(TypedDict):
    """`historical_performance`: the finished generations that are kept. `success_rate` is 0-100, of targets met."""

    total_generations: int
    avg_generation_time: float
    min_generation_time: float
    max_generation_time: float
    avg_performance_score: float
    success_rate: float


class StepPerformanceDict(TypedDict):
    """`step_performance`: the steps that are kept."""

    total_steps: int
    avg_step_time: float
    min_step_time: float
    max_step_time: float


class _Summary(TypedDict):
    current_generation: CurrentGenerationDict
    memory_usage: MemoryUsageDict
    hardware_info: HardwareInfoDict
    target_configuration: TargetConfigurationDict


class PerformanceSummaryDict(_Summary, total=False):
    """What `PerformanceMonitor.get_performance_summary` gives; the last two once there is history."""

    historical_performance: HistoricalPerformanceDict
    step_performance: StepPerformanceDict


class ComparedGenerationDict(TypedDict):
    """One side of a before/after comparison."""

    total_time: float | None
    per_step_time: float | None
    target_met: bool | None
    performance_score: float | None
    model: str


class ImprovementDict(TypedDict):
    """What became better: positive is faster. None where a side is not known or zero."""

    total_time_percent: float | None
    per_step_time_percent: float | None
    performance_score_change: float | None
    target_status_change: str


class ComparisonSummaryDict(TypedDict):
    """The comparison in four answers. `improvement_factor` is before / after."""

    faster: bool | None
    improvement_factor: float | None
    meets_target_now: bool | None
    significant_improvement: bool | None


class BeforeAfterDict(TypedDict):
    """What `PerformanceMonitor.get_before_after_comparison` gives."""

    before: ComparedGenerationDict
    after: ComparedGenerationDict
    improvement: ImprovementDict
    summary: ComparisonSummaryDict
