"""A watch that is open: it puts observers on pipelines, and they open stages.

A `Session` is one open watch. It has a recorder, and an `Observer` for each kind of event: calls, text encoding, the
denoiser and so on. An observer puts hooks on the pipelines that are watched; when its event comes, it enters a stage on
the `StageStack` of the thread or task that the event comes in, and leaves it when the event is over. A stack belongs to
one call of a pipeline, or to what happens outside of any.

`Denoising` (`denoising.py`) tells which calls of the denoiser are one step.
"""

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from sigmascope.analysis.memory import with_owners
from sigmascope.integrations.diffusers.denoising import Denoising
from sigmascope.integrations.diffusers.merged_before import MergedBefore
from sigmascope.integrations.imports import when_loaded
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.hooks import (
    ByIdentity,
    HookSet,
)
from sigmascope.monitor.load import Load, OwnTime
from sigmascope.monitor.output_hashes import Arrivals, HeldOutputs
from sigmascope.monitor.recorder import CURRENT, LiveStage, Recorder, frames_here, with_findings
from sigmascope.probes.models import components_of, pipeline_facts, unwrap
from sigmascope.probes.module_tree import one_look
from sigmascope.records.prompts import PromptPrivacy, privacy_of
from sigmascope.records.run import KEEP_GENERATIONS, PipelineFacts, Role, Run

T = TypeVar("T", bound="Observer")
OPEN_SESSIONS: "list[Session]" = []
"""All sessions of this process that are not over."""
STACKS: "ContextVar[tuple[StageStack, ...]]" = ContextVar("sigmascope_stacks", default=())
"""The stacks of this context, of all watches, the innermost last."""


