"""`profile_steps`: torch's profiler on a few steps, told block by block, and nothing on all others."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from sigmascope.errors import ConfigError
from sigmascope.monitor.context import current_recorder
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.hooks import COMPILED_IN_PLACE, Hook
from sigmascope.monitor.json_values import as_json
from sigmascope.monitor.profile_blocks import Marks, blocks_of, denoiser_of, why_no_blocks
from sigmascope.monitor.profile_session import ProfileSession
from sigmascope.monitor.profile_summary import ProfileSums
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.scope import Scope
from sigmascope.records.atomic import atomic_path, require_writable
from sigmascope.records.profile import PROFILES, StepsProfile


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
        self._no_blocks = why_no_blocks(denoiser, self._blocks)
        self._session = ProfileSession(Marks({} if self._no_blocks else self._blocks))
        self._handles: list[RemovableHandle] = []
        self._lock = threading.Lock()
        self._calls = 0
        self._scope: Scope | None = None
        self._unavailable: dict[str, str] = {}

    def __enter__(self) -> "ProfiledSteps":
        if getattr(self._denoiser, "_compiled_call_impl", None) is not None:
            self._session.refused = COMPILED_IN_PLACE.partition(";")[0]
        elif not self._handles:
            self._guard.call("profile", self._put_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._guard.read("profile", self._session.stop)  # Ctrl-C may have come in the middle of a step
        self.profile = self._guard.call("profile summary", self._summary)
        self._guard.read("profile", self._note)
        self._session.taken.clear()
        self._scope = None

    def _put_on(self) -> None:
        before, after = Hook(self._before), Hook(self._after)
        self._handles.append(self._denoiser.register_forward_pre_hook(before, prepend=True))
        self._handles.append(self._denoiser.register_forward_hook(after, always_call=True))

    def _before(self) -> None:
        with self._lock:
            self._calls += 1
            step = self._calls
            if step in self._steps and not self._session.is_running():
                self._guard.call("profile", lambda: self._start(step))

    def _start(self, step: int) -> None:
        if self._scope is None:
            self._scope = self._current_scope()
        self._session.start(step)

    def _after(self) -> None:
        if self._session.is_running(threading.get_ident()):
            self._guard.call("profile", self._session.stop)

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
            reason = self._session.refused or self._guard.reasons.get("profile") or called
            gaps["steps"] = f"steps {', '.join(map(str, missed))}: {reason}"
        if not self._session.saw_device:
            gaps["device_seconds"] = "no CUDA or HIP device was in use"
        return gaps

    def _write_trace(self, step: int, profiler: Any) -> str | None:
        assert self._trace is not None
        path = _of_step(self._trace, step) if len(self._steps) > 1 else self._trace

        def write() -> str:
            with atomic_path(path) as temporary:
                profiler.export_chrome_trace(str(temporary))
            return str(path)

        written, reason = self._guard.read("trace", write)
        if reason is not None:
            self._unavailable["traces"] = reason
        return written

    def _note(self) -> None:
        """Put the profile on the stage in which the first chosen step ran."""
        if self._scope is not None and self.profile is not None:
            earlier = self._scope.facts.get(PROFILES)
            others = earlier if isinstance(earlier, list) else []
            self._scope.facts[PROFILES] = [*others, as_json(self.profile)]


def profile_steps(
    watching: object = None,
    module: object = None,
    steps: Sequence[int] = (3,),
    *,
    trace: str | os.PathLike[str] | None = None,
) -> ProfiledSteps:
    """Return a context that profiles chosen steps of a denoiser, block by block.

    The sums become a fact of the stage that is open when the first of them begins
    (`sigmascope.records.profile.profiles_of(stage)`), and are the context's `profile` afterwards. Steps that are not
    chosen run as always. A chosen one is slower, and waits for the accelerator at its end.

    Args:
        watching: The recorder, `WorkflowMonitor` or `PerformanceMonitor` whose record it belongs to; None: the current
            recorder, if any.
        module: The denoiser, or the pipeline (or what wraps the module) that has one.
        steps: Which forward calls of the denoiser, counted from 1 since the context was entered. Under guidance in
            two calls a step has two. The first ones tell of warming up.
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


def _of_step(trace: Path, step: int) -> Path:
    """`trace-step3.json` for `trace.json`."""
    ending = ".json.gz" if trace.name.endswith(".json.gz") else trace.suffix
    return trace.with_name(f"{trace.name.removesuffix(ending)}-step{step}{ending}")
