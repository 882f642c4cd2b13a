"""`Recorder` watches a workflow stage by stage and step by step, and gives a `Run`.

A recorder is a guest in the program that it watches. It raises nothing into it, and what the program
raises passes unchanged; it keeps no tensor, model or exception alive; it never waits for an accelerator.

A watched program holds a `LiveStage`, a `Step` or `HookedSteps` in its hands. Library code that may or may not
be watched uses `stage` and `step`, which belong to whichever recorder is current in its context.
"""

import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor, nn

from sigmascope.history.live import MOST_STEPS, LiveRun
from sigmascope.monitor import peaks
from sigmascope.monitor.guard import Guard, as_json, to_the_end
from sigmascope.monitor.hooks import After, HookSet
from sigmascope.monitor.scope import (
    GENERATION,
    WHOLE,
    Clock,
    FoldedScopes,
    Instruments,
    Mark,
    Scope,
    StepColumns,
    StepListener,
)
from sigmascope.monitor.stacks import STACKS, StackSampler
from sigmascope.probes import Accelerator, Reading, module_facts, tensor_facts
from sigmascope.probes.host import place_in_group
from sigmascope.records.performance import HOST_STACKS
from sigmascope.records.run import (
    GROUP,
    OUTPUT_HASHES,
    Finding,
    Folded,
    HostFacts,
    Run,
    Stage,
    path_in_words,
    stage_path,
)
from sigmascope.threads import hands_off

