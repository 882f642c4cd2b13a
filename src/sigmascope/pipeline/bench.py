"""Benchmark a pipeline: warm each case up, repeat it, and keep every repeat as a run.

`run_benchmark` measures with a `PerformanceMonitor`, so that `sigmascope check` and `sigmascope compare` read a benchmark
as they read any other run. `Subject` says what can be measured: anything that makes pictures when it is told size, batch
and steps. `DiffusersSubject` is a diffusers pipeline, whose parts `PipelineStages` turns into stages.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.run_figures import BenchSummary, summarise
from sigmascope.checkpoints.hub import is_hub_name, rest_command, split_revision
from sigmascope.errors import CheckpointError, ConfigError, WriteError
from sigmascope.files import reason_of
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.hooks import After, HookSet
from sigmascope.monitor.performance import ASSUMED_TARGET, PerformanceMonitor, seconds_above_zero
from sigmascope.monitor.recorder import current_recorder, stage
from sigmascope.monitor.scope import Clock
from sigmascope.pipeline.model_state import free_memory, let_go, wait_for
from sigmascope.probes import Accelerator
from sigmascope.probes.host import cpu_moment, others_share
from sigmascope.probes.models import components_of, denoisers_of
from sigmascope.probes.reading import error_text, is_out_of_memory
from sigmascope.progress import Progress, no_progress
from sigmascope.records.performance import BENCHMARK, OTHERS, BenchCase, Made
from sigmascope.records.run import Finding, Run

__all__ = [
    "DEFAULT_TARGET",
    "BenchOptions",
    "CaseResult",
    "DiffusersSubject",
    "load_pipeline",
    "run_benchmark",
]

DEFAULT_TARGET: Final = ASSUMED_TARGET
PROMPT: Final = "a red fox jumps over a lazy dog, morning light, sharp photograph"
Offload = Literal["none", "model", "sequential"]
_CALLBACK: Final = "callback_on_step_end"
_PER_PROMPT: Final = ("num_images_per_prompt", "num_videos_per_prompt")
_MISSING: Final = object()
"""Stands for a method that an object has from its class alone."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How a benchmark measures.

    Attributes:
        repeat: Generations of each case that count.
        warm_up: Generations of each case before them that do not.
        seed: The same for all of them, so that each is the same work.
        target: Seconds that a generation may take, above 0.

    Raises:
        ConfigError: A number below what makes sense.
    """

    repeat: int = 10
    warm_up: int = 1
    seed: int = 0
    target: float = DEFAULT_TARGET

    def __post_init__(self) -> None:
        for name, value, least in (("repeat", self.repeat, 1), ("warmup", self.warm_up, 0)):
            if value < least:
                raise ConfigError(f"--{name} is {value}.", hint=f"Give {least} or more.")
        check_seed(self.seed)
        seconds_above_zero("--target", self.target)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case."""

    case: BenchCase
    made: Made | None = None
    runs: tuple[Run, ...] = ()
    warm_up: tuple[Run, ...] = ()
    files: tuple[Path, ...] = ()
    failure: str | None = None
    summary: BenchSummary | None = None

    def findings(self) -> tuple[Finding, ...]:
        """What the rules say of the last run."""
        return diagnose(self.runs[-1]) if self.runs else ()

    def as_dict(self) -> dict[str, Any]:
        """All of it but the runs themselves, as JSON values."""
        return {
            "case": self.case.as_dict(),
            "made": None if self.made is None else asdict(self.made),
            "failure": self.failure,
            "summary": None if self.summary is None else self.summary.as_dict(),
            "findings": [
                {"id": finding.id, "message": finding.message, "advice": finding.advice}
                for finding in self.findings()
            ],
            "files": [str(path) for path in self.files],
        }


@runtime_checkable
class Subject(Protocol):
    """A loaded pipeline.

    Its generations must be the same work each time: the same case and seed, the same steps on the same shapes. Stages
    are those of the current recorder (`sigmascope.monitor.stage`); steps are timed by the monitor, or by
    `sigmascope.monitor.step`.
    """

    @property
    def name(self) -> str:
        """What it is called in records and tables."""
        ...

    @property
    def model(self) -> object:
        """The pipeline or denoiser, to read facts from."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def check(self, case: BenchCase) -> None:
        """Refuse a case that it cannot run, before anything is run.

        Raises:
            ConfigError: Says which setting, and what it takes.
        """
        ...

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Make one generation, and wait until it is there.

        Args:
            case: Size, batch and steps.
            seed: Of its noise.
            monitor: In whose generation this is called.
        """
        ...


