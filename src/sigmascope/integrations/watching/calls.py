"""Calls of pipelines: each is a stage `generation`, with what it was called with and what was called."""

import inspect
from typing import Any, ClassVar

from sigmascope.integrations.watching.activity import (
    ACTIVITIES,
    Activity,
    current_activity,
    enter_activity,
    leave_activities,
)
from sigmascope.integrations.watching.call_facts import (
    call_facts,
    named_arguments,
    prompts_of,
    seeds_of,
    with_outcome,
)
from sigmascope.integrations.watching.endings import end_finished
from sigmascope.integrations.watching.hearing import hears
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords
from sigmascope.integrations.watching.outcome import outcome_of
from sigmascope.integrations.watching.parts import Parts, pipelines_in
from sigmascope.integrations.watching.pictures import FACT, pictures_of
from sigmascope.monitor.live import LiveStage
from sigmascope.records.pipeline import CallFacts, PipelineFacts
from sigmascope.records.prompts import redactor, stored_prompts

GENERATION = "generation"
RUNS_LATER = (
    "the call gave a generator or coroutine and was over at once: the stages of its work lie beside this one"
)


class Calls(Instrument):
    """Opens and closes a generation around every call of a pipeline."""

    name: ClassVar[str] = "calls"

    def attach_class(self, kind: type) -> None:
        """Hear the calls of pipelines of a class; a module alone is none."""
        if not hasattr(kind, "_call_impl"):
            self.tap_class(kind, "__call__", self._before)

    def attach(self, parts: Parts) -> None:
        """Hear the calls of the pipelines that this one is made of."""
        for pipeline in pipelines_in(parts.pipeline):
            self.attach_class(type(pipeline))

    def _before(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        session = self.session
        if not hears(session, pipeline):
            return None
        own = self._own(pipeline)
        if own is not None:
            end_finished(own)
            if own.denoising is None:  # a subclass calls its base; a callback's call comes between steps
                return None
        facts = session.watch(pipeline)
        arguments, _ = session.guard.read("watch.call", lambda: named_arguments(pipeline, args, kwargs))
        call, prompts = self._read(pipeline, arguments or {})
        outside = current_activity(session)
        if outside is not None and outside.pipeline_id is None:
            session.open_calls.close_broken(outside)
            outside.end_denoising()
        activity = Activity(session, id(pipeline))
        activity.pipeline = pipeline
        stage = activity.enter(GENERATION)
        enter_activity(activity)

        def after(result: object, error: BaseException | None) -> None:
            denoising = activity.denoising  # a decoding would have ended it
            try:
                activity.end(error)
            finally:
                leave_activities(activity)
                activity.pipeline = None
            if denoising is not None and error is None:
                session.guard.read("watch.outcome", lambda: _tell_outcome(denoising.stage, result))
            if error is None:
                self._tell_pictures(stage, result)
            if inspect.isgenerator(result) or inspect.isasyncgen(result) or inspect.iscoroutine(result):
                stage.fact("runs_later", RUNS_LATER)
            self._tell(stage, activity, pipeline, call, facts)
            self._tell_prompts(stage, prompts)
            seeds = seeds_of(arguments or {})
            if seeds:
                stage.fact("seeds", seeds)

        return after

    def _tell_pictures(self, stage: LiveStage, result: object) -> None:
        seen, _ = self.session.guard.read("watch.pictures", lambda: pictures_of(result))
        if seen is not None:
            stage.fact(FACT, seen)

    def _own(self, pipeline: object) -> Activity | None:
        """The call of this pipeline that is going on here."""
        found = (one for one in reversed(ACTIVITIES.get()) if one.session is self.session)
        return next((one for one in found if one.pipeline_id == id(pipeline)), None)

    def _read(self, pipeline: object, arguments: dict[str, Any]) -> tuple[CallFacts, dict[str, str]]:
        guard, privacy = self.session.guard, self.session.choices.prompts
        call, _ = guard.read("watch.call", lambda: call_facts(arguments))
        prompts, _ = guard.read("watch.prompts", lambda: prompts_of(arguments))
        if prompts and privacy != "full":
            self.session.redactions.append(redactor(prompts, privacy))
        return call or CallFacts(), prompts or {}

    def _tell(
        self,
        stage: LiveStage,
        activity: Activity,
        pipeline: object,
        call: CallFacts,
        facts: PipelineFacts | None,
    ) -> None:
        told, _ = self.session.guard.read("watch.call", lambda: with_outcome(call, pipeline, activity))
        stage.fact("call", told or call)
        if facts is not None:
            stage.fact("pipeline", facts)

    def _tell_prompts(self, stage: LiveStage, prompts: dict[str, str]) -> None:
        kept = stored_prompts(prompts, self.session.choices.prompts)
        if kept:
            stage.fact(
                "prompts",
                {
                    name: {"sha256": one.sha256} | ({} if one.text is None else {"text": one.text})
                    for name, one in kept.items()
                },
            )


def _tell_outcome(denoising: LiveStage, result: object) -> None:
    """Put on the denoising what it made, which nobody decoded. Values on an accelerator are not waited for."""
    made = outcome_of(result)
    if made is not None:
        denoising.tensor("output", made)