UNSTAGED = "unstaged"
"""The stage that holds steps outside of all stages."""
RUNS_WITHIN, WITHIN_RUN = "runs_within", "within_run"
"""Facts in which two runs name each other, if stages of one are inside a stage of the other."""
Entered: TypeAlias = "tuple[int, Scope, Mark | None, Entered | None]"
"""What `Step` has entered: when, in which scope, with which mark, and what was entered before."""
_SAID_BY_ANALYSES: Final[Mapping[str, tuple[str, ...]]] = {
    "values.not_finite": ("latent_not_finite", "pictures_not_finite", "vace_not_finite"),
    "memory.kept_after_stage": ("memory_kept",),
    "lora.modules_unmatched": ("lora_",),
}
"""By rule, how the ids of analyses' findings that say the same begin."""
_LEFT_TO_RULES: Final = frozenset({"memory_fragmented"})
"""Findings that an analysis makes from its stage alone. A rule judges better by the whole run, in which a cache that all
stages need is healthy."""


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
        keeps_words: Whether the words of exceptions, which may quote a prompt, go into the record; else their type and place.
        keep: How many generations stay in the record in full, and beside them so many stages of each other name; earlier
            ones are folded into sums (`Run.folded`). None: all stay, and the record grows for as long as it lasts.
        stacks: Whether a thread looks where the program's own code is while no step runs, from entering the recorder on
            (`sigmascope.records.performance.host_stacks`).

    Attributes:
        spare: How many more than `keep` stay until `take_older` takes them.
        first_stage_ns: When the first stage was opened; None: none was.

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
        keeps_words: bool = True,
        keep: int | None = None,
        stacks: bool = False,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = name
        self.clock = clock
        self._instruments = Instruments(
            accelerator, sample_hz, clock, step_memory=step_memory, keeps_words=keeps_words
        )
        self._outside = Scope(UNSTAGED, self._instruments)
        self._facts: dict[str, object] = {}
        self._unavailable: dict[str, str] = {}
        self._extent = RunExtent(clock)
        self._entered: list[Frame] = []
        self._guests: list[Recorder] = []
        self._folded = None if keep is None else FoldedScopes(keep)
        self._stacks = StackSampler(self._instruments.guard, clock) if stacks else None
        self.spare = 0
        self.first_stage_ns: int | None = None

    def begin_at(self, moment_ns: int) -> None:
        """Let the run begin at this moment of the clock, before anything is recorded."""
        self._extent.begin_at(moment_ns)

    def stage(self, name: str) -> "LiveStage":
        """Return a stage to be entered with `with`; `sigmascope.records.run.STAGES` has the usual names."""
        return LiveStage(self, name)

    def step(self) -> "Step":
        """Return a step, which belongs to the stage that is open when it is entered. It may be entered repeatedly."""
        return Step(self)

    def hook_steps(self, module: nn.Module) -> "HookedSteps":
        """Return a context in which every call of `module` is a step; no hook is left after it."""
        return HookedSteps(self.step, module, self._instruments.guard)

    @property
    def keeps_words(self) -> bool:
        """Whether the record repeats what exceptions say."""
        return self._instruments.guard.keeps_words

    def fact(self, name: str, value: object) -> None:
        """Put a fact on the whole run; it becomes a JSON value at once."""
        fact = self._instruments.guard.reading("facts", lambda: as_json(value))
        if fact.reason is None:
            self._facts[name] = fact.value
        else:
            self._unavailable[f"facts.{name}"] = fact.reason

    def look(self) -> None:
        """Update the peaks of all open stages now, besides the updates at steps and samples."""
        self._instruments.look()

    def gpu_busy_percent(self) -> dict[str, float]:
        """Return how busy each NVIDIA device is now (0-100, NVML's mean over its last period); empty: not known.

        Read at most five times a second, whoever asks in this process. What stages record of it is
        `sigmascope.records.performance.utilization_of(stage)`.
        """
        return self._instruments.guard.call("utilization", self._instruments.sampled.busy_percent) or {}

    def host(self) -> HostFacts | None:
        """Return facts about this machine, read once per process; None if they cannot be read."""
        return self._instruments.host()

    def run(self) -> Run:
        """Return the run as known now. While anything is open, `complete` is False.

        `complete` is False too when an exception left the `with recorder:` block or, without that, the
        last stage.

        While another thread works in a stage and this one does not, no device is asked: what is not known already is None.
        """
        with hands_off() if self._works_elsewhere() else nullcontext():
            return self._run_now()

    def _works_elsewhere(self) -> bool:
        """Whether only other threads than this one have stages open."""
        threads = {scope.thread_id for scope in tuple(self._extent.open) if isinstance(scope, Scope)}
        return bool(threads) and threading.get_ident() not in threads

    def _run_now(self) -> Run:
        self._instruments.look()
        extent = self._extent
        started_ns, ended_ns = extent.edges(self._outside.columns)
        is_complete = not (extent.open or extent.broke_off)
        stages, folded = self._stages(started_ns)
        run = self._run(stages, started_ns, (ended_ns - started_ns) / 1e9, is_complete)
        seen = None
        if self._stacks is not None:
            seen = self._instruments.guard.read(STACKS, self._stacks.freeze)
        facts = run.facts if seen is None else {**run.facts, HOST_STACKS: seen}
        return replace(run, facts=facts, folded=folded)

    def progress(self) -> LiveRun | None:
        """How far the run is, read by any thread without asking a device; None: nothing is open."""
        with peaks.LOCK:
            scopes = [scope for scope in self._extent.open if isinstance(scope, Scope)]
            generations = sum(
                scope.name == GENERATION and scope.ended_ns is not None for scope in self._outside.children
            )
            generations += 0 if self._folded is None else self._folded.generations
            if not self._extent.open:
                return None
        now_ns = self.clock()
        started_ns, _ = self._extent.edges(self._outside.columns)
        # Of what several threads have open, the one that steps.
        innermost = max(scopes, key=lambda scope: (scope.path.count("/"), len(scope.columns)), default=None)
        outermost = min(scopes, key=lambda scope: scope.path.count("/"), default=None)
        live = LiveRun(
            self.id,
            self.name,
            self._extent.wall_clock(started_ns),
            (now_ns - started_ns) / 1e9,
            generations=generations,
        )
        if innermost is None or outermost is None:
            return live
        planned = innermost.planned_steps
        memory = outermost.peak_so_far()
        device = None if memory is None else memory.busiest_device()
        return replace(
            live,
            stage=path_in_words(innermost.path),
            stage_seconds=max(0.0, (now_ns - innermost.started_ns) / 1e9),
            steps=len(innermost.columns),
            planned=_planned_steps(outermost) if planned is None else planned,
            step_seconds=innermost.columns.last_seconds(MOST_STEPS),
            peak_bytes=None
            if memory is None
            else memory.rss_bytes
            if device is None
            else memory.accelerator(device).allocated_bytes,
            peak_of=device or "process",
        )

    def settle(self) -> None:
        """Read what accelerators have finished by now of stages that are over. Waits for nothing."""
        self._instruments.settle()

    def run_of(self, stage: "LiveStage") -> Run:
        """Return the run as if it were this stage alone: under the same id, from its beginning to its end."""
        frozen = stage.record()
        return self._run((frozen,), stage.started_ns, frozen.seconds, frozen.success)

    def take_older(self, least: int = 1) -> Run | None:
        """Fold the generations beyond `keep`, and return them as a run with the same id and clock.

        Args:
            least: How many stages of one name have to be more than `keep`; below that None is returned.
        """
        folded = self._folded
        if folded is None:
            return None
        with peaks.LOCK:
            places = list(_open_places(self._outside))
            if max(place.most_closed() for place in places) < folded.kept + least:
                return None
            taken = sorted(
                (scope for place in places for scope in place.take_out(folded.kept)),
                key=lambda scope: scope.started_ns,
            )
            for scope in taken:
                folded.add(scope)
        started_ns, _ = self._extent.edges(self._outside.columns)
        stages = tuple(scope.freeze(started_ns) for scope in taken)
        seconds = max(stage.started_seconds + stage.seconds for stage in stages)
        return self._run(stages, started_ns, seconds, is_complete=True)

    def _run(self, stages: tuple[Stage, ...], started_ns: int, seconds: float, is_complete: bool) -> Run:
        group = place_in_group()
        return Run(
            id=self.id,
            name=self.name,
            started_at=self._extent.wall_clock(started_ns),
            seconds=seconds,
            host=self.host(),
            stages=stages,
            facts=dict(self._facts) if group is None else {GROUP: group, **self._facts},
            complete=is_complete,
            unavailable={**self._unavailable, **self._instruments.guard.reasons},
        )

    def __enter__(self) -> "Recorder":
        frame = Frame(self, self._outside, CURRENT.get())
        self._entered.append(frame)
        self._extent.begin(frame)
        self._instruments.start_sampling(frame)
        CURRENT.set(frame)
        if self._stacks is not None:
            self._stacks.start()
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
            to_the_end(partial(self._leave, frame), error)

    def _leave(self, frame: "Frame", error: BaseException | None) -> None:
        """Leave the recorder's block. What Ctrl-C broke off is done by another call."""
        try:
            if frame in self._entered:
                pop(frame)
                if self._stacks is not None and len(self._entered) == 1:
                    self._stacks.stop()
                self._instruments.stop_sampling(frame)
                self._entered.remove(frame)
        finally:  # also when Ctrl-C comes just now
            self._extent.end(frame, error)

    def let_go(self, error: BaseException | None = None) -> None:
        """Stop sampling and listening, even if stages were left open.

        Args:
            error: What broke into the end of the block, which went well until then.
        """
        if error is not None:
            self._extent.broke_off = True
        if self._stacks is not None:
            self._stacks.stop()
        self._instruments.stop_sampling()
        self._instruments.tracker.let_go()

    def new_scope(self, name: str) -> Scope:
        """Return a scope that is not open yet. This method and those below are called by stages and steps."""
        return Scope(name, self._instruments)

    def current_scope(self) -> Scope:
        """Return the innermost open scope of this context, or the one outside all stages."""
        return next((frame.scope for frame in frames_here() if frame.recorder is self), self._outside)

    def open_stage(self, scope: Scope) -> "Frame":
        """Open a scope inside the current one."""
        self._extent.begin(scope)
        around = self.current_scope()
        around.children.append(scope)
        scope.is_outermost = around is self._outside
        own = self._instruments.guard.read("stages", lambda: stage_path(scope.name)) or scope.name
        scope.path = own if scope.is_outermost else f"{around.path}/{own}"
        scope.stays_whole = around.stays_whole or scope.name in WHOLE
        enclosing = stage_here(self.clock)
        if enclosing is not None:
            scope.step_listener = enclosing.scope.step_listener
            if scope.is_outermost and enclosing.scope.takes_in_others:
                enclosing.scope.children.append(scope)
                enclosing.recorder.welcome(self)
        try:
            self._instruments.guard.read("stages", scope.open)
        except BaseException as interruption:  # Ctrl-C just now: the stage will not be entered
            scope.close(interruption)
            self._extent.end(scope, interruption)
            raise
        if self.first_stage_ns is None:
            self.first_stage_ns = scope.started_ns
        frame = Frame(self, scope, CURRENT.get(), around)
        CURRENT.set(frame)
        if self._stacks is not None:
            self._stacks.opened(scope)
        return frame

    def welcome(self, guest: "Recorder") -> None:
        """Link another recorder that has a stage inside one of this recorder's stages: each names the other's run.

        What it raises passes through stages of both: where one of them keeps no words, neither does.
        """
        if guest not in self._guests:
            guards = (self._instruments.guard, guest._instruments.guard)
            for guard in guards:
                guard.keeps_words = all(other.keeps_words for other in guards)
            self._guests.append(guest)
            self.fact(RUNS_WITHIN, [other.id for other in self._guests])
            guest.fact(WITHIN_RUN, self.id)

    def close_stage(self, frame: "Frame", error: BaseException | None) -> None:
        """Close what `open_stage` opened; again does nothing."""
        scope, guard = frame.scope, self._instruments.guard
        if scope not in self._extent.open:  # no method, which could fail: the stage must close
            return
        guard.read("stages", lambda: scope.close(error))
        if scope.ended_ns is None:  # what reads it failed first: nothing of ours may go on
            guard.call("stages", lambda: scope.close(error))
        self.end_stage(frame, error)

    def end_stage(self, frame: "Frame", error: BaseException | None) -> None:
        """Know that a stage is over that was closed as far as that goes."""
        pop(frame)
        if self._stacks is not None:
            self._stacks.closed(frame.scope)
        self._instruments.guard.read("folding", lambda: self._fold_older(frame))
        self._extent.end(frame.scope, error)

    def dissolve(self, scope: Scope, drops: Collection[str]) -> None:
        """Put what lies in a scope that is over in its place, but for scopes of these names."""
        with peaks.LOCK:
            around = _scope_around(self._outside, scope)
            if around is not None:
                around.put_in_place(scope, [child for child in scope.children if child.name not in drops])

    def _fold_older(self, frame: "Frame") -> None:
        """Fold what a stage that is over has made too many of its name."""
        folded, around = self._folded, frame.around
        if folded is None or around is None:
            return
        with peaks.LOCK:
            around.take_closed(frame.scope)
            for scope in around.take_out(folded.kept + self.spare):
                folded.add(scope)

    def _stages(self, started_ns: int) -> tuple[tuple[Stage, ...], Folded | None]:
        with peaks.LOCK:  # each stage is in one of them
            outermost, folded = list(self._outside.children), None
            if self._folded is not None:
                folded = self._folded.freeze(started_ns, self._instruments)
        stages = [scope.freeze(started_ns) for scope in outermost]
        if len(self._outside.columns):
            stages.append(self._outside.freeze_steps(started_ns))
        return tuple(sorted(stages, key=lambda stage: stage.started_seconds)), folded