class LoraChange(NamedTuple):
    """A LoRA method that was called during a pipeline's call, after this many of its steps."""

    method: str
    after_step: int


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What the caller of `watch` decided."""

    prompts: PromptPrivacy = "full"
    name: str | None = None
    sample_hz: float | None = 10.0
    step_memory: bool = True
    keep_generations: int | None = KEEP_GENERATIONS
    thumbnails: bool = False
    stacks: bool = False


class Session:
    """From entering a watch to leaving it."""

    def __init__(
        self, pipelines: tuple[object, ...], options: WatchOptions, observers: "Iterable[type[Observer]]"
    ) -> None:
        self.options = options
        keeps_words = privacy_of(options.prompts).keeps_words
        self.guard = Guard(keeps_words=keeps_words)
        self.recorder = Recorder(
            options.name or _name_of(pipelines),
            options.sample_hz,
            step_memory=options.step_memory,
            keeps_words=keeps_words,
            keep=options.keep_generations,
            stacks=options.stacks,
        )
        self.live: int | None = None
        self.is_over = False
        self.is_everywhere = not pipelines
        self.observers = [kind(self) for kind in observers]
        self._named = pipelines
        self._watched: ByIdentity[bool] = ByIdentity()
        self._known: ByIdentity[tuple[tuple[object, ...], PipelineFacts]] = ByIdentity()
        self.stacks: dict[int, weakref.ref[StageStack]] = {}
        self.left_open: deque[StageStack] = deque()
        self._ending: list[StageStack] = []
        self.arrivals = Arrivals()
        self.has_stages = False
        self.heard_loras = self.heard_fusing = False
        self.fused_here: set[tuple[int, str]] = set()
        self.merged_before = MergedBefore()
        self._load: Load | None = None
        self._own_time = OwnTime(self.recorder.clock)

    def open(self) -> None:
        """Begin the record, then put the observers on."""
        self.recorder.__enter__()
        self._load = Load()
        OPEN_SESSIONS.append(self)
        with self.own_work():
            for observer in self.observers:
                self._safely(observer, observer.start)
            named, self._named = self._named, ()
            for pipeline in named:
                self.watch(pipeline)

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """A look in which the time counts as the watch's own, unless a stage is open here: then it is in the stage's time."""
        stack = current_stack(self)
        is_in_stage = stack is not None and stack.open
        with one_look(), nullcontext() if is_in_stage else self._own_time.taken(has_stages=self.has_stages):
            yield

    def close(self, error: BaseException | None) -> None:
        """Take everything off, close what is open, and end the record. What Ctrl-C broke off is done by another call."""
        broken_into = error if self.is_over else None
        if broken_into is not None:
            self.guard.reasons.setdefault("watch.end", f"{type(error).__name__} broke into the watch's end")
        self.is_over = True
        # Kept alive until their stages are closed, though the context lets go of them before.
        self._ending += [stack for known in self.stacks.values() if (stack := known()) is not None]
        with ExitStack() as at_last:  # in reverse, and whatever fails before, Ctrl-C too
            at_last.callback(leave_stacks)
            at_last.callback(self.recorder.let_go, broken_into)
            at_last.callback(leave_recorder, self.recorder)
            at_last.callback(self.recorder.__exit__, None if error is None else type(error), error, None)
            at_last.callback(self._end_stages, error)
            at_last.callback(self._leave_sessions)
            for observer in self.observers:
                at_last.callback(observer.detach)

    def _leave_sessions(self) -> None:
        if self in OPEN_SESSIONS:
            OPEN_SESSIONS.remove(self)

    def _end_stages(self, error: BaseException | None) -> None:
        """Close what is open, and let go of everything that was watched."""
        self.guard.read("watch.load", self._note_load)
        self.guard.read("watch.outputs", self.arrivals.look if error is not None else self.arrivals.wait)
        self.guard.read("watch.stages", self._close_left)
        for stack in reversed(self._ending):
            # Bounded: a turn takes one out at least, unless taking out itself fails.
            for _ in range(len(stack.open)):
                self.guard.read("watch.stages", partial(stack.end, error))
        self.stacks.clear()
        self._ending.clear()
        self._watched.clear()
        self._known.clear()

    def _note_load(self) -> None:
        self._own_time.note(self.recorder)
        if self._load is not None:
            self._load.note(self.recorder)

    def record(self) -> Run:
        """The run as it is now; findings once it is over."""
        run = self.recorder.run()
        reasons = {**run.unavailable, **self.guard.reasons}
        run = replace(run, unavailable=reasons)
        if not self.is_over:
            return run
        owned = self.guard.read("watch.peaks", lambda: with_owners(run))
        run = owned or run
        diagnosed = self.guard.reading("watch.findings", lambda: with_findings(run, self.guard))
        return diagnosed.value or replace(
            run, unavailable={**reasons, "findings": diagnosed.reason or "unknown"}
        )

    def observer(self, kind: "type[T]") -> "T":
        """Its observer of this kind.

        Raises:
            LookupError: It has none.
        """
        for observer in self.observers:
            if isinstance(observer, kind):
                return observer
        raise LookupError(f"no {kind.__name__}")

    def watch(self, pipeline: object) -> PipelineFacts | None:
        """Put the observers on a pipeline, and on components that are new since; gives its facts. Never raises."""
        parts = self.guard.read("watch.pipeline", lambda: self._parts(pipeline))
        if parts is None:
            return None
        self.watch_class(type(pipeline))
        for observer in self.observers:
            self._safely(observer, partial(observer.attach, parts))
        self._close_left()
        return parts.facts

    def watch_class(self, kind: type) -> None:
        """Put on what all pipelines of a class need. Never raises."""
        for observer in self.observers:
            self._safely(observer, partial(observer.attach_class, kind))

    def stack_here(self, pipeline: object = None) -> "StageStack | None":
        """The session's stack of this context; None if what happens here is not its own.

        Outside of pipelines' calls there is one for each context, which lasts until the session is over.
        """
        if self.is_over or not (pipeline is None or self.wants(pipeline)):
            return None
        stack = current_stack(self)
        if stack is not None:
            return stack
        if not self.records(pipeline):
            return None
        self._close_left()
        stack = StageStack(self)
        enter_stack(stack)
        return stack

    def wants(self, pipeline: object) -> bool:
        """Whether this pipeline is one that is watched."""
        return self.is_everywhere or pipeline is None or bool(self._watched.get(pipeline))

    def records(self, pipeline: object) -> bool:
        """Whether what happens in this context to a pipeline belongs to the session.

        What happens inside the block of a watch belongs to it, and to no other watch of the same pipeline in another
        thread. What happens in a context outside of all their blocks, such as a worker thread's, belongs to all.

        Args:
            pipeline: The pipeline; None: none that is known.
        """
        if self.is_over or not self.wants(pipeline):
            return False
        around = [frame.recorder for frame in frames_here()]
        if self.recorder in around:
            return True
        others = list(OPEN_SESSIONS)
        return not any(other.recorder in around and other.wants(pipeline) for other in others)

    def parts_of(self, pipeline: object) -> "WatchedParts":
        """A pipeline taken apart; with the facts of when it was, as long as it has the same components."""
        known = self._known.get(pipeline)
        if known is None or _components_in(known[0]) != _components_in(set_up_of(pipeline)):
            return take_apart(pipeline)
        return take_apart(pipeline, known[1])

    def _parts(self, pipeline: object) -> "WatchedParts":
        for watched in (pipeline, *pipelines_in(pipeline)):
            self._watched.put(watched, True)
        set_up, known = set_up_of(pipeline), self._known.get(pipeline)
        parts = take_apart(pipeline, known[1] if known is not None and known[0] == set_up else None)
        self._known.put(pipeline, (set_up, parts.facts))
        return parts

    def _safely(self, observer: "Observer", act: Callable[[], None]) -> None:
        if not observer.works or self.is_over:
            return
        try:
            act()
        except Exception as failure:  # noqa: BLE001 - what an observer raises must not reach the host
            observer.failed(failure)

    def _close_left(self) -> None:
        """Close stages that ended threads and tasks have left open."""
        while self.left_open:
            stack = self.left_open.popleft()
            self.guard.read("watch.stages", stack.end)


def _name_of(pipelines: tuple[object, ...]) -> str:
    return type(pipelines[0]).__name__ if pipelines else "watch"


class Observer(HookSet):
    """Follows one kind of event on the pipelines that a session watches.

    Attributes:
        name: Name of its events. The reason of a failure is kept under "watch.<name>".
    """

    name: ClassVar[str] = ""

    def __init__(self, session: Session) -> None:
        super().__init__(session.guard, f"watch.{self.name}")
        self.session = session

    def start(self) -> None:
        """Put on what belongs to no pipeline."""

    def attach_class(self, kind: type) -> None:
        """Put on what all pipelines of a class need."""

    def attach(self, parts: "WatchedParts") -> None:
        """Put on what this pipeline needs and has not yet."""

    def when_loaded(self, key: object, module: str, name: str, put_on: Callable[[type], None]) -> None:
        """Put something on a class, now or in the host's import of its module."""
        self.keep_undo(key, when_loaded(module, name, partial(self._put_on_safely, put_on)))

    def _put_on_safely(self, put_on: Callable[[type], None], kind: type) -> None:
        try:
            put_on(kind)
        except Exception as failure:  # noqa: BLE001 - this runs in the host's import
            self.failed(failure)


