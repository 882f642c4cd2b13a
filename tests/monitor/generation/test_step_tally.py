import pytest

from sigmascope.monitor.generation import RECENT_STEPS, StepTally


def tally_of(*seconds: float) -> StepTally:
    tally, now_ns = StepTally(), 0
    for one in seconds:
        step_ns = round(one * 1e9)
        tally.add(now_ns, now_ns + step_ns)
        now_ns += step_ns
    return tally


def test_without_steps_there_is_no_mean_and_the_projection_is_what_elapsed() -> None:
    tally = StepTally()
    assert (tally.mean_seconds(), tally.recent_seconds(), tally.first_ns) == (None, None, None)
    assert tally.projected_seconds(1_500_000_000, 20) == 1.5


def test_the_mean_is_of_all_steps_and_the_recent_one_of_the_last_five() -> None:
    tally = tally_of(3.0, 1.0, 2.0, 2.0, 2.0, 3.0, 1.0)
    assert RECENT_STEPS == 5
    assert tally.mean_seconds() == pytest.approx(2.0)
    assert tally.recent_seconds() == pytest.approx(2.0)
    assert tally_of(9.0, 1.0, 1.0, 1.0, 1.0, 1.0).recent_seconds() == 1.0


def test_the_projection_adds_the_recent_mean_for_each_step_left() -> None:
    # 6 s have elapsed; (1 + 2 + 3) / 3 = 2 s for each of the 7 that are left.
    assert tally_of(1.0, 2.0, 3.0).projected_seconds(6_000_000_000, 10) == pytest.approx(20.0)


def test_steps_beyond_the_plan_take_nothing_off() -> None:
    assert tally_of(1.0, 1.0, 1.0).projected_seconds(3_000_000_000, 2) == pytest.approx(3.0)


def test_the_first_step_is_the_first_however_many_follow() -> None:
    tally = StepTally()
    for start in range(100, 120):
        tally.add(start, start + 1)
    assert tally.first_ns == 100
