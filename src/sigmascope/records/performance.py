"""The figures of generations, benchmark cases, served requests, profiled steps, and busy devices.

`PerformanceMetrics` is one generation, followed by the dicts made of it. Here alone GB is 10⁹ bytes. Its
defaults stand for "not filled in yet"; what a finished generation could not measure is None, with the reason
in its `Run`.

`BenchCase` is the setting of a benchmark's case; what each repeat says of itself is a fact of its run.
`RequestRecord` is one request that a server answered, with the generations made for it. `StepsProfile` is
what a profiler saw of chosen steps, block by block.

`DeviceUtilization` and `MemoryCurve` are what a background thread saw during a stage: how busy each accelerator was,
how warm, and whether it was held back; and memory over time. Both are facts of the stage. `HostStacks` is where the program's own code was while no step ran, a
fact of the run.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, Final, NotRequired, TypedDict

from sigmascope.records.run import CallFacts, Run, Stage, is_duration
from sigmascope.records.serialization import from_plain

BENCHMARK: Final = "benchmark"
"""The fact of a run under which a benchmark notes what it ran."""


OTHERS: Final = "others_cpu_share"
CHILDREN: Final = "children_cpu_seconds"
PAGE_FAULTS: Final = "major_page_faults"
DISK_READ: Final = "disk_read_bytes"
COLLECTIONS: Final = "full_collections"
COMPILED_GRAPHS: Final = "compiled_graphs"
CACHED_GRAPHS: Final = "cached_graphs"
"""Facts of a run: how often the process had to wait for a page of memory from a disk, and what it read from disks."""
"""Of what it notes: the share of all processor threads that other programs used meanwhile, 0 to 1."""


COMPILATIONS: Final = "compilations"
"""The fact of a generation that holds its `Compilations`."""


PROCESSOR: Final = "processor"
"""The fact of a stage, and of a run, that holds its `ProcessorUse`."""


PROCESSOR_CLOCK: Final = "processor_clock"
"""The fact of an outermost stage that holds the mean clock of its processors, and how warm they were."""


PROFILES: Final = "profiles"
"""The fact of a stage in which its `StepsProfile`s lie."""


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass(slots=True)
class PerformanceMetrics:
    """Time, memory and target of one generation. Times are seconds, percentages 0-100.

    Attributes:
        generation_time_per_step: Mean of the steps that were timed; when it is over, of those that the accelerator
            was seen to finish, by its clock, if there are such. Where no step was timed, total / steps.
        pipeline_setup_time: From the beginning of the generation to its first step.
        gpu_memory_used_gb: The peak of what PyTorch allocated during the generation, on the device in use.
        system_memory_used_gb: In use on the whole machine at the end.
        performance_score: See `sigmascope.analysis.generations.performance_score`.
        image_resolution: (width, height).
        timestamp: When the generation began, ISO 8601 in UTC.
        assumed: Names of the fields that still hold a default: nobody gave a value, and none was measured.
        derived_time_per_step: What `generation_time_per_step` was set to as total / steps; None: it was not.
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
    assumed: tuple[str, ...] = ()
    derived_time_per_step: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {
            "image_resolution": list(self.image_resolution),
            "assumed": list(self.assumed),
        }

    @property
    def misses_target(self) -> bool:
        """Whether it took longer than a target that the caller gave."""
        return self.target_met is False and not self.target_assumed

    @property
    def target_assumed(self) -> bool:
        """Whether its target is the default, not one that the caller gave."""
        return "target_generation_time" in self.assumed

    def fill_assumed(self, seen: CallFacts | None, steps: int) -> None:
        """Replace defaults with what was seen of a generation, except for values that the caller gave."""
        call = seen or CallFacts()
        values: dict[str, Any] = {
            "num_inference_steps": call.num_inference_steps or steps,
            "image_resolution": (call.width, call.height) if call.width and call.height else None,
            "batch_size": call.batch_size,
        }
        for name in values.keys() & set(self.assumed):
            if values[name]:
                setattr(self, name, values[name])
        self.assumed = tuple(name for name in self.assumed if not values.get(name))

    def call_facts(self, seen: CallFacts) -> CallFacts:
        """The call as far as it is known: what was seen of it, then what the caller said."""
        width, height = (0, 0) if "image_resolution" in self.assumed else self.image_resolution
        steps = 0 if "num_inference_steps" in self.assumed else self.num_inference_steps
        batch = 0 if "batch_size" in self.assumed else self.batch_size
        return replace(
            seen,
            num_inference_steps=seen.num_inference_steps or steps or None,
            width=seen.width or width or None,
            height=seen.height or height or None,
            batch_size=seen.batch_size or batch or None,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PerformanceMetrics":
        """Metrics from `as_dict`, or from the `current_metrics` of an exported file; unknown names are left out.

        Raises:
            ValueError: A value is of another type than its field; the message says which.
        """
        known = {entry.name for entry in fields(cls)}
        return from_plain(
            {name: value for name, value in values.items() if name in known}, cls, "current_metrics"
        )


class StepTimeDict(TypedDict):
    """Seconds of a step; `per_step_time_derived` is there, and True, where they are total / steps."""

    per_step_time: float | None
    per_step_time_derived: NotRequired[bool]


class AssumedDict(TypedDict, total=False):
    """Which values of a generation are only defaults; a key is there only if there are any.

    `assumed` names them in a summary. With `target_assumed`, status and score of a comparison are those of the default.
    """

    assumed: list[str]
    target_assumed: bool


class CurrentGenerationDict(StepTimeDict, AssumedDict):
    """`current_generation` of a performance summary."""

    total_time: float | None
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


class ComparedGenerationDict(StepTimeDict, AssumedDict):
    """One side of a before/after comparison."""

    total_time: float | None
    target_met: bool | None
    performance_score: float | None
    model: str


class ImprovementDict(TypedDict):
    """Improvements: positive is faster. None if either value is unknown or zero.

    `target_status_change` is whether one side met its target and the other missed it, `target_status` says which.
    """

    total_time_percent: float | None
    per_step_time_percent: float | None
    performance_score_change: float | None
    target_status_change: bool
    target_status: str


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


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One setting that is measured by itself. None: the pipeline's own.

    Attributes:
        width: Of the picture, in pixels.
        height: Of the picture, in pixels.
        batch: Pictures, or videos, that one generation makes.
        steps: Denoising steps.
        frames: Of a video.
    """

    width: int | None = None
    height: int | None = None
    batch: int = 1
    steps: int | None = None
    frames: int | None = None

    @property
    def label(self) -> str:
        """Such as "1024x1024-b1-s20": the beginning of its files' names, and what `compare` sorts runs by."""
        size = None if self.width is None or self.height is None else f"{self.width}x{self.height}"
        parts = (
            size,
            f"b{self.batch}",
            None if self.frames is None else f"f{self.frames}",
            None if self.steps is None else f"s{self.steps}",
        )
        return "-".join(part for part in parts if part is not None)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values, with the label as `work`."""
        return {"work": self.label, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Made:
    """What one generation produced. None: unknown from the given values.

    Attributes:
        samples: Pictures, or videos.
        width: In pixels.
        height: In pixels.
        frames: Of each video.
    """

    samples: int
    width: int | None = None
    height: int | None = None
    frames: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessorUse:
    """What the processor gave this process during a stage or a run, and what it was made to wait for.

    Attributes:
        own_seconds: Processor time of the process, all of its threads, whatever they worked at.
        waited_seconds: How long the thread of the stage was ready to run and had no processor. None: not known, as all below.
        throttled_seconds: How long a quota held the process's control group back.
        stopped_seconds: How long none of its threads could run at all, though they waited for no processor: it was stopped, or frozen.
        minor_faults: Pages of memory that were given out, or found in memory.
        major_faults: Pages that had to be read from a disk.
    """

    own_seconds: float
    waited_seconds: float | None = None
    throttled_seconds: float | None = None
    stopped_seconds: float | None = None
    minor_faults: int | None = None
    major_faults: int | None = None


def processor_use_of(facts: Mapping[str, Any]) -> ProcessorUse | None:
    """What a stage or a run, of its facts, used of the processor; None where it is not recorded or cannot be."""
    noted = facts.get(PROCESSOR)
    if not isinstance(noted, Mapping):
        return None
    kept = {name: value for name, value in noted.items() if is_duration(value)}
    if "own_seconds" not in kept:
        return None
    return ProcessorUse(**{entry.name: kept.get(entry.name) for entry in fields(ProcessorUse)})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Compilations:
    """What torch.compile did during a generation.

    Attributes:
        count: How many graphs it compiled, or took from its cache.
        seconds: What that took together.
        why: Why functions were compiled again, the most frequent reasons; nothing for those compiled for the first time.
        from_cache: How many graphs inductor's cache on disk held.
        not_in_cache: How many it did not.
        gave_up: Whether a function had been compiled as often as is allowed, so that from now on it runs as written.
    """

    count: int = 0
    seconds: float = 0.0
    why: tuple[str, ...] = ()
    from_cache: int = 0
    not_in_cache: int = 0
    gave_up: bool = False


def compilations_of(facts: Mapping[str, Any]) -> Compilations | None:
    """What torch.compile did in a generation, of its facts; None where that is not recorded."""
    noted = facts.get(COMPILATIONS)
    try:
        return None if noted is None else from_plain(noted, Compilations, COMPILATIONS)
    except ValueError:  # facts that somebody changed by hand
        return None


def others_of(facts: Mapping[str, Any]) -> float | None:
    """How busy others kept the processor during a run, of its facts; None: not known."""
    noted = facts.get(BENCHMARK)
    share = noted.get(OTHERS) if isinstance(noted, Mapping) else facts.get(OTHERS)
    return float(share) if isinstance(share, int | float) else None


def clock_of(run: Run) -> float | None:
    """The gigahertz that the processors' clocks ran at in a run: the median of its outermost stages; None: not known."""
    noted = [stage.facts.get(PROCESSOR_CLOCK) for stage in run.stages]
    told = [clock.get("gigahertz") for clock in noted if isinstance(clock, Mapping)]
    known = [value for value in told if isinstance(value, int | float) and is_duration(value) and value > 0]
    return median(known) if known else None


def work_of(facts: Mapping[str, Any]) -> str:
    """What work a run did, of its facts: the label of its case; empty for a run that no benchmark made."""
    noted = facts.get(BENCHMARK)
    label = noted.get("work") if isinstance(noted, Mapping) else None
    return label if isinstance(label, str) else ""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one HTTP request took. No query, header or body is kept.

    Attributes:
        request_id: Of the incoming header, or made.
        method: Such as "POST".
        path: Without the query.
        started_at: ISO 8601 in UTC.
        seconds: From the first line to the end of the response.
        first_byte_seconds: Until the response began; None: it never did.
        status: Of the response; None: the application sent none.
        request_bytes: The size of the body that the application read.
        response_bytes: Of the body, before the server compresses or frames it.
        in_flight: How many requests were being served when this one began, itself included.
        error: What the application raised.
        disconnected: Whether the client went away before the response was complete.
        generations: The metrics of each generation made while it was served, with `run_id`.
        route: The template of its route, such as "/draw/{prompt}"; None: not known.
    """

    request_id: str
    method: str
    path: str
    started_at: str
    seconds: float
    first_byte_seconds: float | None
    status: int | None
    request_bytes: int
    response_bytes: int
    in_flight: int
    error: str | None = None
    disconnected: bool = False
    generations: tuple[Mapping[str, Any], ...] = field(default_factory=tuple)
    route: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the application raised, answered with a status of 500 or above, or with nothing."""
        return self.error is not None or self.status is None or self.status >= 500

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self) | {"generations": [dict(generation) for generation in self.generations]}


