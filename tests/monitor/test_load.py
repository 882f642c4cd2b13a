import pytest
from tests.monitor.conftest import FakeClock

from sigmascope.monitor import Recorder, load
from sigmascope.monitor.load import Load, OwnTime
from sigmascope.probes.host import CpuMoment
from sigmascope.probes.reading import Reading


def test_own_time_before_the_first_stage_and_after_it_is_told_apart(clock: FakeClock) -> None:
    own, recorder = OwnTime(clock), Recorder(sample_hz=None, clock=clock)
    for has_stages, seconds in ((False, 1.0), (True, 0.25), (True, 0.5)):
        with own.taken(has_stages=has_stages):
            clock.pass_seconds(seconds)
    own.note(recorder)
    assert recorder.run().facts["watch_seconds"] == [1.0, 0.75]


def test_own_time_is_told_in_processor_time_as_well(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = [0]
    monkeypatch.setattr(load, "thread_time_ns", lambda: spent[0])
    own, recorder = OwnTime(clock), Recorder(sample_hz=None, clock=clock)
    for milliseconds in (3, 4):
        spent[0] += 10**9  # the host's
        with own.taken(has_stages=True):
            clock.pass_seconds(1.0)  # of which it waited for a processor for all but
            spent[0] += milliseconds * 10**6
    own.note(recorder)
    assert recorder.run().facts["watch_cpu_seconds"] == 0.007


@pytest.mark.parametrize(("seconds", "is_judged"), [(0.1, False), (10.0, True)])
def test_what_others_use_of_the_processors_is_judged_after_some_time_alone(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_judged: bool
) -> None:
    moments = [CpuMoment(0.0, 100.0, 5.0), CpuMoment(seconds, 100.0 + 1.8 * seconds, 5.0 + 0.8 * seconds)]
    monkeypatch.setattr(load, "cpu_moment", lambda: Reading(moments.pop(0)))
    recorder = Recorder(sample_hz=None)
    Load().note(recorder)
    assert ("others_cpu_share" in recorder.run().facts) == is_judged
