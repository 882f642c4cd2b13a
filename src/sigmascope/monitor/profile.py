"""`profile_steps`: torch's profiler on a few chosen steps, with the time summed by block.

`ProfileSession` runs one profiler after another, each on one step, with marks that name the calls of the denoiser's
blocks. `ProfileSums` adds its events up by block and by operator.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from sigmascope.errors import ConfigError
from sigmascope.files import atomic_path, require_writable, without_home
from sigmascope.monitor.guard import Guard, as_json
from sigmascope.monitor.hooks import After, HookSet
from sigmascope.monitor.recorder import Recorder, current_recorder
from sigmascope.monitor.scope import Scope
from sigmascope.probes.accelerators import is_capturing
from sigmascope.probes.models import denoisers_of, unwrap
from sigmascope.records.performance import PROFILES, BlockProfile, OperatorProfile, StepsProfile

# Why steps or blocks were not seen.
OTHER_PROFILER: Final = "another profiler was running"
CAPTURED: Final = (
    "a graph was being captured; the profiler waits for the device, which would break the capture"
)
COMPILED: Final = "the denoiser is compiled as a whole: its parts run as one"

PROFILE: Final = "profile"
"""The instrument's name, under which a failure is noted."""
LABEL: Final = "sigmascope::"
"""What the marks of a profile's blocks begin with; the path in the denoiser follows."""

MOST_OPERATORS: Final = 30
MOST_PROFILES: Final = 100
"""A stage that stays open keeps so many, the last ones."""
_MEMORY: Final = "[memory]"


