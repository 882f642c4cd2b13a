"""`Recorder`: watches a workflow stage by stage and step by step, and gives a `Run`.

A recorder is a guest in the program that it watches. It raises nothing into it, and what the program
raises passes unchanged; it keeps no tensor, model or exception alive; it never waits for an accelerator.
"""

import time
import uuid
from types import TracebackType

from torch import nn

from sigmascope.monitor.hooks import HookedSteps
from sigmascope.monitor.instruments import Clock, Instruments
from sigmascope.monitor.json_values import as_json
from sigmascope.monitor.live import CURRENT, Frame, LiveStage, Step, pop, push, step_listener_here
from sigmascope.monitor.run_extent import RunExtent
from sigmascope.monitor.scope import Scope
from sigmascope.probes import Accelerator
from sigmascope.records.host import HostFacts
from sigmascope.records.run import Run, Stage

UNSTAGED = "unstaged"
"""The stage under which steps appear that ran outside all stages."""


class Recorder:
    """Records stages (that nest) and steps, in any number of threads and tasks.

    A stage opened in a thread or task lies in the stage that is current in its context: an asyncio task
    starts in its creator's, a thread in none unless it is run in a copy of a context.

    `with recorder:` makes it the current recorder of this context, which library code asks for
    (`sigmascope.monitor.stage`, `step`), and says when the run ends. Without it, the run lasts from the
    first stage to the end of the last.

    Args:
        name: What the run is called.
        sample_hz: How often a thread looks at memory between the steps, at most 10 a second; None: never.
        accelerator: Where to read devices; None: what torch would use.
        clock: Monotonic nanoseconds.
        step_memory: Whether the process's resident bytes are read at the end of each step, which is two thirds of what
            a step costs. Without it they are read at the edges of stages and by the thread.

    Examples:
        >>> recorder = Recorder(name="portrait")
        >>> with recorder.stage("denoising") as stage:
        ...     for _ in range(2):
        ...         with recorder.step():
        ...             pass
        ...     stage.fact("guidance_scale", 3.5)
        >>> len(recorder.run().stages[0].steps)
        2
    """

    def __init__(
        self,
        name: str = "",
        sample_hz: float | None = 10.0,
        accelerator: Accelerator | None = None,
        clock: Clock = time.perf_counter_ns,
        *,
        step_memory: bool = True,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.clock = clock
        self._instruments = Instruments(accelerator, sample_hz, clock, step_memory=step_memory)
        self._outside = Scope(UNSTAGED, self._instruments)
        self._facts: dict[str, object] = {}
        self._unavailable: dict[str, str] = {}
        self._extent = RunExtent(clock)
        self._entered: list[Frame] = []

    # --- what a watched program calls

    def stage(self, name: str) -> LiveStage:
        """Return a stage to be entered with `with`; `sigmascope.records.run.STAGES` has the usual names."""
        return LiveStage(self, name)

    def step(self) -> Step:
        """Return a step of the stage that is open when it is entered. It may be entered again and again."""
        return Step(self)

    def hook_steps(self, module: nn.Module) -> HookedSteps:
        """Return a context in which every forward call of `module` is a step; no hook is left after it."""
        return HookedSteps(self.step, module, self._unavailable)

    def fact(self, name: str, value: object) -> None:
        """Note something about the whole run; it is turned into a JSON value at once."""
        fact, reason = self._instruments.guard.read("facts", lambda: as_json(value))
        if reason is None:
            self._facts[name] = fact
        else:
            self._unavailable[f"facts.{name}"] = reason

    def look(self) -> None:
        """Bring the peaks of all open stages up to date now, between the steps and samples that do it anyway."""
        self._instruments.look()

    def gpu_busy_percent(self) -> dict[str, float]:
        """Return how busy each NVIDIA device is now (0-100, NVML's mean over its last period); empty: not known.

        Read at most five times a second, whoever asks in this process. What stages record of it is
        `sigmascope.records.utilization.utilization_of(stage)`.
        """
        return self._instruments.guard.call("utilization", self._instruments.sampled.meter.now) or {}

    def host(self) -> HostFacts | None:
        """Return facts about this machine, read once a process; None if they cannot be read."""
        return self._instruments.host()

    def run(self) -> Run:
        """Return all that is known now. While anything is open, `complete` is False.

        `complete` is False too when an exception left the `with recorder:` block or, without that, the
        last stage.
        """
        instruments = self._instruments
        instruments.look()
        extent = self._extent
        started_ns, ended_ns = extent.edges(self._outside.columns)
        return Run(
            id=self.id,
            name=self.name,
            started_at=extent.wall_clock(started_ns),
            seconds=(ended_ns - started_ns) / 1e9,
            host=self.host(),
            stages=self._stages(started_ns),
            facts=dict(self._facts),
            complete=not (extent.open_frames or extent.broke_off),
            unavailable={**self._unavailable, **instruments.guard.reasons},
        )

    def __enter__(self) -> "Recorder":
        self._extent.begin()
        self._instruments.start_sampling()
        frame = Frame(self, self._outside, CURRENT.get())
        self._entered.append(frame)
        push(frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = CURRENT.get()
        while frame is not None and frame not in self._entered:
            frame = frame.outer
        if frame is None and self._entered:
            frame = self._entered[-1]  # left in another context than it was entered in
        if frame is not None:
            self._entered.remove(frame)
            pop(frame)
            try:
                self._instruments.stop_sampling()
            finally:  # also when Ctrl-C comes just now
                self._extent.end(error)

    # --- what stages and steps call

    def new_scope(self, name: str) -> Scope:
        """Return a scope that is not open yet."""
        return Scope(name, self._instruments)

    def current_scope(self) -> Scope:
        """Return the innermost open scope of this context, or the one outside all stages."""
        frame = CURRENT.get()
        while frame is not None:
            if frame.recorder is self and frame.is_open:
                return frame.scope
            frame = frame.outer
        return self._outside

    def open_stage(self, scope: Scope) -> Frame:
        """Open a scope inside the current one."""
        self._extent.begin()
        around = self.current_scope()
        around.children.append(scope)
        scope.is_outermost = around is self._outside
        scope.step_listener = step_listener_here(self.clock)
        try:
            self._instruments.guard.read("stages", scope.open)
        except BaseException as interruption:  # Ctrl-C just now: the stage will not be entered
            scope.close(interruption)
            self._extent.end(interruption)
            raise
        frame = Frame(self, scope, CURRENT.get())
        push(frame)
        return frame

    def close_stage(self, frame: Frame, error: BaseException | None) -> None:
        """Close what `open_stage` opened."""
        try:
            self._instruments.guard.read("stages", lambda: frame.scope.close(error))
        except BaseException as interruption:  # Ctrl-C just now
            error = error or interruption
            raise
        finally:
            pop(frame)
            self._extent.end(error)

    def _stages(self, started_ns: int) -> tuple[Stage, ...]:
        stages = [scope.freeze(started_ns) for scope in list(self._outside.children)]
        if len(self._outside.columns):
            stages.append(self._outside.freeze_steps(started_ns))
        return tuple(sorted(stages, key=lambda stage: stage.started_seconds))
