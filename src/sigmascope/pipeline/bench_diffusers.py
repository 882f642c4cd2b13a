"""Benchmark a diffusers pipeline: load it, call it, and time its stages and steps.

`DiffusersSubject` calls the pipeline with those arguments of its own signature that a case asks for.
`PipelineStages` turns its parts into stages: text_encoding is `encode_prompt`, latent_encoding and latent_decoding
are the VAE's `encode` and `decode`, and denoising lasts from the denoiser's first call to the decoding. A step
lasts from the denoiser's first call in it to the pipeline's callback; where the pipeline has no callback, each call
of the denoiser is a step.

A benchmark may wait for the device, which a monitor must not do: a stage whose work is only queued would
end at once, and the one that waits for the result would seem to have taken its time. It waits at the edges of stages,
and within no step.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import torch
from torch import nn

from sigmascope.errors import CheckpointError, ConfigError
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.recorder import stage
from sigmascope.pipeline.out_of_memory import wait_for
from sigmascope.probes.models import components_of, denoisers_of
from sigmascope.records.performance import BenchCase, Made

PROMPT = "a red fox jumps over a lazy dog, morning light, sharp photograph"
_VAE_STAGES: Final = (("encode", "latent_encoding"), ("decode", "latent_decoding"))
_COMPILED_CALL: Final = "_compiled_call_impl"
_MISSING: Final = object()
"""Stands for a method that an object has from its class alone."""
CALLBACK: Final = "callback_on_step_end"
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Parameters that can be given by name."""
_PER_PROMPT: Final = ("num_images_per_prompt", "num_videos_per_prompt")
Offload = Literal["none", "model", "sequential"]
_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class DiffusersSubject:
    """A pipeline that was loaded, or built.

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
        """Refuse what the pipeline's call does not take.

        Raises:
            ConfigError: Names the setting, and what the call takes.
        """
        check_call(self.pipeline, case, self.arguments)

    def generate(self, case: BenchCase, seed: int, monitor: PerformanceMonitor) -> Made:
        """Call the pipeline once, its parts as stages, and wait for the result."""
        wait = partial(wait_for, self.device)
        arguments = call_arguments(self.pipeline, case, self.prompt, seed, self.arguments)
        has_callback = CALLBACK in parameters_of(self.pipeline) and CALLBACK not in arguments
        stages = PipelineStages(self.pipeline, monitor, wait, calls_are_steps=not has_callback)
        if has_callback:
            arguments[CALLBACK] = stages.on_step_end
        with stages:
            output = self.pipeline(**arguments)
        wait()
        return what_was_made(output)


def parameters_of(pipeline: object) -> frozenset[str]:
    """Names of what the pipeline's call takes."""
    parameters = inspect.signature(type(pipeline).__call__).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED) - {"self"}


def check_call(pipeline: object, case: BenchCase, given: Mapping[str, Any]) -> None:
    """Refuse what the pipeline's call does not take, and what would be other work than the case says.

    Raises:
        ConfigError: Names the first of them, and what the pipeline takes.
    """
    takes = parameters_of(pipeline)
    _refuse_other_work(case, given)
    wanted = {
        "height": ("--resolution", case.height),
        "num_inference_steps": ("--steps", case.steps),
        "num_frames": ("--frames", case.frames),
        **{name: (_flag(name), value) for name, value in given.items()},
    }
    for name, (flag, value) in wanted.items():
        if value is not None and name not in takes:
            raise ConfigError(
                f"{flag}: {type(pipeline).__name__} takes no {name}.",
                hint=f"It takes {', '.join(sorted(takes))}.",
            )
    if case.batch > 1 and not takes.intersection((*_PER_PROMPT, "prompt")):
        raise ConfigError(
            f"--batch: {type(pipeline).__name__} makes one picture at a time.", hint="Leave --batch out."
        )


def _refuse_other_work(case: BenchCase, given: Mapping[str, Any]) -> None:
    said = {
        "width": ("--resolution", case.width),
        "height": ("--resolution", case.height),
        "num_inference_steps": ("--steps", case.steps),
        "num_frames": ("--frames", case.frames),
        **dict.fromkeys(_PER_PROMPT, ("--batch", case.batch)),
    }
    for name in given:
        flag, value = said.get(name, ("", None))
        if value is not None:
            raise ConfigError(
                f"--call {name}: the case {case.label} has {value} of it already.",
                hint=f"Say it with {flag} alone.",
            )