class ProfiledSteps:
    """While entered, the chosen forward calls of a denoiser are profiled. The outputs stay as they are.

    Attributes:
        profile: What was seen, once the block has ended; None until then.
    """

    def __init__(
        self, watching: object, denoiser: nn.Module, steps: frozenset[int], trace: Path | None
    ) -> None:
        self.profile: StepsProfile | None = None
        self._watching = watching
        self._denoiser = denoiser
        self._steps = steps
        self._trace = trace
        self._guard = Guard()
        self._blocks = blocks_of(denoiser)
        self._no_blocks = why_no_blocks(denoiser)
        self._session = ProfileSession({} if self._no_blocks else self._blocks, self._guard)
        self._hooks = HookSet(self._guard, PROFILE)
        self._lock = threading.Lock()
        self._calls = 0
        self._scope: Scope | None = None
        self._unavailable: dict[str, str] = {}

    def __enter__(self) -> "ProfiledSteps":
        self._guard.call(PROFILE, lambda: self._hooks.hook_calls(self._denoiser, self._before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._hooks.detach()
        finally:  # Ctrl-C may have come just now, or in the middle of a step
            self._guard.read(PROFILE, self._session.stop)
        self.profile = self._guard.call("profile summary", self._summary)
        self._guard.read(PROFILE, self._note)
        self._session.taken.clear()
        self._scope = None

    def _before(self, *_: object) -> After:
        with self._lock:
            self._calls += 1
            step = self._calls
            if step in self._steps and not self._session.is_running():
                self._guard.call(PROFILE, lambda: self._start(step))
        return self._after

    def _start(self, step: int) -> None:
        if self._scope is None:
            self._scope = self._current_scope()
        self._session.start(step)

    def _after(self, *_: object) -> None:
        if self._session.is_running(threading.get_ident()):
            self._guard.call(PROFILE, self._session.stop)

    def _current_scope(self) -> Scope | None:
        """The stage that is open in the recorder, or in the one of the monitor's generation."""
        recorder = getattr(self._watching, "recorder", self._watching) or current_recorder()
        return recorder.current_scope() if isinstance(recorder, Recorder) else None

    def _summary(self) -> StepsProfile:
        taken = self._session.taken
        sums = ProfileSums(bool(self._session.saw_device))
        for _, profiler in taken:
            sums.add(profiler)
        traces = [self._write_trace(step, profiler) for step, profiler in taken if self._trace]
        return StepsProfile(
            class_name=type(self._denoiser).__name__,
            steps=tuple(step for step, _ in taken),
            whole=sums.whole(type(self._denoiser).__name__),
            blocks=sums.all_blocks({path: type(block).__name__ for path, block in self._blocks.items()}),
            operators=sums.top_operators(),
            device=sums.device(),
            traces=tuple(trace for trace in traces if trace is not None),
            unavailable=self._gaps(),
        )

    def _gaps(self) -> dict[str, str]:
        gaps = dict(self._unavailable)
        if self._no_blocks is not None:
            gaps["blocks"] = self._no_blocks
        missed = sorted(self._steps - {step for step, _ in self._session.taken})
        called = f"the denoiser was called {self._calls} times"
        if missed:
            reason = self._session.refused or self._why_not_heard() or called
            gaps["steps"] = f"steps {', '.join(map(str, missed))}: {reason}"
        if not self._session.saw_device:
            gaps["device_seconds"] = "no CUDA or HIP device was in use"
        return gaps

    def _why_not_heard(self) -> str | None:
        reasons = self._guard.reasons
        return reasons.get(PROFILE) or reasons.get(f"{PROFILE} of {type(self._denoiser).__name__}")

    def _write_trace(self, step: int, profiler: Any) -> str | None:
        assert self._trace is not None
        path = _path_of_step(self._trace, step) if len(self._steps) > 1 else self._trace

        def write() -> str:
            with atomic_path(path, private=True) as temporary:
                profiler.export_chrome_trace(str(temporary))
            return without_home(str(path))

        written = self._guard.reading("trace", write)
        if written.reason is not None:
            self._unavailable["traces"] = written.reason
        return written.value

    def _note(self) -> None:
        """Put the profile on the stage in which the first chosen step ran."""
        if self._scope is not None and self.profile is not None:
            earlier = self._scope.facts.get(PROFILES)
            others = earlier if isinstance(earlier, list) else []
            self._scope.facts[PROFILES] = [*others[1 - MOST_PROFILES :], as_json(self.profile)]


def _path_of_step(trace: Path, step: int) -> Path:
    """`trace-step3.json` for `trace.json`."""
    ending = ".json.gz" if trace.name.endswith(".json.gz") else trace.suffix
    return trace.with_name(f"{trace.name.removesuffix(ending)}-step{step}{ending}")


def profile_steps(
    watching: object = None,
    module: object = None,
    steps: Sequence[int] = (3,),
    *,
    trace: str | os.PathLike[str] | None = None,
) -> ProfiledSteps:
    """Return a context that profiles chosen steps of a denoiser, block by block.

    The sums become a fact of the stage that is open when the first of them begins
    (`sigmascope.records.performance.profiles_of(stage)`), and are the context's `profile` afterwards. Steps that
    are not chosen run as always. A chosen one is slower, and waits for the accelerator at its end.

    Args:
        watching: The recorder, `WorkflowMonitor` or `PerformanceMonitor` whose record it belongs to; None: the current
            recorder, if any.
        module: The denoiser, or the pipeline (or what wraps the module) that has one.
        steps: Which forward calls of the denoiser, counted from 1 since the context was entered. Under guidance in
            two calls a step has two. The first ones include warm-up.
        trace: Keep the whole trace in this file, for ui.perfetto.dev; with several steps in one file a step, named
            `…-step3`. It ends with ".json" or ".json.gz".

    Raises:
        ConfigError: No denoiser is found, or no step is chosen.
        WriteError: The trace could not be written there.

    Examples:
        >>> denoiser = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)])})
        >>> with profile_steps(None, denoiser, steps=(2,)) as profiling:
        ...     pass
        >>> profiling.profile.unavailable["steps"]
        'steps 2: the denoiser was called 0 times'
    """
    denoiser = denoiser_of(module)
    if module is None and denoiser_of(watching) is not None:
        raise ConfigError(
            "The model is the second argument; the recorder is the first.",
            hint="Write profile_steps(None, pipe), or profile_steps(recorder, pipe) with your recorder.",
        )
    if denoiser is None:
        raise ConfigError(
            f"{type(module).__name__} holds no denoiser to profile.",
            hint="Give the module itself, such as pipe.transformer or pipe.unet.",
        )
    if not steps or min(steps) < 1:
        raise ConfigError(f"steps are {tuple(steps)}.", hint="Count forward calls from 1, such as (3, 5).")
    if trace is not None:
        require_writable(trace)
    return ProfiledSteps(watching, denoiser, frozenset(steps), None if trace is None else Path(trace))


def denoiser_of(model: object) -> nn.Module | None:
    """The module whose forward calls are steps; None if there is none."""
    for candidate in denoisers_of(model):
        module = candidate if isinstance(candidate, nn.Module) else unwrap(candidate)
        # ComfyUI calls the inner model of what its patcher holds, never the outer one.
        inner = getattr(module, "diffusion_model", None)
        denoiser = inner if isinstance(inner, nn.Module) else module
        if denoiser is not None:
            return denoiser
    return None


def blocks_of(denoiser: nn.Module) -> dict[str, nn.Module]:
    """The denoiser's parts by path: its direct children, and of lists of modules their entries."""
    blocks: dict[str, nn.Module] = {}
    for name, child in denoiser.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks |= {f"{name}.{path}": block for path, block in blocks_of(child).items()}
        else:
            blocks[name] = child
    return blocks


def why_no_blocks(denoiser: nn.Module) -> str | None:
    """Why the parts cannot be told apart; None if they can."""
    is_compiled = hasattr(denoiser, "_orig_mod") or getattr(denoiser, "_compiled_call_impl", None) is not None
    return COMPILED if is_compiled else None


class ProfileSession:
    """Starts and stops torch's profiler, one at a time, and names to it the calls of a denoiser's blocks. Not locked.

    Attributes:
        taken: Steps, with the profilers that saw them.
        refused: Why a step was not taken.
        saw_device: Whether kernels were seen in all steps that were taken; None before the first one. A process may
            begin to use its device after them.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], guard: Guard) -> None:
        self.taken: list[tuple[int, Any]] = []
        self.refused: str | None = None
        self.saw_device: bool | None = None
        self._blocks = blocks
        self._hooks = HookSet(guard, PROFILE)
        self._marks: list[record_function] = []
        self._running: tuple[int, int, Any] | None = None  # thread, step, profiler

    def is_running(self, thread: int | None = None) -> bool:
        """Whether a step is being profiled, of that thread if one is named."""
        return self._running is not None and thread in (None, self._running[0])

    def start(self, step: int) -> None:
        """Profile from now on, unless another profiler runs: a second one would end it."""
        if torch._C._autograd._profiler_enabled():
            self.refused = OTHER_PROFILER
            return
        if is_capturing("cuda"):
            self.refused = CAPTURED
            return
        activities, sees_device = [ProfilerActivity.CPU], uses_cuda()
        if sees_device:
            activities.append(ProfilerActivity.CUDA)
        self.saw_device = sees_device and self.saw_device is not False
        profiler = profile(activities=activities, profile_memory=True)
        profiler.start()
        self._running = (threading.get_ident(), step, profiler)
        self._begin_mark(LABEL)  # the denoiser's own
        for path, block in self._blocks.items():
            self._hooks.hook_calls(block, partial(self._begin_mark, LABEL + path))

    def _begin_mark(self, label: str, *_: object) -> After | None:
        if not self.is_running(threading.get_ident()):
            return None
        mark = record_function(label)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._marks.append(mark)
        return self._end_mark

    def _end_mark(self, *_: object) -> None:
        if self.is_running(threading.get_ident()) and len(self._marks) > 1:
            self._marks.pop().__exit__(None, None, None)

    def stop(self) -> None:
        """End the step that is being profiled, if any, and the marks of calls that Ctrl-C broke off."""
        if self._running is None:
            return
        (_, step, profiler), self._running = self._running, None
        try:
            self._hooks.detach()
            while self._marks:
                self._marks.pop().__exit__(None, None, None)
        finally:
            profiler.stop()
        self.taken.append((step, profiler))


def uses_cuda() -> bool:
    """Whether this process works on a CUDA or HIP device."""
    initialized: Any = torch.cuda.is_initialized
    return bool(initialized())


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    cpu_us: float = 0.0
    self_cpu_us: float = 0.0
    device_us: float = 0.0


@dataclass(slots=True)
class ProfileSums:
    """Grows by one profiled step after another.

    Attributes:
        has_device: Whether there are kernels on an accelerator.
    """

    has_device: bool
    blocks: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    operators: dict[str, _Sum] = field(default_factory=lambda: defaultdict(_Sum))
    allocated: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    growth: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kernel_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, profiler: Any) -> None:
        """Take a `torch.profiler.profile` that has stopped."""
        for event in profiler.events():
            if event.device_type == DeviceType.CPU:
                self._add_event(event)
        self._add_memory(list(profiler.profiler.kineto_results.events()))

    def device(self) -> str | None:
        """The device on which kernels ran longest, which need not be the current one; None if none ran."""
        return f"cuda:{max(self.kernel_us, key=self.kernel_us.__getitem__)}" if self.kernel_us else None

    def whole(self, class_name: str) -> BlockProfile | None:
        """The denoiser itself; None if it was never seen."""
        return self._block("", class_name) if "" in self.blocks else None

    def all_blocks(self, class_names: Mapping[str, str]) -> tuple[BlockProfile, ...]:
        """The blocks that ran, in the order in which they began."""
        return tuple(self._block(path, class_names[path]) for path in self.blocks if path in class_names)

    def top_operators(self) -> tuple[OperatorProfile, ...]:
        """The most expensive operators: by the device's time where there is one."""
        by_cost = sorted(self.operators.items(), key=lambda item: self._cost(item[1]), reverse=True)
        return tuple(
            OperatorProfile(
                name, total.calls, total.self_cpu_us / 1e6, total.device_us / 1e6 if self.has_device else None
            )
            for name, total in by_cost[:MOST_OPERATORS]
        )

    def _add_event(self, event: Any) -> None:
        is_mark = event.name.startswith(LABEL)
        total = self.blocks[event.name.removeprefix(LABEL)] if is_mark else self.operators[event.name]
        total.calls += 1
        total.cpu_us += event.cpu_time_total
        total.self_cpu_us += event.self_cpu_time_total
        if not is_mark:
            for kernel in event.kernels:
                self.kernel_us[kernel.device] += kernel.duration
        events = _with_all_it_called(event) if is_mark else (event,)
        total.device_us += sum(_device_us(part) for part in events)

    def _add_memory(self, events: list[Any]) -> None:
        kind = DeviceType.CUDA if self.has_device else DeviceType.CPU
        changes = sorted(
            (event.start_ns(), event.nbytes())
            for event in events
            if event.name() == _MEMORY and event.device_type() == kind
        )
        for event in events:
            if event.name().startswith(LABEL) and event.device_type() == DeviceType.CPU:
                path, start = event.name().removeprefix(LABEL), event.start_ns()
                inside = [size for at, size in changes if start <= at <= start + event.duration_ns()]
                self.allocated[path] += sum(size for size in inside if size > 0)
                self.growth[path] = max(self.growth[path], _highest_sum(inside))

    def _cost(self, found: _Sum) -> float:
        return found.device_us if self.has_device else found.self_cpu_us

    def _block(self, path: str, class_name: str) -> BlockProfile:
        total = self.blocks[path]
        return BlockProfile(
            path,
            class_name,
            total.calls,
            total.cpu_us / 1e6,
            total.self_cpu_us / 1e6,
            total.device_us / 1e6 if self.has_device else None,
            self.allocated[path],
            self.growth[path],
        )


def _with_all_it_called(event: Any) -> Iterator[Any]:
    """An event and all that it called, without recursion: traces are deep."""
    waiting = [event]
    while waiting:
        called = waiting.pop()
        yield called
        waiting += called.cpu_children


def _device_us(event: Any) -> float:
    """Of the kernels that an event started itself. A mark's own shadow on the device is not a kernel."""
    return float(sum(kernel.duration for kernel in event.kernels if not kernel.name.startswith(LABEL)))


def _highest_sum(changes: Iterable[int]) -> int:
    """The highest of the running sums, at least 0."""
    highest = running = 0
    for change in changes:
        running += change
        highest = max(highest, running)
    return highest