@dataclass(frozen=True, slots=True)
class WatchedParts:
    """A pipeline taken apart, for as long as observers are put on it."""

    pipeline: object
    components: Mapping[str, object]
    facts: PipelineFacts = field(default_factory=lambda: PipelineFacts("unknown"))

    def of_role(self, role: Role) -> Iterator[tuple[str, object]]:
        """The components that do this, with their names."""
        for name in self.facts.of_role(role):
            if name in self.components:
                yield name, self.components[name]


def take_apart(pipeline: object, known: PipelineFacts | None = None) -> WatchedParts:
    """The parts of a pipeline, or of a denoiser alone."""
    components = {name: part for name, part in components_of(pipeline).items() if part is not None}
    if components:
        return WatchedParts(pipeline, components, known or pipeline_facts(pipeline))
    name = _name_of_part(pipeline)
    components = {} if name is None else {name: pipeline}
    return WatchedParts(pipeline, components, known or pipeline_facts(components or pipeline))


def _name_of_part(part: object) -> str | None:
    """What pipelines call a part that is watched alone: a VAE, a scheduler, or else a module that denoises."""
    can = {way for way in ("encode", "decode", "set_timesteps", "step") if callable(getattr(part, way, None))}
    if isinstance(part, nn.Module):
        return "vae" if {"encode", "decode"} <= can else "denoiser"
    return "scheduler" if {"set_timesteps", "step"} <= can else None


