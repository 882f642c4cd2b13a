"""One open watch: its recorder, its instruments, and the pipelines that they are on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sigmascope.analysis.peak_owners import with_owners
from sigmascope.integrations.watching.activity import (
    Activity,
    current_activity,
    enter_activity,
    leave_activities,
)
from sigmascope.integrations.watching.broken_calls import OpenCalls
from sigmascope.integrations.watching.hearing import OPEN, hears, leave
from sigmascope.integrations.watching.instrument import Instrument, reference_to
from sigmascope.integrations.watching.parts import Parts, pipelines_in, set_up_of, take_apart
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.recorder import Recorder
from sigmascope.monitor.run_findings import with_findings
from sigmascope.monitor.workflow_privacy import redacted
from sigmascope.records.pipeline import PipelineFacts
from sigmascope.records.prompts import PromptPrivacy
from sigmascope.records.run import Run
from sigmascope.stages.failures import Redact


@dataclass(frozen=True, slots=True)
class Choices:
    """What the caller of `watch` decided."""

    prompts: PromptPrivacy = "full"
    name: str | None = None
    sample_hz: float | None = 10.0
    step_memory: bool = False


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
        self.guard = Guard()
        self.recorder = Recorder(
            choices.name or _name_of(pipelines), choices.sample_hz, step_memory=choices.step_memory
        )
        self.is_over = False
        self.is_everywhere = not pipelines
        self.redactions: list[Redact] = []
        self.instruments = [kind(self) for kind in instruments]
        self._given = pipelines
        self._watched: dict[int, Callable[[], object]] = {}
        self._known: dict[int, tuple[tuple[object, ...], PipelineFacts]] = {}
        self.activities: list[Activity] = []
        self.open_calls = OpenCalls()

    # --- from entering to leaving

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
        for instrument in self.instruments:
            instrument.detach()
        if self in OPEN:
            OPEN.remove(self)
        for one in reversed(list(self.activities)):
            self.guard.read("watch.stages", lambda one=one: self.open_calls.close_broken(one))  # type: ignore[misc]
            self.guard.read("watch.stages", lambda one=one: one.end(error))  # type: ignore[misc]
        self.activities.clear()
        self._watched.clear()
        self._known.clear()
        self.recorder.__exit__(None if error is None else type(error), error, None)
        leave(self.recorder)
        leave_activities()

    def record(self) -> Run:
        """The run as it is now, with private prompts taken out of errors; findings once it is over."""
        run = redacted(self.recorder.run(), self.redactions)
        reasons = {**run.unavailable, **self.guard.reasons}
        run = replace(run, unavailable=reasons)
        if not self.is_over:
            return run
        told, _ = self.guard.read("watch.peaks", lambda: with_owners(run))
        run = told or run
        found, reason = self.guard.read("watch.findings", lambda: with_findings(run, self.guard))
        return found or replace(run, unavailable={**reasons, "findings": reason or "unknown"})

    # --- pipelines

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
        return parts.facts

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

    # --- activities

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
        found = Activity(self)
        enter_activity(found)
        return found


def _name_of(pipelines: tuple[object, ...]) -> str:
    return type(pipelines[0]).__name__ if pipelines else "watch"
