"""`Run`: everything that is known of one watched workflow, its stages, their steps, and the findings (no torch here).

A run and its stages hold plain facts: of tensors, models, errors and the machine, and of the pipeline and its calls.
A stage is judged by the accelerator's clock where that was measured, else by the host's (`stage_seconds`).
Only a file that was changed by hand holds numbers that cannot be times; `impossible_times` names them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from sigmascope.errors import UnknownStageError
from sigmascope.plain_text import in_one_line
from sigmascope.records.memory import MemoryImpact, PeakMemory, highest

if TYPE_CHECKING:
    import rich.console

STAGES = (
    "model_loading",
    "lora_application",
    "text_encoding",
    "model_sampling",
    "latent_encoding",
    "denoising",
    "latent_decoding",
)
"""The stages of a workflow, in order. Others may be named freely."""
Severity = Literal["info", "warning", "error", "critical"]
DEVICE_SECONDS: Final = "device_seconds"
"""The fact of a stage that holds what it took on the accelerator."""
STEPS_UNCLEAR: Final = "steps_unclear"
"""The fact of a denoising that holds what makes it unclear which loop its steps belong to, in words."""
IDLE_LORAS: Final = "idle_loras"
"""The fact of a generation whose LoRAs were looked at: findings that say why all do nothing; empty where one acts."""
ONLY_ON: Final = "only_on"
"""The fact of a change of LoRAs that a method of one model made: the component. Those on the others are as they were."""
RECIPE: Final = "recipe"
"""The fact of a generation that holds what else it was made with: other arguments, models, LoRAs, threads."""
OUTPUT_HASHES: Final = "output_hashes"
"""The fact of a stage that holds the hash of each tensor that it made; None: see `unavailable`."""
THUMBNAIL: Final = "thumbnail"
"""The fact of a generation that holds a small JPEG of its first picture, in hexadecimal, with `width` and `height`."""
OWN_SECONDS: Final = "watch_seconds"
"""The fact of a run that holds what the watch itself took outside of stages: before the first of them, and later."""
OWN_CPU_SECONDS: Final = "watch_cpu_seconds"
"""The fact of a run that holds what both took of the processor's time: the same in runs with one set-up, if the machine is."""
RUNS_BEFORE: Final = "runs_before"
"""A fact of a run: how many its process watched before it. The first loads, compiles and warms up."""
GROUP: Final = "group"
"""The fact of a run by one of several processes: its `rank`, the `world_size`, and the `machine`'s name."""
IMPORTS: Final = "imports"
"""The fact of a run that holds what each package's import took before the first stage, in seconds, without the others'."""
SCHEDULER_SECONDS: Final = "scheduler_seconds"
"""The fact of a denoising that holds what the scheduler's steps took together, on the host."""
KEEP_GENERATIONS: Final = 100
"""So many are in the record of a watch in full, unless it is told otherwise."""
LONGEST_SECONDS: Final = 1e11
"""Some three thousand years."""
NO_TIME: Final = "which is not a valid time"
JsonScalar = str | int | float | bool | None
Role = Literal["denoiser", "text_encoder", "image_encoder", "vae", "tokenizer", "scheduler", "other"]
Offload = Literal["model", "sequential", "group"]
PromptPrivacy = Literal["full", "hash", "none"]
"""What is kept of a prompt: its text, its SHA-256, or nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion: what was seen, why it matters, what to do. `evidence` holds the numbers it rests on."""

    id: str
    severity: Severity
    message: str
    evidence: Mapping[str, JsonScalar] = field(default_factory=dict)
    advice: str | None = None
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Columns of equal length, one entry a step.

    `started` counts from the beginning of the stage. A whole column that could not be measured is
    empty, with the reason in `unavailable`; a single reading that failed is `None`. `started` and
    `seconds` are always there. `cpu_seconds` is the processor time of the whole process during a step; a
    record of an earlier version has none.

    Raises:
        ValueError: A column is longer or shorter than `seconds`.
    """

    started: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    gpu_seconds: tuple[float | None, ...] = ()
    rss_bytes: tuple[int | None, ...] = ()
    allocated_bytes: tuple[int | None, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    cpu_seconds: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        columns = {
            "started": len(self.started),
            "gpu_seconds": len(self.gpu_seconds) or len(self),
            "rss_bytes": len(self.rss_bytes) or len(self),
            "allocated_bytes": len(self.allocated_bytes) or len(self),
            "cpu_seconds": len(self.cpu_seconds) or len(self),
        }
        for name, length in columns.items():
            if length != len(self):
                raise ValueError(f"the column {name} has {length} entries, seconds has {len(self)}")

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor. Statistics are over its finite elements; counts are of the others."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    nbytes: int
    num_elements: int
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    nan_count: int | None = None
    inf_count: int | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """One model or part of a model.

    `dtypes` and `devices` count elements; they and `nbytes` include buffers. `wrapper_class_name` is the
    class of what the module came in, such as ComfyUI's ModelPatcher.
    """

    class_name: str
    parameters: int | None = None
    trainable_parameters: int | None = None
    nbytes: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    training: bool | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    wrapper_class_name: str | None = None


@dataclass(frozen=True, slots=True)
class ExceptionDetails:
    """An exception of the watched code: its type, message and stack trace as text."""

    type: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class AcceleratorFacts:
    """One accelerator device."""

    device: str
    name: str | None = None
    total_bytes: int | None = None
    driver_version: str | None = None
    compute_capability: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """CPU, RAM, system, Python, library versions, and every accelerator."""

    cpu_model: str | None = None
    cpu_count_logical: int | None = None
    cpu_count_physical: int | None = None
    ram_total_bytes: int | None = None
    os: str | None = None
    python_version: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    accelerators: tuple[AcceleratorFacts, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ComponentFacts:
    """One component of a pipeline.

    Attributes:
        role: Its job in the pipeline.
        class_name: Of the component.
        module: Weights, dtypes and devices; None if it is not a model.
        config: The scalars of its configuration.
        offload: Which offloading moves its weights in and out while it runs; None: none.
        compiled: Whether it, or a block in it, is compiled by torch.compile.
        layerwise_casting: Whether its weights are stored in a narrower type than they are used in.
        channels_last: Whether most of its convolution weights lie channels-last; None: it has none.
        tiling: Of a VAE: whether tiling is switched on.
        slicing: Of a VAE: whether slicing is.
    """

    role: Role
    class_name: str
    module: ModuleFacts | None = None
    config: Mapping[str, JsonScalar] = field(default_factory=dict)
    offload: Offload | None = None
    compiled: bool | None = None
    layerwise_casting: bool | None = None
    channels_last: bool | None = None
    tiling: bool | None = None
    slicing: bool | None = None


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """What computes the denoiser's attention.

    Attributes:
        processors: How many attention modules have a processor of each class.
        joint_processors: The same for the modules of joint blocks, which project text and image apart.
        backends: How many processors are set to each backend ("default": none was chosen).
    """

    processors: Mapping[str, int] = field(default_factory=dict)
    joint_processors: Mapping[str, int] = field(default_factory=dict)
    backends: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline, or a denoiser alone, before it runs.

    Attributes:
        class_name: Of the pipeline; of the model if it is one alone.
        architecture: "MMDiT", "DiT" or "UNet"; None: not known.
        architecture_evidence: By which modules.
        components: By the pipeline's own names.
        attention: Of the denoiser.
        source: Where it was loaded from, as its configuration says: a folder or a name on the hub.
        unavailable: What could not be read, with the reason.
    """

    class_name: str
    architecture: str | None = None
    architecture_evidence: str | None = None
    components: Mapping[str, ComponentFacts] = field(default_factory=dict)
    attention: AttentionFacts = field(default_factory=AttentionFacts)
    source: str | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def of_role(self, role: Role) -> dict[str, ComponentFacts]:
        """The components that do this, by name."""
        return {name: part for name, part in self.components.items() if part.role == role}


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a pipeline was called with. None: not given, or not known.

    Attributes:
        guidance_scale: Above 1 the classifier-free kind runs the denoiser for the negative prompt too.
        guidance_batches: How many times the denoiser works for each step's sample: 2 under classifier-free
            guidance, 1 without, or where guidance is distilled into the model.
        has_image: Whether an image to start from or to edit was given.
        callback: The name of what the pipeline calls after each step.
    """

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_batches: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    batch_size: int | None = None
    has_image: bool | None = None
    seed: int | None = None
    callback: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: what it took, what it changed, what it made, and the stages inside it.

    `started_seconds` counts from the beginning of the run. `facts` holds what only this kind of stage
    knows, as JSON values.
    """

    name: str
    started_seconds: float
    seconds: float
    success: bool = True
    error: str | None = None
    exception_details: ExceptionDetails | None = None
    memory: MemoryImpact | None = None
    peak: PeakMemory | None = None
    steps: Steps = field(default_factory=Steps)
    children: "tuple[Stage, ...]" = ()
    tensors: Mapping[str, TensorFacts] = field(default_factory=dict)
    modules: Mapping[str, ModuleFacts] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def walk(self) -> Iterator["Stage"]:
        """Yield this stage and all stages inside it, outermost first."""
        return _walk((self,))