@dataclass(frozen=True, slots=True)
class BlockProfile:
    """One block of the denoiser in all steps that were profiled.

    Attributes:
        name: Its path in the denoiser; "" is the denoiser as a whole.
        class_name: Of the module.
        calls: How often it ran.
        cpu_seconds: From its beginning to its end on the host, all inside included. On an accelerator that is the
            time to send the work, not to do it.
        self_cpu_seconds: The part of it outside of all operators: Python, hooks and dispatch.
        device_seconds: Of the kernels that it started; None without an accelerator.
        allocated_bytes: All that it allocated, also what was freed again at once.
        peak_growth_bytes: How far the memory in use grew above that at the beginning of a call, at most.
    """

    name: str
    class_name: str
    calls: int
    cpu_seconds: float
    self_cpu_seconds: float
    device_seconds: float | None = None
    allocated_bytes: int | None = None
    peak_growth_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorProfile:
    """One operator in all steps that were profiled, without those that it called itself.

    Attributes:
        name: As torch has it, such as "aten::addmm".
        calls: How often it ran.
        self_cpu_seconds: On the host.
        self_device_seconds: Of its own kernels; None without an accelerator.
    """

    name: str
    calls: int
    self_cpu_seconds: float
    self_device_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StepsProfile:
    """Sums over the steps that were profiled. Profiled steps are slower than others.

    Attributes:
        class_name: Of the denoiser.
        steps: Which of its forward calls, counted from 1.
        whole: All of the denoiser.
        blocks: Its parts in the order in which they first ran, none inside another.
        operators: The most expensive ones first.
        device: Whose kernels and memory these are; None: the host's.
        traces: Files with the whole trace, one a step, for ui.perfetto.dev.
        unavailable: What could not be seen, with the reason.
    """

    class_name: str
    steps: tuple[int, ...] = ()
    whole: BlockProfile | None = None
    blocks: tuple[BlockProfile, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    device: str | None = None
    traces: tuple[str, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


def profiles_of(stage: Stage) -> tuple[StepsProfile, ...]:
    """The profiles that were taken during a stage.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    return tuple(from_plain(profile, StepsProfile, PROFILES) for profile in stage.facts.get(PROFILES) or ())


UTILIZATION: Final = "utilization"
"""The fact of a stage in which `DeviceUtilization` lies, by device."""


MEMORY_OVER_TIME: Final = "memory_over_time"
"""The fact of an outermost stage in which `MemoryCurve` lies, by what it is of."""


PROCESS: Final = "process"
SYSTEM: Final = "system"
"""What curves are of, beside devices."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """The mean of a figure over a stage's samples, and its highest with seconds since the stage began."""

    mean: float
    highest: float
    highest_at_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceUtilization:
    """One device during one stage, from samples five times a second.

    A sample of business is the driver's mean over its last period (a sixth of a second to a second), so that the
    first of a stage may tell of what was right before it.

    Attributes:
        device: As torch names it.
        samples: How many.
        busy_percent: Share of time in which a kernel ran. 100 says that it never waited, not that it was used well.
        memory_busy_percent: Share of time in which device memory was read or written.
        temperature_celsius: Of the chip.
        power_watts: Of the board.
        heat_percent: Share of samples in which heat lowered the clocks.
        power_cap_percent: Share of samples in which the limit on power did.
        at_seconds: When the entries of `busy_series` begin, since the stage began.
        busy_series: Business over time, at most 256 entries: of a long stage each is a mean of several samples.
        unavailable: Why a figure is None.
    """

    device: str
    samples: int = 0
    busy_percent: Gauge | None = None
    memory_busy_percent: Gauge | None = None
    temperature_celsius: Gauge | None = None
    power_watts: Gauge | None = None
    heat_percent: float | None = None
    power_cap_percent: float | None = None
    at_seconds: tuple[float, ...] = ()
    busy_series: tuple[float, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


def utilization_of(stage: Stage) -> dict[str, DeviceUtilization]:
    """What is known of the accelerators' business during a stage, by device; empty: see `stage.unavailable`.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    plain = stage.facts.get(UTILIZATION) or {}
    return {
        device: from_plain(utilization, DeviceUtilization, UTILIZATION)
        for device, utilization in plain.items()
    }


def readable_utilization(stage: Stage) -> list[DeviceUtilization]:
    """The same for what shows a record: nothing where the fact of that name is a caller's own, or damaged."""
    try:
        return list(utilization_of(stage).values())
    except (AttributeError, TypeError, ValueError):
        return []


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Readings, at most ten a second; of a long stage each entry is the highest of several, at most 256 in all.

    Attributes:
        at_seconds: When each was read, since the stage began.
        nbytes: Resident bytes of the process, bytes of RAM that the machine uses, or bytes that PyTorch's allocator has
            given out on a device.

    Raises:
        ValueError: The two are not equally long.
    """

    at_seconds: tuple[float, ...]
    nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.at_seconds) != len(self.nbytes):
            raise ValueError(f"there are {len(self.at_seconds)} times and {len(self.nbytes)} readings")


def memory_over_time(stage: Stage) -> dict[str, MemoryCurve]:
    """The curves of an outermost stage: of the "process", the "system", and each device by its name.

    Args:
        stage: One that was opened outside of all others. Those inside have none of their own, and give nothing.

    Raises:
        ValueError: The record is damaged; the message says where.
    """
    plain = stage.facts.get(MEMORY_OVER_TIME) or {}
    return {name: from_plain(curve, MemoryCurve, MEMORY_OVER_TIME) for name, curve in plain.items()}


def readable_curves(stage: Stage) -> dict[str, MemoryCurve]:
    """The same for what shows a record: nothing where the fact of that name is a caller's own, or damaged."""
    try:
        return memory_over_time(stage)
    except (AttributeError, TypeError, ValueError):
        return {}


HOST_STACKS: Final = "host_stacks"
"""The fact of a run under which its `HostStacks` lie."""
IMPORT: Final = "import"
"""Stands for a function where a line imports."""
BEFORE: Final = "before the first stage"
BETWEEN: Final = "between stages"
AFTER: Final = "after the last stage"
OUTSIDE_STAGES: Final = "outside stages"
"""The part of the time in which no stage is open."""


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A function of the program that took time in which no step ran.

    Attributes:
        stage: The innermost stage with those around it, "generation/denoising"; of time outside stages where it lies.
        part: "between steps", "stage" for what else passed in the stage, or "outside stages".
        function: Its name; empty for a file's own top level.
        file: Without its folder.
        line: Where in it most of the time went.
        seconds: By samples.
        samples: How often it was seen.
        in_thread: Whether it ran in another thread, for which the watched one waited.
    """

    stage: str
    part: str
    function: str
    file: str
    line: int
    seconds: float
    samples: int
    in_thread: bool = False

    @property
    def where(self) -> str:
        """Such as "script.py:12"."""
        return f"{self.file}:{self.line}" + (" in a thread" if self.in_thread else "")

    @property
    def label(self) -> str:
        """Such as "read_image (script.py:12)"."""
        return f"{self.function} ({self.where})" if self.function else self.where


@dataclass(frozen=True, slots=True)
class HostStacks:
    """Where the program was while no step ran, by samples of its stacks.

    Attributes:
        samples: How often it was looked.
        cost_seconds: What the looks took together: time on a processor, or time in which they held the interpreter, if
            that was more.
        cost_share: Of the watched time, 0 to 1.
        places: At most 20 functions for each part of the time, the longest first.
    """

    samples: int
    cost_seconds: float
    cost_share: float
    places: tuple[HostPlace, ...] = ()


def host_stacks(run: Run) -> HostStacks | None:
    """What the samples of a run's stacks say; None where none were asked for, or the fact is damaged."""
    plain = run.facts.get(HOST_STACKS)
    try:
        return None if plain is None else from_plain(plain, HostStacks, HOST_STACKS)
    except (AttributeError, TypeError, ValueError):
        return None