def _flag(name: str) -> str:
    """What the command line calls an argument that the user gave."""
    return "--image" if name == "image" else f"--call {name}"


def call_arguments(
    pipeline: object, case: BenchCase, prompt: str, seed: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments for one generation."""
    takes = parameters_of(pipeline)
    arguments: dict[str, Any] = {
        "prompt": prompt,
        "width": case.width,
        "height": case.height,
        "num_inference_steps": case.steps,
        "num_frames": case.frames,
        "generator": torch.Generator("cpu").manual_seed(seed),
    }
    arguments |= dict.fromkeys(_PER_PROMPT, case.batch)
    if case.batch > 1 and not takes.intersection(_PER_PROMPT):
        arguments["prompt"] = [prompt] * case.batch
    chosen = {name: value for name, value in arguments.items() if name in takes and value is not None}
    return chosen | dict(given)


class PipelineStages:
    """While entered, a pipeline's parts are stages of the current recorder; afterwards it is as it was."""

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
        self._denoising = ExitStack()
        self._is_denoising = False
        self._in_step = False
        self._open: set[str] = set()

    def __enter__(self) -> "PipelineStages":
        with ExitStack() as undo:
            self._put_on(undo)
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

    def _put_on(self, undo: ExitStack) -> None:
        self._wrap(undo, self._pipeline, "encode_prompt", "text_encoding")
        vae = components_of(self._pipeline).get("vae")
        for method, name in _VAE_STAGES:
            self._wrap(undo, vae, method, name)
        denoisers = [denoiser for denoiser in denoisers_of(self._pipeline) if isinstance(denoiser, nn.Module)]
        for module in denoisers:
            self._watch_calls(undo, module, ends_step=self._calls_are_steps)
        for module in _controlnets(self._pipeline):
            self._watch_calls(undo, module, ends_step=False)

    def _watch_calls(self, undo: ExitStack, module: nn.Module, *, ends_step: bool) -> None:
        """Tell of a module's calls from outside of what is compiled."""
        if vars(module).get(_COMPILED_CALL) is not None:
            self._wrap_compiled(undo, module, ends_step=ends_step)
            return
        undo.callback(module.register_forward_pre_hook(self._before_call, prepend=True).remove)
        if ends_step:
            undo.callback(module.register_forward_hook(self._after_call, always_call=True).remove)

    def _wrap_compiled(self, undo: ExitStack, module: Any, *, ends_step: bool) -> None:
        """A module compiled in place never runs hooks; what it keeps to be called instead can be wrapped."""
        original = vars(module)[_COMPILED_CALL]

        def watched(*args: object, **kwargs: object) -> object:
            self._before_call()
            try:
                return original(*args, **kwargs)
            finally:
                if ends_step:
                    self._after_call()

        setattr(module, _COMPILED_CALL, watched)
        undo.callback(setattr, module, _COMPILED_CALL, original)

    def _wrap(self, undo: ExitStack, owner: Any, method: str, name: str) -> None:
        """Let a method be a stage, through an attribute of the object that hides the class's."""
        original = getattr(owner, method, None)
        if owner is None or not callable(original):
            return

        @wraps(original)
        def watched(*args: object, **kwargs: object) -> object:
            with self._stage(name):
                return original(*args, **kwargs)

        before = vars(owner).get(method, _MISSING)
        setattr(owner, method, watched)
        undo.callback(_restore, owner, method, before)

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

    def _before_call(self, *_: object) -> None:
        if not self._is_denoising:
            self._wait()
            self._denoising.enter_context(stage("denoising"))
            self._is_denoising = True
        if not self._in_step:
            self._monitor.start_step_timing()
            self._in_step = True

    def _after_call(self, *_: object) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._in_step:
            self._monitor.end_step_timing()
            self._in_step = False

    def _end_denoising(self, error: BaseException | None = None) -> None:
        if not self._is_denoising:
            return
        self._is_denoising = self._in_step = False
        trace = None if error is None else error.__traceback__
        try:
            if error is None:
                self._wait()
        finally:
            self._denoising.__exit__(None if error is None else type(error), error, trace)


def _controlnets(pipeline: object) -> list[nn.Module]:
    """They run before the denoiser, in each step."""
    parts = components_of(pipeline).items()
    return [part for name, part in parts if name.startswith("controlnet") and isinstance(part, nn.Module)]


def _restore(owner: object, method: str, before: object) -> None:
    if before is _MISSING:
        delattr(owner, method)
    else:
        setattr(owner, method, before)


def what_was_made(output: object) -> Made:
    """How many pictures or videos, and of which size, a pipeline gave; the size is None for latents.

    Args:
        output: Of the pipeline: its first entry holds pictures (Pillow), videos (lists of pictures), or an array of
            either.
    """
    first = output[0] if isinstance(output, Sequence) or hasattr(output, "__getitem__") else output
    if hasattr(first, "shape"):
        return _made_of_array(tuple(first.shape), channels_first=isinstance(first, torch.Tensor))
    if not isinstance(first, Sequence) or not first:
        return Made(1)
    sample = first[0]
    if isinstance(sample, Sequence) and sample:
        width, height = _picture_size(sample[0])
        return Made(len(first), width, height, len(sample))
    if hasattr(sample, "shape"):  # a list of arrays, one a video
        video = _made_of_array((1, *sample.shape), channels_first=isinstance(sample, torch.Tensor))
        return Made(len(first), video.width, video.height, video.frames)
    return Made(len(first), *_picture_size(sample))


def _made_of_array(shape: tuple[int, ...], *, channels_first: bool) -> Made:
    if len(shape) not in (4, 5):
        return Made(shape[0] if shape else 1)
    height, width = shape[-2:] if channels_first else shape[-3:-1]
    return Made(shape[0], width, height, shape[1] if len(shape) == 5 else None)


def _picture_size(picture: object) -> tuple[int | None, int | None]:
    size = getattr(picture, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None, None


def load_pipeline(source: str, *, dtype: torch.dtype, device: torch.device, offload: Offload = "none") -> Any:
    """Load a diffusers pipeline and put it on a device.

    Args:
        source: A folder that diffusers wrote, or a name on the Hugging Face hub.
        dtype: Of the weights.
        device: Where it runs.
        offload: Which of diffusers' offloadings keeps weights in RAM until they are needed.

    Returns:
        The pipeline, without its progress bar.

    Raises:
        CheckpointError: It is not there, is no pipeline, or cannot be loaded; says why.
    """
    from diffusers import DiffusionPipeline

    _check_source(source)
    try:
        with _bars_for_terminals_alone():
            pipeline = DiffusionPipeline.from_pretrained(source, **{_dtype_argument(): dtype})
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise CheckpointError(
            source, f"cannot be loaded as a pipeline ({_first_line(error)}).", hint=_loading_hint(source)
        ) from error
    pipeline.set_progress_bar_config(disable=True)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.to(device)
    return pipeline


def _check_source(source: str) -> None:
    path = Path(source)
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise CheckpointError(
                source, "holds no model_index.json.", hint="Name a folder written by save_pretrained."
            )
    elif path.exists():
        raise CheckpointError(
            source, "is no folder of a pipeline.", hint="Name a folder written by save_pretrained."
        )
    elif not _HUB_NAME.fullmatch(source):
        raise CheckpointError(
            source, "is neither a folder nor a name on the hub.", hint="Name a folder, owner/name, or pocket."
        )


@contextmanager
def _bars_for_terminals_alone() -> Iterator[None]:
    """Keep the libraries' progress bars out of what is no terminal; afterwards they are as they were."""
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


def _dtype_argument() -> str:
    """Renamed by diffusers, whose later versions warn of the old name and whose earlier ones ignore the new one."""
    from diffusers.pipelines import pipeline_utils

    return "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].partition(" (")[0].rstrip(".:") if lines else type(error).__name__


def _loading_hint(source: str) -> str:
    if Path(source).is_dir():
        return "Load it with diffusers alone to see more."
    return "Check the name, the network, and that you may read it; or download it and name the folder."
