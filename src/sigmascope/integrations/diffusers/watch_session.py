"""One open watch: its recorder, its instruments, its pipelines, and what it has open in each thread or task.

An `Activity` is what a `Session` has open in one thread or task: a generation, or work outside of any. `hears`
decides which of several watches hears what happens there. `OpenCalls` ends calls of modules that Ctrl-C broke off:
PyTorch tells forward hooks of an `Exception`, and of nothing else.
"""

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from sigmascope.analysis.peak_owners import with_owners
from sigmascope.integrations.diffusers.hooks import (
    Instrument,
    Parts,
    forget_gone,
    forget_others,
    pipelines_in,
    reference_to,
    set_up_of,
    take_apart,
)
from sigmascope.monitor.findings import with_findings
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.recorder import CURRENT, LiveStage, Recorder
from sigmascope.records.facts import PipelineFacts
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import KEEP_GENERATIONS, Run

if TYPE_CHECKING:
    from sigmascope.integrations.diffusers.denoising import Denoising
    from sigmascope.integrations.diffusers.text_encoding import Encoding

OPEN: "list[Session]" = []
"""All sessions of this process that are not over."""
_SOME: Final = 1000
"""Of fewer things than these nobody asks whether they still are."""
SEEN_LATE = "the call was broken off, by Ctrl-C or the like; when is not known, only that it was before what came next"


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller of `watch` decided."""

    prompts: PromptPrivacy = "full"
    name: str | None = None
    sample_hz: float | None = 10.0
    step_memory: bool = False
    keep_generations: int | None = KEEP_GENERATIONS


class Activity:
    """The stages that a session has open in one context.

    Args:
        session: Whose.
        pipeline_id: `id` of the pipeline that is being called; None outside of calls.

    Attributes:
        pipeline: What is being called, until the call is over.
        planned_steps: Of the scheduler's last schedule.
        most_calls_a_step: How often one denoiser was called for one step.
        size: Height and width of what was decoded.
        encoding: What is seen of a call of `encode_prompt` that is going on.
        runs: How many calls of each encoder have stages.
        is_guided: Whether the pipeline said, as the denoising began, that it guides without a classifier.
        is_moving: Whether weights are being moved.
        is_tiled: Whether the VAE was seen to work in tiles.
        moved: Nanoseconds that weights were moved for, and how often, by the stage that was open.
    """

    __slots__ = (
        "__weakref__",
        "denoising",
        "encoding",
        "is_guided",
        "is_moving",
        "is_tiled",
        "most_calls_a_step",
        "moved",
        "open",
        "pipeline",
        "pipeline_id",
        "planned_steps",
        "runs",
        "session",
        "size",
    )

    def __init__(self, session: "Session", pipeline_id: int | None = None) -> None:
        self.open: list[tuple[str, LiveStage]] = []
        self.session = session
        self.pipeline_id = pipeline_id
        session.activities[id(self)] = weakref.ref(self)
        self.denoising: "Denoising | None" = None
        self.pipeline: object = None
        self.planned_steps: int | None = None
        self.most_calls_a_step = 0
        self.size: tuple[int, int] | None = None
        self.encoding: "Encoding | None" = None
        self.runs: Counter[str] = Counter()
        self.is_guided: object = None
        self.is_moving = False
        self.is_tiled = False
        self.moved: dict[LiveStage, tuple[int, int]] = {}

    def __del__(self) -> None:
        """A thread or task that is no more may have left stages open, such as a denoising that nobody says is over.

        They are closed elsewhere: what is running just now may hold a lock that closing them takes.
        """
        session: Session | None = getattr(self, "session", None)
        if session is None:  # it was never made whole
            return
        session.activities.pop(id(self), None)
        if self.open and not session.is_over:
            session.left_open.append(self)

    def is_in(self, *names: str) -> bool:
        """Whether a stage of one of these names is open here."""
        return any(name in names for name, _ in self.open)

    def enter(self, name: str) -> LiveStage:
        """Open a stage inside those that are open."""
        stage = self.session.recorder.stage(name)
        stage.__enter__()
        self.open.append((name, stage))
        return stage

    def leave(self, stage: LiveStage, error: BaseException | None) -> None:
        """Close a stage, and before it all that were opened in it and are still open."""
        while any(one is stage for _, one in self.open):
            _, innermost = self.open.pop()
            try:
                if self.denoising is not None and innermost is self.denoising.stage:
                    denoising, self.denoising = self.denoising, None
                    denoising.finish()
                    self.most_calls_a_step = max(self.most_calls_a_step, denoising.most_calls_a_step)
            except Exception as failure:  # noqa: BLE001 - the stages around it are to be closed too
                self.session.guard.switch_off("watch.denoiser", failure)
            finally:  # a stage that stays open is sampled for ever
                innermost.__exit__(None if error is None else type(error), error, None)
            nanoseconds, times = self.moved.pop(innermost, (0, 0))
            if times:
                innermost.fact("weights_moved", {"seconds": nanoseconds / 1e9, "times": times})

    def weights_moved(self, nanoseconds: int) -> None:
        """Take a move of weights to or from a device, which has just ended.

        Args:
            nanoseconds: How long it took.
        """
        if self.open:
            stage = self.open[-1][1]
            before, times = self.moved.get(stage, (0, 0))
            self.moved[stage] = (before + nanoseconds, times + 1)
        if self.denoising is not None:
            self.denoising.weights_moved(nanoseconds)

    def end_denoising(self, error: BaseException | None = None) -> None:
        """Close the denoising, if any is open."""
        if self.denoising is not None:
            self.leave(self.denoising.stage, error)

    def end(self, error: BaseException | None = None) -> None:
        """Close all that is open."""
        while self.open:
            self.leave(self.open[0][1], error)


class Session:
    """From entering a watch to leaving it.

    Args:
        pipelines: Those to watch; none: every pipeline of the process.
        choices: The caller's.
        instruments: What is put on pipelines, in this order.
    """

    def __init__(
        self, pipelines: tuple[object, ...], choices: Choices, instruments: Iterable[type[Instrument]]
    ) -> None:
        self.choices = choices
        keeps_words = choices.prompts == "full"
        self.guard = Guard(keeps_words=keeps_words)
        self.recorder = Recorder(
            choices.name or _name_of(pipelines),
            choices.sample_hz,
            step_memory=choices.step_memory,
            keeps_words=keeps_words,
            keep=choices.keep_generations,
        )
        self.is_over = False
        self.is_everywhere = not pipelines
        self.instruments = [kind(self) for kind in instruments]
        self._given = pipelines
        self._watched: dict[int, Callable[[], object]] = {}
        self._known: dict[int, tuple[tuple[object, ...], PipelineFacts]] = {}
        self._most_known = _SOME
        self.activities: dict[int, weakref.ref[Activity]] = {}
        self.left_open: deque[Activity] = deque()
        self.open_calls = OpenCalls()

    def open(self) -> None:
        """Begin the record, then put the instruments on."""
        self.recorder.__enter__()
        OPEN.append(self)
        for instrument in self.instruments:
            self._safely(instrument, instrument.start)
        given, self._given = self._given, ()
        for pipeline in given:
            self.watch(pipeline)

    def close(self, error: BaseException | None) -> None:
        """Take everything off, close what is open, and end the record."""
        self.is_over = True
        with ExitStack() as at_last:  # in reverse, and whatever fails before
            at_last.callback(leave_activities)
            at_last.callback(leave, self.recorder)
            at_last.callback(self.recorder.__exit__, None if error is None else type(error), error, None)
            for instrument in self.instruments:
                instrument.detach()
            if self in OPEN:
                OPEN.remove(self)
            self.guard.read("watch.stages", self._close_left)
            known = [reference() for reference in self.activities.values()]
            for one in reversed([one for one in known if one is not None]):
                self.guard.read("watch.stages", lambda one=one: self.open_calls.close_broken(one))  # type: ignore[misc]
                for _ in range(
                    len(one.open)
                ):  # a turn takes one out at least, unless taking out itself fails
                    self.guard.read("watch.stages", lambda one=one: one.end(error))  # type: ignore[misc]
            self.activities.clear()
            self._watched.clear()
            self._known.clear()

    def record(self) -> Run:
        """The run as it is now; findings once it is over."""
        run = self.recorder.run()
        reasons = {**run.unavailable, **self.guard.reasons}
        run = replace(run, unavailable=reasons)
        if not self.is_over:
            return run
        told, _ = self.guard.read("watch.peaks", lambda: with_owners(run))
        run = told or run
        found, reason = self.guard.read("watch.findings", lambda: with_findings(run, self.guard))
        return found or replace(run, unavailable={**reasons, "findings": reason or "unknown"})

    def wants(self, pipeline: object) -> bool:
        """Whether this pipeline is one that is watched."""
        if self.is_everywhere or pipeline is None:
            return True
        known = self._watched.get(id(pipeline))
        return known is not None and known() is pipeline

    def watch(self, pipeline: object) -> PipelineFacts | None:
        """Put the instruments on a pipeline, or on what it has got since; its facts. Never raises."""
        parts, _ = self.guard.read("watch.pipeline", lambda: self._parts(pipeline))
        if parts is None:
            return None
        self.watch_class(type(pipeline))
        for instrument in self.instruments:
            self._safely(instrument, lambda instrument=instrument: instrument.attach(parts))  # type: ignore[misc]
        self._close_left()
        self._forget_gone()
        return parts.facts

    def _close_left(self) -> None:
        """Close what threads and tasks that are no more have left open."""
        while self.left_open:
            one = self.left_open.popleft()
            self.guard.read("watch.stages", lambda one=one: one.end())  # type: ignore[misc]

    def _forget_gone(self) -> None:
        """Let go of pipelines, components and hooks that are no more, each time that there are twice as many."""
        if self._known_things() <= self._most_known:
            return
        forget_gone(self._watched)
        forget_others(self._known, self._watched)
        for instrument in self.instruments:
            self._safely(instrument, instrument.forget_gone)
        self._most_known = _SOME + 2 * self._known_things()

    def forget_others(self, table: dict[int, Any]) -> None:
        """Take out of a table by pipelines' `id` what is of none that is watched."""
        forget_others(table, self._watched)

    def _known_things(self) -> int:
        return len(self._watched) + sum(one.known_things() for one in self.instruments)

    def watch_class(self, kind: type) -> None:
        """Put on what all pipelines of a class need. Never raises."""
        for instrument in self.instruments:
            self._safely(instrument, lambda instrument=instrument: instrument.attach_class(kind))  # type: ignore[misc]

    def _parts(self, pipeline: object) -> Parts:
        was = self._watched.get(id(pipeline))
        if was is None or was() is not pipeline:
            self._known.pop(id(pipeline), None)
        self._watched[id(pipeline)] = reference_to(pipeline)
        for inner in pipelines_in(pipeline):
            self._watched[id(inner)] = reference_to(inner)
        set_up = set_up_of(pipeline)
        known = self._known.get(id(pipeline))
        parts = take_apart(pipeline, known[1] if known is not None and known[0] == set_up else None)
        self._known[id(pipeline)] = (set_up, parts.facts)
        return parts

    def _safely(self, instrument: Instrument, act: Callable[[], None]) -> None:
        if not instrument.works or self.is_over:
            return
        try:
            act()
        except Exception as failure:  # noqa: BLE001 - what an instrument raises must not reach the host
            instrument.failed(failure)

    def here(self, pipeline: object = None) -> Activity | None:
        """What the session has open in this context; None if what happens here is not its own.

        Outside of pipelines' calls, there is one for each context, which lasts until the session is over.
        """
        if self.is_over or not self.wants(pipeline):
            return None
        found = current_activity(self)
        if found is not None:
            self.open_calls.close_broken(found)
            return found
        if not hears(self, pipeline):
            return None
        self._close_left()
        found = Activity(self)
        enter_activity(found)
        return found


