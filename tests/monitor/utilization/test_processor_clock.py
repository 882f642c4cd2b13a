"""The processors' clocks in the record of an outermost stage."""

from collections.abc import Iterator

from tests.monitor.conftest import FakeAccelerator

from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peaks import HostMemory
from sigmascope.monitor.utilization import NO_READING, SampledFacts
from sigmascope.probes import Reading
from sigmascope.probes.processor_clock import ProcessorClock


def sampled_with(readings: Iterator[Reading[ProcessorClock]]) -> SampledFacts:
    return SampledFacts(FakeAccelerator(0), Guard(), is_sampled=True, read_clock=lambda: next(readings))


def look(sampled: SampledFacts, *seconds: float) -> None:
    for at in seconds:
        sampled.sample(round(at * 1e9), HostMemory(), {})


def test_a_stage_has_the_mean_of_a_look_at_its_beginning_and_of_one_every_two_seconds() -> None:
    clocks = [ProcessorClock(3.0, 60.0), ProcessorClock(2.0, 90.0), ProcessorClock(1.0, None)]
    sampled = sampled_with(map(Reading, clocks))
    scope = sampled.open(10**9, is_outermost=True)
    look(sampled, 1.1, 1.2, 2.0, 3.1, 3.2, 5.1)
    facts, missing = sampled.freeze(scope, 10**9, is_outermost=True)
    assert facts["processor_clock"] == {"gigahertz": 2.0, "celsius": 75.0}
    assert "processor_clock" not in missing


def test_a_stage_that_begins_soon_after_another_has_a_look_of_its_own() -> None:
    sampled = sampled_with(map(Reading, [ProcessorClock(3.0), ProcessorClock(1.0)]))
    sampled.close(first := sampled.open(0, is_outermost=True))
    look(sampled, 0.1)
    second = sampled.open(2 * 10**8, is_outermost=True)
    look(sampled, 0.3)
    assert "processor_clock" not in sampled.freeze(first, 0, is_outermost=True)[0]
    facts, _ = sampled.freeze(second, 0, is_outermost=True)
    assert facts["processor_clock"] == {"gigahertz": 3.0, "celsius": None}


def test_what_cannot_be_read_is_asked_for_once_and_has_its_reason() -> None:
    sampled = sampled_with(iter([Reading(None, "there is no file")]))
    scope = sampled.open(0, is_outermost=True)
    look(sampled, 1.0, 4.0, 8.0)
    facts, missing = sampled.freeze(scope, 0, is_outermost=True)
    assert "processor_clock" not in facts
    assert missing["processor_clock"] == "there is no file"


def test_a_stage_that_was_over_at_once_says_that_none_was_taken() -> None:
    sampled = sampled_with(iter(()))
    scope = sampled.open(0, is_outermost=True)
    assert sampled.freeze(scope, 0, is_outermost=True)[1]["processor_clock"] == NO_READING


def test_a_stage_within_another_has_none() -> None:
    sampled = sampled_with(map(Reading, [ProcessorClock(3.0)]))
    scope = sampled.open(0, is_outermost=False)
    look(sampled, 1.0)
    facts, missing = sampled.freeze(scope, 0, is_outermost=False)
    assert "processor_clock" not in facts | missing