def run_benchmark(
    subject: Subject,
    cases: Sequence[BenchCase],
    options: BenchOptions | None = None,
    *,
    output: Path | None = None,
    load_seconds: float | None = None,
    accelerator: Accelerator | None = None,
    clock: Clock = time.perf_counter_ns,
    progress: Progress = no_progress,
) -> tuple[CaseResult, ...]:
    """Measure a pipeline in several cases, one after another.

    Every run is saved as soon as it is made. A case that runs out of memory, or that the pipeline refuses, is reported with
    the reason, and the others go on.

    Args:
        subject: The pipeline.
        cases: At least one, each once.
        options: Repeats, warm-up and seed.
        output: Folder for the runs, made when it is not there; None: they are not saved.
        load_seconds: What loading took, to be noted in each run.
        accelerator: Where to read devices; None: what torch would use.
        clock: Monotonic nanoseconds.
        progress: Called after each generation.

    Raises:
        ConfigError: No case, the same twice, one that the pipeline cannot be called with, or a folder with other runs.
        WriteError: A run cannot be saved.
    """
    options = options or BenchOptions()
    labels = [case.label for case in cases]
    if not labels:
        raise ConfigError("There is no case to measure.", hint="Give at least one.")
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"The case {label} is given twice.", hint="Give each case once.")
    for case in cases:
        subject.check(case)
    files = None if output is None else RunFiles(output)
    expected = len(cases) * (options.warm_up + options.repeat)
    bench = _Bench(subject, options, files, load_seconds, accelerator, clock, progress, expected)
    try:
        return tuple(bench.measure(case) for case in cases)
    finally:
        if files is not None:
            files.tidy()