def _planned_steps(scope: Scope) -> int | None:
    """How many timesteps the last schedule in a scope has; None: none was set."""
    schedules = [child.facts.get("timesteps") for child in list(scope.children)]
    return next((len(times) for times in reversed(schedules) if isinstance(times, list) and times), None)


def _scope_around(place: Scope, scope: Scope) -> Scope | None:
    """The scope in `place`, or that itself, in which another one lies directly."""
    if scope in place.children:
        return place
    found = (_scope_around(inner, scope) for inner in reversed(place.children))
    return next((around for around in found if around is not None), None)


def _open_places(place: Scope) -> Iterator[Scope]:
    """The scope and those open in it in which stages are folded."""
    yield place
    for inner in place.children:
        if inner.ended_ns is None and not inner.stays_whole:
            yield from _open_places(inner)


def with_findings(run: Run, guard: Guard) -> Run:
    """The run with what the analyses find in it, or why one of them could not look."""
    # Only now: a call that is not watched needs none of it. It may be read at the interpreter's end, where no import works.
    imported = guard.reading("findings", lambda: import_module("sigmascope.analysis.diagnostics"))
    diagnostics = imported.value
    if diagnostics is None:
        return replace(
            run,
            unavailable={**run.unavailable, "findings": imported.reason or "no analysis could be imported"},
        )
    all_findings: list[Finding] = list(run.findings)
    unavailable = dict(run.unavailable)
    analyses = (
        ("rules", diagnostics.diagnose),
        ("model_changes", diagnostics.find_model_changes),
        ("stages", diagnostics.find_stage_findings),
        ("vae", diagnostics.find_vae_findings),
    )
    for name, analysis in analyses:
        reading = guard.reading(name, lambda analysis=analysis: analysis(run))  # type: ignore[misc]
        all_findings += reading.value or ()
        if reading.reason is not None:
            unavailable[f"findings.{name}"] = reading.reason
    kept = tuple(
        finding
        for finding in all_findings
        if finding.id not in _LEFT_TO_RULES and not _is_said_better(finding, all_findings)
    )
    return replace(run, findings=kept, unavailable=unavailable)


