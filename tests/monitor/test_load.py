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
    assert recorder.run().facts == {"watch_seconds": [1.0, 0.75]}


@pytest.mark.parametrize(("seconds", "is_judged"), [(0.1, False), (10.0, True)])
def test_what_others_use_of_the_processors_is_judged_after_some_time_alone(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_judged: bool
) -> None:
    moments = [CpuMoment(0.0, 100.0, 5.0), CpuMoment(seconds, 100.0 + 1.8 * seconds, 5.0 + 0.8 * seconds)]
    monkeypatch.setattr(load, "cpu_moment", lambda: Reading(moments.pop(0)))
    recorder = Recorder(sample_hz=None)
    Load().note(recorder)
    assert ("others_cpu_share" in recorder.run().facts) == is_judged