def pipelines_in(pipeline: object) -> list[object]:
    """Pipelines that a pipeline is made of, such as a prior's and a decoder's."""
    held = getattr(pipeline, "__dict__", {}).values()
    return [
        value
        for value in held
        if callable(value) and callable(getattr(type(value), "register_modules", None))
    ]


def set_up_of(pipeline: object) -> tuple[object, ...]:
    """A cheap mark of a pipeline's set-up. If it changes, the pipeline's facts must be read again."""
    return tuple((name, id(part), *_state(part)) for name, part in components_of(pipeline).items())


def _components_in(set_up: tuple[object, ...]) -> list[object]:
    """The names and identities of the components."""
    return [mark[:2] for mark in set_up if isinstance(mark, tuple)]


def _state(part: object) -> tuple[object, ...]:
    module = unwrap(part) if isinstance(part, nn.Module) else None
    if module is None:
        return (type(part).__name__,)
    first = next(module.parameters(), None)
    return (
        None if first is None else (first.dtype, first.device),
        type(getattr(module, "_hf_hook", None)).__name__,
        getattr(module, "_diffusers_hook", None) is None,
        bool(getattr(module, "peft_config", None)),
    )


def asks_for_guidance(pipeline: object) -> object:
    """What a pipeline says now of guiding without a classifier; callbacks may change it. None: nothing."""
    return getattr(pipeline, "do_classifier_free_guidance", None)