class RunFiles:
    """A folder for the runs of one benchmark. Runs of two benchmarks in one folder would count as one.

    Raises:
        ConfigError: There are runs in it already.
        WriteError: It cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, int] = {}
        self._made: list[Path] = []
        try:
            self._made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            has_runs = any(folder.glob("*.json"))
        except OSError as error:
            raise WriteError(
                folder, f"cannot be made a folder ({reason_of(error)}).", hint="Choose another --output."
            ) from error
        if has_runs:
            raise ConfigError(f"--output: {folder} holds .json files already.", hint="Choose another folder.")

    def save(self, run: Run, case: BenchCase) -> Path:
        """Save a run as the next of its case.

        Raises:
            WriteError: It cannot be written.
        """
        number = self._saved.get(case.label, 0) + 1
        path = self.folder / f"{case.label}-{number:03d}.json"
        run.save(path)
        self._saved[case.label] = number
        return path

    def tidy(self) -> None:
        """Remove the folders that were made, if no run was saved."""
        if self._saved:
            return
        with suppress(OSError):  # somebody else put something there, or took it away
            for made in self._made:
                made.rmdir()


@dataclass(slots=True)
class _Bench:
    """A benchmark while it runs."""

    subject: Subject
    options: BenchOptions
    files: RunFiles | None
    load_seconds: float | None
    accelerator: Accelerator | None
    clock: Clock
    progress: Progress
    expected: int
    done: int = 0

    def measure(self, case: BenchCase) -> CaseResult:
        """Warm up and repeat one case, from memory that the one before it has given back."""
        free_memory(self.subject.device)
        warm_up, runs, files = list[Run](), list[Run](), list[Path]()
        made: Made | None = None
        failed: str | None = None
        try:
            for repeat in range(-self.options.warm_up, self.options.repeat):
                run, made = self._generation(case, made, None if repeat < 0 else repeat)
                self.done += 1
                self.progress(self.done, self.expected, case.label)
                (warm_up if repeat < 0 else runs).append(run)
                if repeat >= 0 and self.files is not None:
                    files.append(self.files.save(run, case))
        except WriteError:
            raise
        except Exception as failure:  # noqa: BLE001 - told in the result; the other cases go on
            text = error_text(failure)
            failed = f"out of memory ({text})" if is_out_of_memory(failure) else text
            let_go(failure)
        samples = 1 if made is None else made.samples
        summary = summarise(runs, samples=samples, warm_up=warm_up) if runs else None
        return CaseResult(case, made, tuple(runs), tuple(warm_up), tuple(files), failed, summary)

    def _generation(self, case: BenchCase, made: Made | None, repeat: int | None) -> tuple[Run, Made]:
        """One generation more, after one that `made` this; `repeat` is None while it warms up."""
        subject, size = self.subject, made or Made(case.batch, case.width, case.height)
        monitor = PerformanceMonitor(
            self.options.target,
            history=1,
            on_warning=lambda progress: None,  # a benchmark is run to its end, and tells its times then
            accelerator=self.accelerator,
            clock=self.clock,
        )
        block = monitor.monitor_generation(
            subject.name,
            num_steps=case.steps or 0,
            resolution=(size.width or 0, size.height or 0),
            batch_size=case.batch,
            model=subject.model,
        )
        before = cpu_moment().value
        with block:
            recorder = current_recorder()
            made = subject.generate(case, self.options.seed, monitor)
            after = cpu_moment().value
            if recorder is not None:
                noted = {
                    **case.as_dict(),
                    "subject": subject.name,
                    "device": str(subject.device),
                    "seed": self.options.seed,
                    "repeat": repeat,
                    "load_seconds": self.load_seconds,
                    "threads": torch.get_num_threads(),
                    OTHERS: None if before is None or after is None else others_share(before, after),
                }
                recorder.fact(BENCHMARK, noted)
        return monitor.runs[-1], made


@dataclass(frozen=True)
class DiffusersSubject:
    """A diffusers pipeline that was loaded, or built.

    Attributes:
        name: What it is called in records and tables.
        pipeline: Callable as diffusers' are.
        device: Where it runs.
        prompt: What it is asked for.
        arguments: Of its call, besides what a case says.
    """

    name: str
    pipeline: Any
    device: torch.device
    prompt: str = PROMPT
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> object:
        """The pipeline."""
        return self.pipeline

    def check(self, case: BenchCase) -> None:
        """Refuse what the pipeline's call does not take, and what would change the work that the case names.

        Raises:
            ConfigError: Names the first of them, and what the pipeline takes.
        """
        check_call(self.pipeline, case, self.arguments)

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Call the pipeline once, its parts as stages, and wait for the result."""
        wait = partial(wait_for, self.device)
        arguments = call_arguments(self.pipeline, case, self.prompt, seed, self.arguments)
        has_callback = _CALLBACK in parameters_of(self.pipeline) and _CALLBACK not in arguments
        stages = PipelineStages(self.pipeline, monitor, wait, calls_are_steps=not has_callback)
        if has_callback:
            arguments[_CALLBACK] = stages.on_step_end
        with stages:
            output = self.pipeline(**arguments)
        wait()
        return what_was_made(output)


def check_seed(seed: int) -> None:
    """Refuse a seed that torch does not take.

    Raises:
        ConfigError: It is below 0, or above 2**63 - 1.
    """
    if not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}.", hint="Give a number from 0 to 2**63 - 1.")


def parameters_of(pipeline: object) -> frozenset[str]:
    """Names of what the pipeline's call takes."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(type(pipeline).__call__).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named) - {"self"}


def check_call(pipeline: object, case: BenchCase, given: Mapping[str, Any]) -> None:
    """Refuse what the pipeline's call does not take, and what would change the work that the case names.

    Raises:
        ConfigError: Names the first of them, and what the pipeline takes.
    """
    takes = parameters_of(pipeline)
    sizes = {
        "height": ("--resolution", case.height),
        "width": ("--resolution", case.width),
        "num_inference_steps": ("--steps", case.steps),
        "num_frames": ("--frames", case.frames),
    }
    said = sizes | dict.fromkeys(_PER_PROMPT, ("--batch", case.batch))
    for name in given:
        flag, value = said.get(name, ("", None))
        if value is not None:
            raise ConfigError(
                f"--call {name}: the case {case.label} already sets it to {value}.",
                hint=f"Give only {flag}.",
            )
    flags = {name: "--image" if name == "image" else f"--call {name}" for name in given}
    flags |= {name: flag for name, (flag, value) in sizes.items() if value is not None}
    for name, flag in flags.items():
        if name not in takes:
            raise ConfigError(
                f"{flag}: {type(pipeline).__name__} does not take {name}.",
                hint=f"It takes {', '.join(sorted(takes))}.",
            )
    if case.batch > 1 and not takes.intersection((*_PER_PROMPT, "prompt")):
        raise ConfigError(
            f"--batch: {type(pipeline).__name__} makes one picture at a time.", hint="Leave --batch out."
        )


def call_arguments(
    pipeline: object, case: BenchCase, prompt: str, seed: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments for one generation."""
    takes = parameters_of(pipeline)
    as_list = case.batch > 1 and not takes.intersection(_PER_PROMPT)
    arguments: dict[str, Any] = {
        "prompt": [prompt] * case.batch if as_list else prompt,
        "width": case.width,
        "height": case.height,
        "num_inference_steps": case.steps,
        "num_frames": case.frames,
        "generator": torch.Generator("cpu").manual_seed(seed),
        **dict.fromkeys(_PER_PROMPT, case.batch),
    }
    chosen = {name: value for name, value in arguments.items() if name in takes and value is not None}
    return chosen | dict(given)