def _name_of(pipelines: tuple[object, ...]) -> str:
    return type(pipelines[0]).__name__ if pipelines else "watch"


def denoising_here(session: "Session") -> "Denoising | None":
    """The denoising that the session's innermost activity in this context has open: the hot path."""
    activities = ACTIVITIES.get()
    if activities and activities[-1].session is session:  # unless several watches are at work
        return None if session.is_over else activities[-1].denoising
    activity = current_activity(session)
    return None if activity is None else activity.denoising


ACTIVITIES: ContextVar[tuple[Activity, ...]] = ContextVar("sigmascope_activities", default=())
"""What is going on in this context, of all watches, the innermost last."""


def current_activity(session: "Session") -> Activity | None:
    """The session's innermost activity in this context."""
    for activity in reversed(ACTIVITIES.get()):
        if activity.session is session and not session.is_over:
            return activity
    return None


def enter_activity(activity: Activity) -> None:
    """Make it the innermost of this context."""
    ACTIVITIES.set((*ACTIVITIES.get(), activity))


def leave_activities(*gone: Activity) -> None:
    """Take activities out of this context."""
    for one in gone:
        one.session.activities.pop(id(one), None)
    kept = tuple(one for one in ACTIVITIES.get() if one not in gone and not one.session.is_over)
    ACTIVITIES.set(kept)