def _is_said_better(rule: Finding, findings: list[Finding]) -> bool:
    """Whether a stage's own analysis, which has seen more than the record, already says what the rule says."""
    known = _SAID_BY_ANALYSES.get(rule.id, ())
    return (
        any(finding.stage == rule.stage and finding.id.startswith(known) for finding in findings)
        if known
        else False
    )


def current_recorder() -> Recorder | None:
    """Return the recorder whose `with` block, or whose stage, this context is in; None outside of all."""
    frame = next(frames_here(), None)
    return None if frame is None else frame.recorder


def stage(name: str) -> "LiveStage | NullStage":
    """Return a stage of the current recorder, or one that does nothing without a recorder (0.2 µs)."""
    recorder = current_recorder()
    return _NULL_STAGE if recorder is None else recorder.stage(name)


def step() -> "Step | nullcontext[None]":
    """Return a step of the current recorder, or one that does nothing without a recorder (0.2 µs)."""
    recorder = current_recorder()
    return _NULL_STEP if recorder is None else recorder.step()


class NullStage:
    """What `stage` gives without a recorder: it accepts everything and keeps nothing."""

    __slots__ = ()

    def __enter__(self) -> "NullStage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def tensor(self, name: str, tensor: Tensor, *, statistics: bool | None = None) -> None:
        """Do nothing."""

    def module(self, name: str, module: object) -> None:
        """Do nothing."""

    def fact(self, name: str, value: object) -> None:
        """Do nothing."""


