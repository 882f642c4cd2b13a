import pytest

from sigmascope.analysis.generations import compare_metrics, improvement_factor, improvement_percent
from sigmascope.records.performance import PerformanceMetrics


def metrics(
    seconds: float | None, score: float | None, *, met: bool, step: float = 0.1
) -> PerformanceMetrics:
    return PerformanceMetrics(
        total_generation_time=seconds,
        performance_score=score,
        target_met=met,
        generation_time_per_step=step,
        model_name="Qwen-Image",
    )


def test_sixteen_seconds_to_two_point_four_is_85_percent_and_6_7_times() -> None:
    compared = compare_metrics(
        metrics(16.0, 31.2, met=False, step=0.8), metrics(2.4, 100.0, met=True, step=0.12)
    )
    assert compared["improvement"]["total_time_percent"] == pytest.approx(85.0)
    assert compared["improvement"]["per_step_time_percent"] == pytest.approx(85.0)
    assert compared["improvement"]["performance_score_change"] == pytest.approx(68.8)
    assert compared["improvement"]["target_status_change"] == "False → True"
    assert compared["summary"]["improvement_factor"] == pytest.approx(6.7, abs=0.05)
    assert compared["summary"]["faster"] is True
    assert compared["summary"]["meets_target_now"] is True
    assert compared["summary"]["significant_improvement"] is True
    assert compared["before"] == {
        "total_time": 16.0,
        "per_step_time": 0.8,
        "target_met": False,
        "performance_score": 31.2,
        "model": "Qwen-Image",
    }


def test_an_improvement_is_significant_above_half_only() -> None:
    before = metrics(10.0, 50.0, met=False)
    assert (
        compare_metrics(before, metrics(5.0, 100.0, met=True))["summary"]["significant_improvement"] is False
    )
    assert (
        compare_metrics(before, metrics(4.9, 100.0, met=True))["summary"]["significant_improvement"] is True
    )


def test_slower_is_a_negative_improvement() -> None:
    compared = compare_metrics(metrics(2.0, 100.0, met=True), metrics(3.0, 100.0, met=True))
    assert compared["improvement"]["total_time_percent"] == -50.0
    assert compared["summary"]["faster"] is False


@pytest.mark.parametrize(("before", "after"), [(None, 1.0), (1.0, None), (0.0, 1.0)])
def test_nothing_is_said_of_times_that_are_not_known(before: float | None, after: float | None) -> None:
    assert improvement_percent(before, after) is None
    assert improvement_factor(before, after) is None
    compared = compare_metrics(metrics(before, None, met=False), metrics(after, None, met=False))
    assert compared["summary"]["faster"] is None
    assert compared["improvement"]["performance_score_change"] is None