def hears(session: "Session", pipeline: object) -> bool:
    """Whether what happens here to a pipeline belongs to the session.

    What happens inside the block of a watch belongs to it, and to no other watch of the same pipeline in another
    thread. What happens in a context outside of all their blocks, such as a worker thread's, belongs to all.

    Args:
        session: Which.
        pipeline: The pipeline; None: none that is known.
    """
    if session.is_over or not session.wants(pipeline):
        return False
    around = _recorders_here()
    if session.recorder in around:
        return True
    return not any(one.recorder in around and one.wants(pipeline) for one in list(OPEN))


def _recorders_here() -> list[Recorder]:
    """The recorders whose blocks this context is in."""
    recorders = []
    frame = CURRENT.get()
    while frame is not None:
        if frame.is_open:
            recorders.append(frame.recorder)
        frame = frame.outer
    return recorders


def leave(recorder: Recorder) -> None:
    """Take this context out of all scopes of a recorder, also of those that could not be closed."""
    frame = CURRENT.get()
    while frame is not None:
        frame.is_open = frame.is_open and frame.recorder is not recorder
        frame = frame.outer
    frame = CURRENT.get()
    while frame is not None and not frame.is_open:
        frame = frame.outer
    CURRENT.set(frame)


def guides(pipeline: object) -> object:
    """What a pipeline says now of guiding without a classifier; callbacks may change it. None: nothing."""
    return getattr(pipeline, "do_classifier_free_guidance", None)