_NULL_STAGE = NullStage()


_NULL_STEP = nullcontext()


class LiveStage:
    """A stage, entered with `with`. Entered again, it is a new stage of the same name.

    What it is told goes to the stage that was entered last, also after its end: facts that take time to
    read are best told then, when the stage's clock has stopped. Threads need an object each.
    """

    __slots__ = ("_entered", "_recorder", "_scope")

    def __init__(self, recorder: "Recorder", name: str) -> None:
        self._recorder = recorder
        self._scope = recorder.new_scope(name)
        self._entered: list[Frame] = []

    def __enter__(self) -> "LiveStage":
        recorder = self._recorder
        if self._scope.was_opened:
            self._scope = recorder.new_scope(self._scope.name)
        self._entered.append(recorder.open_stage(self._scope))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._entered:
            return
        frame = self._entered[-1]
        try:
            to_the_end(partial(self._leave, frame), error)
        except BaseException as interruption:
            if frame.scope.ended_ns is not None:  # a second Ctrl-C: it is not tried again
                self._recorder.end_stage(frame, error or interruption)
            raise

    def _leave(self, frame: "Frame", error: BaseException | None) -> None:
        self._recorder.close_stage(frame, error)
        if frame in self._entered:
            self._entered.remove(frame)
        if self._entered:
            self._scope = self._entered[-1].scope

    @property
    def is_open(self) -> bool:
        """Whether it has been entered and not left."""
        return bool(self._entered)

    def tensor(self, name: str, tensor: Tensor, *, statistics: bool | None = None) -> None:
        """Record facts about a tensor, without keeping it.

        Args:
            name: What to call it in `Stage.tensors`.
            tensor: Any tensor, of any shape.
            statistics: True also for an accelerator's tensor, which waits for it; None: for CPU tensors
                only; False: none.
        """
        self._note("tensors", name, lambda: tensor_facts(tensor, statistics=statistics))

    def module(self, name: str, module: object) -> None:
        """Record facts about a model, an `nn.Module` or a wrapper of one, without keeping it."""
        self._note("modules", name, lambda: module_facts(module))

    def fact(self, name: str, value: object) -> None:
        """Record any other fact; it becomes a JSON value at once (see `as_json`)."""
        self._note("facts", name, lambda: as_json(value))

    def output_hash(self, name: str, reading: Reading[str]) -> None:
        """Record the hash of the stage's output of this name, or why there is none; the last call counts."""
        scope = self._scope
        known = scope.facts.get(OUTPUT_HASHES)
        scope.facts[OUTPUT_HASHES] = {**(known if isinstance(known, dict) else {}), name: reading.value}
        self.account_for(f"{OUTPUT_HASHES}.{name}", reading)

    def missing(self, name: str, reason: str | None) -> None:
        """Record why something about the stage is not known."""
        self._scope.unavailable[name] = reason or "unknown"

    def account_for(self, name: str, reading: Reading[Any]) -> None:
        """Record why a reading has no value; one that has takes back what an earlier one of that name said."""
        if reading.value is None:
            self.missing(name, reading.reason)
        else:
            self._scope.unavailable.pop(name, None)

    def on_step(self, listener: StepListener) -> None:
        """Call the listener at the end of each step of this stage, and of stages that are opened in it from now on.

        It must be fast and raise nothing.
        """
        self._scope.step_listener = listener

    def plan_steps(self, number: int) -> None:
        """Say how many steps it will have, for who looks while it runs."""
        self._scope.planned_steps = number

    def take_in_others(self) -> None:
        """Let stages that other recorders with the same clock open in this one lie in it too, from now on."""
        self._scope.takes_in_others = True

    def is_of(self, scope: Scope) -> bool:
        """Whether the stage that was entered last is this one."""
        return self._scope is scope

    def end_at(self, moment_ns: int) -> None:
        """Let the stage that is open have ended at this moment of the recorder's clock, though it is closed later.

        What is read where a stage ends (processor time, the accelerator's clock) is not known of it then.
        """
        self._scope.end_at(moment_ns)

    def dissolve(self, drops: Collection[str] = ()) -> None:
        """Take the stage, which is over, out of the record; those inside it take its place.

        Args:
            drops: Names of stages directly inside it that go with it.
        """
        self._recorder.dissolve(self._scope, drops)

    @property
    def started_ns(self) -> int:
        """When the stage that was entered last began, on the recorder's clock."""
        return self._scope.started_ns

    @property
    def seconds(self) -> float:
        """How long the stage that was entered last took; while it is open, up to now."""
        ended_ns = self._scope.ended_ns
        return ((self._recorder.clock() if ended_ns is None else ended_ns) - self.started_ns) / 1e9

    def record(self) -> Stage:
        """Return what is known of the stage that was entered last, on a clock that begins with it."""
        return self._scope.freeze(self.started_ns)

    def _note(self, what: Literal["tensors", "modules", "facts"], name: str, read: Callable[[], Any]) -> None:
        scope = self._scope
        facts = scope.instruments.guard.reading(what, read)
        if facts.reason is None:
            getattr(scope, what)[name] = facts.value
        else:
            scope.unavailable[f"{what}.{name}"] = facts.reason


