"""Try one strategy after the other until one gives a result, and keep a record of all.

Running out of memory moves on to the next one, with nothing of the failed one alive. Any other error is the
VAE's or the caller's, and passes unchanged.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sigmascope import monitor
from sigmascope.errors import EveryStrategyFailedError
from sigmascope.monitor import Recorder
from sigmascope.monitor.guard import Guard
from sigmascope.pipeline.attempt import Try, failed, made
from sigmascope.pipeline.choices import Choices
from sigmascope.pipeline.forecast import Forecast
from sigmascope.pipeline.strategies import Outcome
from sigmascope.pipeline.tries import Passed, Tries
from sigmascope.pipeline.work import Work
from sigmascope.probes.reading import attempt as read
from sigmascope.records.finding import Finding
from sigmascope.records.latents import (
    RECORD_FACT,
    EncodingEvent,
    EncodingRecord,
    SampleFacts,
    StrategyAttempt,
)
from sigmascope.records.strategies import strategy_label

OnEvent = Callable[[EncodingEvent], object]


@dataclass(slots=True)
class Engine:
    """One encoding or decoding from first to last.

    Args:
        work: What there is to do.
        choices: Which strategies.
        given: Facts of what goes in.
        describe: Gives the facts of what comes out.
        forecast: What each attempt is expected to take.
        on_event: Told what happens while it goes on. What it raises is logged once.
        dummy: Makes the stand-in for a result.
        dummy_finding: What to say of it.
    """

    work: Work
    choices: Choices
    given: SampleFacts
    describe: Callable[[Tensor], SampleFacts]
    forecast: Forecast
    on_event: OnEvent | None = None
    dummy: Callable[[], Outcome] | None = None
    dummy_finding: Finding | None = None
    attempts: list[StrategyAttempt] = field(default_factory=list)
    _guard: Guard = field(default_factory=Guard)

    def run(self) -> tuple[Tensor, EncodingRecord]:
        """The result and the record.

        Raises:
            EveryStrategyFailedError: Memory ran out in all of them.
        """
        if monitor.current_recorder() is not None:
            return self._watched()
        with Recorder(f"latent_{self.work.direction}"):
            return self._watched()

    def _watched(self) -> tuple[Tensor, EncodingRecord]:
        self._tell(EncodingEvent("began", self.work.direction, input=self.given))
        began = time.perf_counter()
        outcome: Outcome | None = None
        stage = monitor.stage(f"latent_{self.work.direction}")
        try:
            with stage:
                outcome = self._first_that_works()
                if outcome is None:
                    raise _every_strategy_failed(self._record(None, time.perf_counter() - began))
        finally:
            record = self._record(outcome, time.perf_counter() - began)
            self._put_on(stage, record, outcome)
            self._tell(EncodingEvent("ended", self.work.direction, record=record))
        return outcome.tensor, record

    def _put_on(self, stage: Any, record: EncodingRecord, outcome: Outcome | None) -> None:
        """What a monitor makes of it is no reason to lose a result."""
        self._guard.read("stage", lambda: stage.fact(RECORD_FACT, record.as_dict()))
        if outcome is not None:
            name = "latent" if self.work.direction == "encoding" else "frames"
            self._guard.read("stage", lambda: stage.tensor(name, outcome.tensor))

    def _first_that_works(self) -> Outcome | None:
        for one in Tries(self.work, self.choices, self.forecast, self.dummy):
            outcome = self._try(one)
            if outcome is not None:
                return outcome
        return None

    def _try(self, one: Try | Passed) -> Outcome | None:
        if isinstance(one, Passed):
            self._ended(one.attempt)
            return None
        self._tell(EncodingEvent("attempt_began", self.work.direction, strategy=one.name))
        try:
            outcome, attempt = made(one, self.work.direction, self.work.generator)
        except BaseException as error:
            self._ended(failed(one.record(), error))
            raise
        self._ended(attempt)
        return outcome

    def _ended(self, attempt: StrategyAttempt) -> None:
        self.attempts.append(attempt)
        self._tell(EncodingEvent("attempt_ended", self.work.direction, attempt=attempt))

    def _record(self, outcome: Outcome | None, seconds: float) -> EncodingRecord:
        last = self.attempts[-1].name if self.attempts and outcome is not None else None
        record = EncodingRecord(
            direction=self.work.direction,
            success=outcome is not None,
            strategy=last,
            attempts=tuple(self.attempts),
            seconds=seconds,
            vae=self.work.vae.facts,
            input=self.given,
            dummy=last == "dummy",
        )
        if outcome is None:
            return replace(record, unavailable={"output": "no strategy gave a result"})
        findings = () if self.dummy_finding is None or last != "dummy" else (self.dummy_finding,)
        tensor = outcome.tensor
        output = read(lambda: self.describe(tensor))
        reasons = {} if output.reason is None else {"output": output.reason}
        return replace(record, output=output.value, findings=findings, unavailable=reasons)

    def _tell(self, event: EncodingEvent) -> None:
        on_event = self.on_event
        if on_event is not None:
            self._guard.read("on_event", lambda: on_event(event))


def _every_strategy_failed(record: EncodingRecord) -> EveryStrategyFailedError:
    ends = [
        f"{strategy_label(attempt.name, record.direction)} {attempt.outcome}: {attempt.reason}"
        for attempt in record.attempts
    ]
    return EveryStrategyFailedError(
        "The VAE's memory ran out. " + "; ".join(ends),
        record=record,
        hint="Give fewer or smaller pictures, a smaller tile=, or free memory first.",
    )