class OpenCalls:
    """Calls outside of pipelines whose stages are open, and which of them are over without having said so.

    Calls in a pipeline need none of this: the stage of its own call ends whatever it was left by.
    """

    def __init__(self) -> None:
        self._open: list[OpenCall] = []

    def begin(self, activity: Activity, stage: LiveStage, module: object) -> "OpenCall | None":
        """Remember a call that is about to run; None where it cannot be followed.

        Args:
            activity: In which the stage lies.
            stage: The call's.
            module: What is called.
        """
        if activity.pipeline_id is not None:
            return None
        call = OpenCall(activity, stage, module)
        if not call.depth:
            return None  # this PyTorch calls modules in another way
        self._open.append(call)
        return call

    def end(self, call: "OpenCall | None") -> None:
        """Forget a call that said itself that it is over."""
        if call in self._open:
            self._open.remove(call)

    def close_broken(self, activity: Activity, entering: object = None) -> None:
        """Close the stages of an activity's calls that run no more.

        Args:
            activity: Which.
            entering: A module whose call has begun and is none of those.
        """
        for call in [one for one in self._open if one.activity is activity]:
            if not call.is_running(entering):
                self._open.remove(call)
                call.break_off()


class OpenCall:
    """One call of a module.

    Args:
        activity: In which its stage lies.
        stage: Its stage.
        module: What is called.
    """

    def __init__(self, activity: Activity, stage: LiveStage, module: object) -> None:
        self.activity = activity
        self._stage = stage
        self._module = reference_to(module)
        self._thread = threading.get_ident()
        self.depth = _calls_here(module)

    def is_running(self, entering: object = None) -> bool:
        """Whether the call is among those that this thread is in; another thread's is taken to be."""
        if threading.get_ident() != self._thread:
            return True
        module = self._module()
        return module is not None and _calls_here(module) - (module is entering) >= self.depth

    def break_off(self) -> None:
        """Close the stage, and those inside it, as left by what cannot be known."""
        error = sys.exception()
        is_known = error is not None and not isinstance(error, Exception)
        self.activity.leave(self._stage, error if is_known else BrokenOff(SEEN_LATE))


def _calls_here(module: object) -> int:
    """How many calls of a module this thread is in: more than one where it calls itself."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            found += 1
        frame = frame.f_back
    return found


class BrokenOff(BaseException):
    """Stands in the record for what ended a call, which hooks are not told of."""