class Step:
    """A step of the innermost open stage, to be entered with `with`, as often as one likes.

    Every entry is one step, also one inside another. Threads need an object each. `last` is when the
    step that was left last began and ended, in nanoseconds of the recorder's clock; None: none was open.
    """

    __slots__ = ("_entered", "_recorder", "last")

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        # started, scope, mark at the start, and what was entered before: a chain, for re-entry
        self._entered: Entered | None = None
        self.last: tuple[int, int] | None = None

    def __enter__(self) -> "Step":
        recorder = self._recorder
        scope = recorder.current_scope()
        try:
            mark = None if scope.columns.timings is None else scope.instruments.mark()
            self._entered = (scope.begin_step(), scope, mark, self._entered)
        except Exception as failure:  # noqa: BLE001 - a monitor's failure must not reach the host
            scope.instruments.guard.switch_off("steps", failure)
        return self

    def drop(self) -> None:
        """Let no step have been entered: what is open is counted nowhere."""
        if self._entered is not None:
            self._entered[1].in_step = False
        self._entered = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_ns = self._recorder.clock()
        if self._entered is None:
            self.last = None
            return
        started_ns, scope, mark, self._entered = self._entered
        self.last = (started_ns, ended_ns)
        try:
            scope.add_step(started_ns, ended_ns, mark)
        except Exception as failure:  # noqa: BLE001 - as above
            scope.instruments.guard.switch_off("steps", failure)