class PipelineStages:
    """While entered, a pipeline's parts are stages of the current recorder; afterwards it is as it was.

    Text encoding is `encode_prompt`, latent encoding and decoding are the VAE's `encode` and `decode`, and denoising
    lasts from the denoiser's first call to the decoding. A step lasts from the denoiser's first call in it to
    the pipeline's callback; where the pipeline has no callback, each call of the denoiser is a step.

    Unlike a monitor, a benchmark may wait for the device. Without waiting, a stage that only queues work would end at
    once, and its time would count for the stage that waits for the result. It waits where stages begin and end, and
    within no step.
    """

    def __init__(
        self,
        pipeline: object,
        monitor: PerformanceMonitor,
        wait: Callable[[], None],
        *,
        calls_are_steps: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._monitor = monitor
        self._wait = wait
        self._calls_are_steps = calls_are_steps
        self._undo = ExitStack()
        self._denoising: AbstractContextManager[object] | None = None
        self._in_step = False
        self._open: set[str] = set()

    def __enter__(self) -> "PipelineStages":
        parts = components_of(self._pipeline)
        with ExitStack() as undo:
            self._wrap(undo, self._pipeline, "encode_prompt", partial(self._stage, "text_encoding"))
            self._wrap(undo, parts.get("vae"), "encode", partial(self._stage, "latent_encoding"))
            self._wrap(undo, parts.get("vae"), "decode", partial(self._stage, "latent_decoding"))
            hooks = HookSet(Guard(), "steps")
            undo.callback(hooks.detach)
            before_denoiser = self._begin_and_end_step if self._calls_are_steps else self._begin_step
            watched = [(denoiser, before_denoiser) for denoiser in denoisers_of(self._pipeline)]
            for name, part in parts.items():
                if name.startswith("controlnet"):  # called before the denoiser, in each step
                    watched.append((part, self._begin_step))
            for part, before in watched:
                if isinstance(part, nn.Module):
                    hooks.hook_calls(part, before)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end_denoising(error)
        finally:
            self._undo.close()

    def on_step_end(
        self, pipeline: object, index: int, timestep: object, values: dict[str, Any]
    ) -> dict[str, Any]:
        """End a step: the pipeline's `callback_on_step_end`. Gives `values` back as they are."""
        self._end_step()
        return values

    def _wrap(
        self, undo: ExitStack, owner: Any, method: str, around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Put a context around a method, through an attribute of the object that hides the class's."""
        original = getattr(owner, method, None)
        if owner is None or not callable(original):
            return

        @wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            with around():
                return original(*args, **kwargs)

        before = vars(owner).get(method, _MISSING)
        setattr(owner, method, watched)
        if before is _MISSING:
            undo.callback(delattr, owner, method)
        else:
            undo.callback(setattr, owner, method, before)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """A stage of that name, unless one is open: some methods call themselves."""
        if name in self._open:
            yield
            return
        if name == "latent_decoding":
            self._end_denoising()
        self._open.add(name)
        try:
            self._wait()
            with stage(name):
                yield
                self._wait()
        finally:
            self._open.discard(name)

    def _begin_and_end_step(self, *_: object) -> After:
        self._begin_step()
        return lambda result, error: self._end_step()

    def _begin_step(self, *_: object) -> None:
        if self._denoising is None:
            self._wait()
            self._denoising = stage("denoising")
            self._denoising.__enter__()
        if not self._in_step:
            self._monitor.start_step_timing()
            self._in_step = True

    def _end_step(self) -> None:
        if self._in_step:
            self._monitor.end_step_timing()
            self._in_step = False

    def _end_denoising(self, error: BaseException | None = None) -> None:
        denoising, self._denoising, self._in_step = self._denoising, None, False
        if denoising is None:
            return
        try:
            if error is None:
                self._wait()
        finally:
            denoising.__exit__(None if error is None else type(error), error, None)


def what_was_made(output: Any) -> Made:
    """How many pictures or videos, and of which size, a pipeline gave; the size is None for packed latents.

    Args:
        output: Of the pipeline: its first entry holds pictures (Pillow), videos (lists of pictures), or an array of
            either.
    """
    samples = output[0] if hasattr(output, "__getitem__") else output
    is_batch = isinstance(samples, Sequence) or hasattr(samples, "shape")
    if not is_batch or not len(samples):
        return Made(1)
    sample = samples[0]
    if isinstance(sample, Sequence) and sample:
        return Made(len(samples), *_size_of(sample[0]), len(sample))
    shape = tuple(getattr(sample, "shape", ()))
    return Made(len(samples), *_size_of(sample), shape[0] if len(shape) == 4 else None)


def _size_of(sample: Any) -> tuple[int | None, int | None]:
    """Width and height of a picture, or of an array of one or several."""
    size = getattr(sample, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    shape = tuple(getattr(sample, "shape", ()))
    if len(shape) not in (3, 4):
        return None, None
    height, width = (
        shape[-2:] if isinstance(sample, torch.Tensor) else shape[-3:-1]
    )  # channels first, or last
    return width, height


def load_pipeline(source: str, *, dtype: torch.dtype, device: torch.device, offload: Offload = "none") -> Any:
    """Load a diffusers pipeline and put it on a device.

    Args:
        source: A folder that diffusers wrote, or a name on the Hugging Face hub, with or without `@revision`.
        dtype: Of the weights.
        device: Where it runs.
        offload: Which of diffusers' kinds of offloading keeps weights in RAM until they are needed.

    Returns:
        The pipeline, without its progress bar.

    Raises:
        CheckpointError: It is missing, is not a pipeline, or cannot be loaded; the message says why.
    """
    from diffusers import DiffusionPipeline
    from diffusers.pipelines import pipeline_utils

    _check_source(source)
    # Later versions warn about the old name; earlier ones ignore the new one.
    arguments: dict[str, Any] = {
        "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype": dtype
    }
    name = source
    if not Path(source).is_dir():
        name, arguments["revision"] = split_revision(source)
    try:
        with _bars_for_terminals_alone():
            pipeline = DiffusionPipeline.from_pretrained(name, **arguments, **_left_out(source))
    except (OSError, ValueError, ImportError, AttributeError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0].partition(" (")[0].rstrip(".:") if lines else type(error).__name__
        hint = "Check the name, the network, and that you may read it; or download it and name the folder."
        if Path(source).is_dir():
            rest = rest_command(Path(source).absolute())
            hint = f"Download the rest: {rest}" if rest else "Load it with diffusers alone to see more."
        raise CheckpointError(source, f"cannot be loaded as a pipeline ({reason}).", hint=hint) from error
    pipeline.set_progress_bar_config(disable=True)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def _check_source(source: str) -> None:
    path, hint = Path(source), "Name a folder written by save_pretrained."
    if path.is_dir():
        reason = None if (path / "model_index.json").is_file() else "holds no model_index.json."
    elif path.exists():
        reason = "is not a pipeline folder."
    else:
        hint = "Name a folder, owner/name, or pocket."
        reason = None if is_hub_name(source) else "is neither a folder nor a name on the hub."
    if reason is not None:
        raise CheckpointError(source, reason, hint=hint)


def _left_out(source: str) -> dict[str, None]:
    """Models that a folder was saved without, as Stable Diffusion 3 may be without T5: diffusers must be told."""
    try:
        index = json.loads((Path(source) / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # on the hub, or for diffusers to complain of
    return {name: None for name, entry in index.items() if entry == [None, None]}


@contextmanager
def _bars_for_terminals_alone() -> Iterator[None]:
    """Hide the libraries' progress bars if stderr is not a terminal; afterwards they are as they were."""
    import diffusers
    import transformers

    bars = [library.utils.logging for library in (diffusers, transformers)]
    hidden = [] if sys.stderr.isatty() else [bar for bar in bars if bar.is_progress_bar_enabled()]
    for bar in hidden:
        bar.disable_progress_bar()
    try:
        yield
    finally:
        for bar in hidden:
            bar.enable_progress_bar()
