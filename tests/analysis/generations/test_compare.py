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
    assert compared["improvement"]["target_status_change"] is True
    assert compared["improvement"]["target_status"] == "False → True"
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


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [(True, False, True), (True, True, False), (None, True, False), (False, None, False)],
)
def test_the_target_status_has_changed_where_both_sides_are_known(
    before: bool | None, after: bool | None, changed: bool
) -> None:
    sides = PerformanceMetrics(target_met=before), PerformanceMetrics(target_met=after)
    assert compare_metrics(*sides)["improvement"]["target_status_change"] is changed


def test_the_time_of_a_step_is_derived_where_none_was_timed() -> None:
    before = PerformanceMetrics(total_generation_time=16.0, num_inference_steps=20)
    timed = PerformanceMetrics(
        total_generation_time=2.4, num_inference_steps=20, generation_time_per_step=0.1
    )
    compared = compare_metrics(before, timed)
    assert compared["before"]["per_step_time"] == pytest.approx(0.8)  # 16 s / 20
    assert compared["before"]["per_step_time_derived"] is True
    assert compared["after"]["per_step_time"] == 0.1
    assert "per_step_time_derived" not in compared["after"]
    assert compared["improvement"]["per_step_time_percent"] == pytest.approx(87.5)  # (0.8 - 0.1) / 0.8