@dataclass(frozen=True, slots=True)
class FoldedStages:
    """Sums over stages of one name that the record no longer lists.

    Attributes:
        count: How many.
        seconds: What they took together, on the host.
        longest_seconds: What the longest of them took.
        failures: How many did not succeed.
        device_seconds: What the accelerator took for those that it timed.
        timed_on_device: How many it timed.
        steps: Of all of them.
        step_seconds: What these took together, on the host.
    """

    count: int
    seconds: float
    longest_seconds: float
    failures: int = 0
    device_seconds: float = 0.0
    timed_on_device: int = 0
    steps: int = 0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Folded:
    """What is left of the earlier stages of a long run, whose last ones alone are in the record in full.

    Attributes:
        kept: How many of each name are in full.
        generations: How many are folded; one inside another is not counted.
        first_at_seconds: When the first folded stage began, since the run began.
        last_at_seconds: When the last of them ended.
        stages: Sums by name; a stage inside another by both their names, such as "generation/denoising".
        peak: The highest memory of all of them, with seconds since the run began.
    """

    kept: int
    generations: int
    first_at_seconds: float
    last_at_seconds: float
    stages: Mapping[str, FoldedStages] = field(default_factory=dict)
    peak: PeakMemory = field(default_factory=PeakMemory)


@dataclass(frozen=True, slots=True)
class Run:
    """One watched workflow. `started_at` is ISO 8601 in UTC; `folded` is None where all stages are in `stages`.

    `place` is where it stands in the store that it was read from; None of any other. No file holds it.
    """

    id: str
    name: str
    started_at: str
    seconds: float
    host: HostFacts | None = None
    stages: tuple[Stage, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True
    unavailable: Mapping[str, str] = field(default_factory=dict)
    folded: Folded | None = None
    place: tuple[str, int] | None = field(default=None, compare=False, repr=False)

    def walk(self) -> Iterator[Stage]:
        """Yield every stage at every depth, in order; folded ones are not among them."""
        return _walk(self.stages)

    def stage(self, name: str) -> Stage:
        """The first stage of that name at any depth.

        Raises:
            UnknownStageError: There is none; the message names those there are.
        """
        for stage in self.walk():
            if stage.name == name:
                return stage
        names = ", ".join(dict.fromkeys(stage.name for stage in self.walk())) or "none at all"
        raise UnknownStageError(f"The run {self.name!r} has no stage {name!r}.", hint=f"It has: {names}.")

    def peak(self) -> PeakMemory:
        """The highest memory of all stages, folded ones included, with seconds since the run began."""
        peaks = [(stage.started_seconds, stage.peak) for stage in self.walk() if stage.peak]
        return highest(peaks if self.folded is None else [(0.0, self.folded.peak), *peaks])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run as JSON, whole or not at all; `sigmascope.load_run` reads it.

        Raises:
            WriteError: The file cannot be written. What was there before stays.
            TypeError: A fact is of a type that JSON lacks.
        """
        from sigmascope import save_run

        save_run(self, path)

    def print(self, console: "rich.console.Console | None" = None, *, full: bool = False) -> None:
        """Print the verdict, where the time went and the findings, as `sigmascope.print_run` does.

        Args:
            console: Where to print; standard output by default.
            full: Whether to print every stage, device, tensor and finding as well.
        """
        from sigmascope import print_run

        print_run(self, console, full=full)

    def to_html(self, path: str | os.PathLike[str], *, prompts: PromptPrivacy = "hash") -> None:
        """Write the run as one HTML file for any browser, as `sigmascope.write_html` does.

        Args:
            path: The file.
            prompts: What the file says of prompts that the run holds as text.

        Raises:
            ConfigError: There is no such privacy.
            WriteError: The file cannot be written. What was there before stays.
        """
        from sigmascope import write_html

        write_html(self, path, prompts=prompts)

    def _repr_html_(self) -> str:
        """The verdict and where the time went, in a notebook."""
        from sigmascope import to_html

        return to_html(self, only_verdict=True)

    def to_trace(self, path: str | os.PathLike[str], *, prompts: PromptPrivacy = "hash") -> None:
        """Write the run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

        Args:
            path: The file; viewers expect the ending .json.
            prompts: What the trace says of prompts that the run holds as text.

        Raises:
            ConfigError: It holds what cannot be a time, as a file changed by hand may; the message says where.
            WriteError: The file cannot be written. What was there before stays.
            TypeError: A fact is of a type that JSON lacks.
        """
        from sigmascope import write_trace

        write_trace([self], path, prompts=prompts)


def _walk(stages: Iterable[Stage]) -> Iterator[Stage]:
    """All of them at every depth, outermost first, in one loop: generators inside each other cost a step for each depth."""
    left = [*stages][::-1]
    while left:
        stage = left.pop()
        yield stage
        left.extend(reversed(stage.children))


MOST_LEVELS: Final = 48
"""How many stages may lie inside each other: a file of more would be nested too deeply to be read again."""


def levels_of(run: Run) -> int:
    """How many stages lie inside each other, at the most."""
    levels, stages = 0, [*run.stages]
    while stages:
        levels, stages = levels + 1, [child for stage in stages for child in stage.children]
    return levels


def stage_path(*names: str) -> str:
    """A stage's name after those of the stages around it, such as "generation/denoising".

    A slash in a name is written as `~1` and a tilde as `~0`, as in a JSON pointer (RFC 6901).
    """
    return "/".join(name.replace("~", "~0").replace("/", "~1") for name in names)


def names_in(path: str) -> list[str]:
    """The names that `stage_path` joined, the innermost last."""
    return [name.replace("~1", "/").replace("~0", "~") for name in path.split("/")]


def path_in_words(path: str) -> str:
    """A stage's path with the names as they were given, on one line."""
    return in_one_line("/".join(names_in(path)))


def folded_in_words(folded: Folded) -> str:
    """Such as "1,900 earlier generations, folded": what reports say of what they cannot list."""
    generations = folded.generations
    number = generations or sum(sums.count for path, sums in folded.stages.items() if "/" not in path)
    what = ("generation" if generations else "stage") + ("" if number == 1 else "s")
    return f"{number:,} earlier {what}, folded"


def stage_seconds(stage: Stage) -> float:
    """What a stage took: on the accelerator where that was measured, else on the host.

    A host that only queues work is done long before the device is, and waits for it in some later stage.
    """
    on_device = device_seconds(stage)
    return stage.seconds if on_device is None else on_device


def device_seconds(stage: Stage) -> float | None:
    """What a stage took on the accelerator; None if it was not measured or is not a valid time."""
    on_device = stage.facts.get(DEVICE_SECONDS)
    return on_device if isinstance(on_device, float) and is_duration(on_device) else None


def is_duration(value: object) -> bool:
    """Whether something is a number of seconds that can have passed: not NaN, not infinite, not less than 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LONGEST_SECONDS


def impossible_times(run: Run) -> Iterator[str]:
    """Each field of a run that holds what cannot be a time, by its place in the file, such as "run.seconds is nan, …".

    A duration is finite and not negative; a beginning may be before that of what it counts from.
    """
    if not _is_moment(run.started_at):
        yield f"run.started_at is {short_repr(run.started_at)}, {NO_TIME}"
    if not is_duration(run.seconds):
        yield f"run.seconds is {run.seconds}, {NO_TIME}"
    for index, stage in enumerate(run.stages):
        yield from _impossible_in_stage(stage, f"run.stages[{index}]")
    for path, sums in () if run.folded is None else run.folded.stages.items():
        for name in ("seconds", "longest_seconds", "device_seconds", "step_seconds"):
            if not is_duration(getattr(sums, name)):
                yield f"run.folded.stages[{path!r}].{name} is {getattr(sums, name)}, {NO_TIME}"


def _is_moment(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def short_repr(value: object) -> str:
    """The value in 40 characters at most, for an error."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _impossible_in_stage(stage: Stage, place: str) -> Iterator[str]:
    fields: list[tuple[str, object, bool]] = [
        ("started_seconds", stage.started_seconds, _is_beginning(stage.started_seconds)),
        ("seconds", stage.seconds, is_duration(stage.seconds)),
        *_times_of_steps(stage.steps),
        *(() if stage.peak is None else _times_of_peak(stage.peak)),
    ]
    if DEVICE_SECONDS in stage.facts:
        on_device = stage.facts[DEVICE_SECONDS]
        fields.append((f"facts.{DEVICE_SECONDS}", on_device, is_duration(on_device)))
    yield from (
        f"{place}.{name} is {short_repr(value)}, {NO_TIME}" for name, value, is_time in fields if not is_time
    )
    for index, child in enumerate(stage.children):
        yield from _impossible_in_stage(child, f"{place}.children[{index}]")


def _is_beginning(value: float) -> bool:
    return -LONGEST_SECONDS < value < LONGEST_SECONDS


def _times_of_steps(steps: Steps) -> Iterator[tuple[str, object, bool]]:
    for row, started in enumerate(steps.started):
        yield f"steps.started[{row}]", started, _is_beginning(started)
    for name in ("seconds", "gpu_seconds", "cpu_seconds"):
        yield from _durations(f"steps.{name}", getattr(steps, name))


def _durations(name: str, column: Iterable[float | None]) -> Iterator[tuple[str, object, bool]]:
    for row, value in enumerate(column):
        if value is not None:
            yield f"{name}[{row}]", value, is_duration(value)


def _times_of_peak(peak: PeakMemory) -> Iterator[tuple[str, object, bool]]:
    moments = {"rss_at_seconds": peak.rss_at_seconds, "ram_used_at_seconds": peak.ram_used_at_seconds}
    for index, device in enumerate(peak.accelerators):
        moments[f"accelerators[{index}].allocated_at_seconds"] = device.allocated_at_seconds
        moments[f"accelerators[{index}].reserved_at_seconds"] = device.reserved_at_seconds
    for name, value in moments.items():
        if value is not None:
            yield f"peak.{name}", value, _is_beginning(value)