class StageStack:
    """The stages that a session has open in one context, and what is seen of the call that they belong to.

    Attributes:
        pipeline: What is being called, until the call is over.
        planned_steps: Of the scheduler's last schedule.
        most_calls_a_step: How often one denoiser was called for one step.
        size: Height and width of what was decoded.
        runs: How many calls of each encoder have stages.
        ran: How often each text encoder was seen to run, and each denoiser whose denoising is over.
        control_scales: By ControlNet the size of the largest scale that it was called with.
        steps: How many steps were made in denoisings that are over.
        lora_changes: The LoRA methods that were called during the call, each after how many steps.
        holds_calls: Whether another pipeline was called in the call.
        is_guided: Whether the pipeline said, as the denoising began, that it guides without a classifier.
        is_moving: Whether weights are being moved.
        is_tiled: Whether the VAE was seen to work in tiles.
        moved: Nanoseconds that weights were moved for, and how often, by the stage that was open.
        outputs: What its stages made, until the call is over.
        loop: What is seen of an own loop that is open here, of which its observer knows more; None: none is.
        loop_steps: Of an own loop that makes all steps of the schedule; None: not known.
        leave_loop: Ends the generation of an own loop that is open here, with an error or without; None: none is.
    """

    def __init__(self, session: Session, pipeline_id: int | None = None) -> None:
        self.open: list[tuple[str, LiveStage]] = []
        self.session = session
        self.pipeline_id = pipeline_id
        session.stacks[id(self)] = weakref.ref(self)
        self.denoising: Denoising | None = None
        self.pipeline: object = None
        self.planned_steps: int | None = None
        self.most_calls_a_step = 0
        self.size: tuple[int, int] | None = None
        self.runs: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self.control_scales: dict[str, float] = {}
        self.steps = 0
        self.lora_changes: list[LoraChange] = []
        self.holds_calls = False
        self.is_guided: object = None
        self.is_moving = False
        self.is_tiled = False
        self.moved: dict[LiveStage, tuple[int, int]] = {}
        self.outputs = HeldOutputs(in_call=pipeline_id is not None)
        self.loop: Any = None
        self.loop_steps: int | None = None
        self.leave_loop: Callable[[BaseException | None], None] | None = None

    def __del__(self) -> None:
        """A thread or task that has ended may have left stages open, such as a denoising whose end nothing announced.

        They are closed elsewhere: what is running just now may hold a lock that closing them takes.
        """
        session: Session | None = getattr(self, "session", None)
        if session is None:  # it was never made whole
            return
        session.stacks.pop(id(self), None)
        if self.open and not session.is_over:
            session.left_open.append(self)

    def is_in(self, *names: str) -> bool:
        """Whether a stage of one of these names is open here."""
        return any(name in names for name, _ in self.open)

    def enter(self, name: str) -> LiveStage:
        """Open a stage inside those that are open."""
        stage = self.session.recorder.stage(name)
        stage.__enter__()
        self.session.has_stages = True
        self.open.append((name, stage))
        return stage

    def leave(self, stage: LiveStage, error: BaseException | None) -> None:
        """Close a stage, and before it all that were opened in it and are still open."""
        depth = next((depth for depth, (_, entered) in enumerate(self.open) if entered is stage), None)
        if depth is None:
            return
        with ExitStack() as innermost_first:  # each, though Ctrl-C comes while another is closed
            for entry in self.open[depth:]:
                innermost_first.callback(self._close_entry, entry, error)

    def _close_entry(self, entry: tuple[str, LiveStage], error: BaseException | None) -> None:
        try:
            self._close(entry[1], error)
        finally:  # what Ctrl-C kept open is closed with the watch
            if not entry[1].is_open and entry in self.open:
                self.open.remove(entry)

    def _close(self, stage: LiveStage, error: BaseException | None) -> None:
        try:
            if self.denoising is not None and stage is self.denoising.stage:
                denoising, self.denoising = self.denoising, None
                denoising.finish()
                self.ran += denoising.calls
                self.steps += denoising.steps
                self.most_calls_a_step = max(self.most_calls_a_step, denoising.most_calls_a_step)
        except Exception as failure:  # noqa: BLE001 - what was measured is to be kept
            self.session.guard.switch_off("watch.denoiser", failure)
        finally:  # a stage that stays open is sampled for ever
            stage.__exit__(None if error is None else type(error), error, None)
        nanoseconds, times = self.moved.pop(stage, (0, 0))
        if times:
            stage.fact("weights_moved", {"seconds": nanoseconds / 1e9, "times": times})

    def made(self, stage: LiveStage, name: str, tensor: Tensor) -> None:
        """Note a tensor that a stage made, which is over: facts at once, and the hash of its bytes now or after the call."""
        stage.tensor(name, tensor)
        self.session.guard.read("watch.outputs", lambda: self.outputs.take(stage, name, tensor))

    def weights_moved(self, nanoseconds: int) -> None:
        """Take a move of weights to or from a device, which has just ended."""
        if self.open:
            stage = self.open[-1][1]
            before, times = self.moved.get(stage, (0, 0))
            self.moved[stage] = (before + nanoseconds, times + 1)
        if self.denoising is not None:
            self.denoising.weights_moved(nanoseconds)

    @property
    def steps_over(self) -> int:
        """How many steps are over."""
        return self.steps + (0 if self.denoising is None else self.denoising.steps_over)

    def end_denoising(self) -> None:
        """Close the denoising, if any is open."""
        if self.denoising is not None:
            self.leave(self.denoising.stage, None)

    def end_loop(self, error: BaseException | None = None) -> None:
        """Close the generation of an own loop, if any is open."""
        if self.leave_loop is not None:
            self.leave_loop(error)

    def end(self, error: BaseException | None = None) -> None:
        """Close all that is open."""
        self.end_loop(error)
        while self.open:
            self.leave(self.open[0][1], error)


def current_stack(session: Session) -> StageStack | None:
    """The session's innermost stack in this context: the hot path."""
    stacks = STACKS.get()
    if stacks and not session.is_over:
        if stacks[-1].session is session:
            return stacks[-1]
        return next((stack for stack in reversed(stacks) if stack.session is session), None)
    return None


def enter_stack(stack: StageStack) -> None:
    """Make it the innermost of this context."""
    STACKS.set((*STACKS.get(), stack))


def leave_stacks(*gone: StageStack) -> None:
    """Take stacks out of this context."""
    for stack in gone:
        stack.session.stacks.pop(id(stack), None)
    kept = tuple(stack for stack in STACKS.get() if stack not in gone and not stack.session.is_over)
    STACKS.set(kept)


def leave_recorder(recorder: Recorder) -> None:
    """Take this context out of all scopes of a recorder, also of those that could not be closed."""
    frame = CURRENT.get()
    while frame is not None:
        frame.is_open = frame.is_open and frame.recorder is not recorder
        frame = frame.outer
    frame = CURRENT.get()
    while frame is not None and not frame.is_open:
        frame = frame.outer
    CURRENT.set(frame)