class HookedSteps:
    """While entered, every call of a module is a step, even if it raises. Input and output stay as they are."""

    def __init__(self, new_step: "Callable[[], Step]", module: nn.Module, guard: Guard) -> None:
        self._new_step = new_step
        self._module = module
        self._guard = guard
        self._hooks = HookSet(guard, "hook_steps")

    def __enter__(self) -> "HookedSteps":
        self._guard.read("hook_steps", lambda: self._hooks.hook_calls(self._module, self._before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hook off."""
        self._hooks.detach()

    def _before(self, *_: object) -> After:
        step = self._new_step()
        step.__enter__()
        return lambda _result, _error: step.__exit__(None, None, None)


class Frame:
    """A place in a context's chain of open scopes. `scope` is the recorder's own outside all stages.

    `around` is the scope of the same recorder that a stage's own lies in.
    """

    __slots__ = ("around", "is_open", "outer", "recorder", "scope")

    def __init__(
        self, recorder: "Recorder", scope: Scope, outer: "Frame | None", around: Scope | None = None
    ) -> None:
        self.recorder = recorder
        self.scope = scope
        self.outer = outer
        self.around = around
        self.is_open = True


CURRENT: ContextVar[Frame | None] = ContextVar("sigmascope_current", default=None)
"""The innermost scope of this thread's or task's context. A task starts with its creator's."""


def frames_here() -> Iterator[Frame]:
    """The frames of this context that are open, the innermost first."""
    frame = CURRENT.get()
    while frame is not None:
        if frame.is_open:
            yield frame
        frame = frame.outer


def pop(frame: Frame) -> None:
    """Close the frame, and leave all closed frames of this context.

    Scopes need not close in the reverse order of their opening, nor in the context that opened them.
    """
    frame.is_open = False
    current = CURRENT.get()  # no `frames_here`: what takes something off calls nothing that could fail
    while current is not None and not current.is_open:
        current = current.outer
    CURRENT.set(current)


def stage_here(clock: Clock) -> Frame | None:
    """Return the stage that is open here, even another recorder's with the same clock."""
    stages = (frame for frame in frames_here() if frame.scope.was_opened)
    return next((frame for frame in stages if frame.recorder.clock is clock), None)


class RunExtent:
    """From the first thing that is opened to the end of the last.

    Attributes:
        open: What is open now.
        broke_off: Whether an exception ended what was closed last.
    """

    def __init__(self, clock: Clock) -> None:
        self.open: set[object] = set()
        self.broke_off = False
        self._clock = clock
        self._made_at = (datetime.now(UTC), clock())
        self._started_ns: int | None = None
        self._ended_ns = 0

    def begin(self, thing: object) -> None:
        """Know that this is open."""
        with peaks.LOCK:
            if self._started_ns is None:
                self._started_ns = self._clock()
            self.open.add(thing)

    def begin_at(self, moment_ns: int) -> None:
        """Know that it began then already."""
        with peaks.LOCK:
            self._started_ns = moment_ns if self._started_ns is None else min(self._started_ns, moment_ns)

    def end(self, thing: object, error: BaseException | None) -> None:
        """Know that this is over; again, that its end was broken into.

        Args:
            thing: What was open.
            error: What ended it early.
        """
        with peaks.LOCK:
            self.broke_off = error is not None
            if thing in self.open:
                self._ended_ns = self._clock()
                self.open.remove(thing)

    def edges(self, outside: StepColumns) -> tuple[int, int]:
        """Beginning and end of all that was recorded, in nanoseconds of the clock."""
        now_ns = self._clock()
        first_ns = now_ns if self._started_ns is None else self._started_ns
        steps_began_ns, steps_ended_ns = outside.edges() or (now_ns, self._ended_ns)
        started_ns = min(steps_began_ns, first_ns)
        ended_ns = now_ns if self.open else steps_ended_ns
        return started_ns, max(ended_ns, self._ended_ns, started_ns)

    def wall_clock(self, at_ns: int) -> str:
        """A moment of the clock as a date, in ISO 8601."""
        made_at, made_ns = self._made_at
        return (made_at + timedelta(microseconds=(at_ns - made_ns) / 1e3)).isoformat()
