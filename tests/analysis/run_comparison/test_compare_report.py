import math
from dataclasses import replace
from typing import Any

import pytest
from tests.analysis.run_sets import noisy_runs, run

from sigmascope.analysis.generations import before_after, meets_target, performance_score
from sigmascope.analysis.work_comparison import compare_work
from sigmascope.records.performance import PerformanceMetrics
from sigmascope.records.run import Run, Stage


def generation(seconds: float, *, success: bool = True) -> Run:
    metrics = PerformanceMetrics(
        total_generation_time=seconds,
        performance_score=performance_score(seconds, 5.0),
        target_met=meets_target(seconds, 5.0),
    )
    facts = {"performance": metrics.as_dict()}
    return replace(
        run([1.0]), stages=(Stage("generation", 0.0, seconds, success=success, facts=facts),), seconds=seconds
    )


def test_before_and_after_are_the_golden_numbers() -> None:
    found = before_after([generation(2.4)], [generation(16.0)])
    assert found is not None
    assert found["improvement"]["total_time_percent"] == pytest.approx(85.0)
    assert found["summary"]["improvement_factor"] == pytest.approx(6.7, abs=0.05)
    assert (found["before"]["performance_score"], found["after"]["performance_score"]) == (31.2, 100.0)


def test_the_median_generation_of_each_side_is_taken() -> None:
    found = before_after([generation(2.0)], [generation(one) for one in (9.0, 3.0, 5.0)])
    assert found is not None
    assert found["before"]["total_time"] == 5.0


def test_a_generation_that_failed_is_not_taken() -> None:
    assert before_after([generation(1.0)], [generation(9.0, success=False)]) is None


def test_runs_of_no_monitor_have_no_before_and_after() -> None:
    assert before_after([run([1.0])], [run([1.0])]) is None


def test_pooled_steps_are_given_only_where_runs_are_few() -> None:
    runs = noisy_runs(3)
    assert compare_work("", runs, runs).pooled_steps == ()
    assert len(compare_work("", runs[:2], runs).pooled_steps) == 1


def test_each_step_is_given_only_when_asked_for() -> None:
    runs = noisy_runs(1)
    assert compare_work("", runs, runs).steps == ()
    assert len(compare_work("", runs, runs, by_step=True).steps) == 20


def test_the_report_is_plain_json() -> None:
    plain = compare_work("a", noisy_runs(3), noisy_runs(4, seed=1)).as_dict()
    assert plain["runs"] == [4, 3]
    assert {one["name"] for one in plain["figures"]} >= {"total", "denoising", "denoising step"}


def test_the_median_counts_every_generation_also_of_the_same_length() -> None:
    found = before_after([generation(1.0)], [generation(one) for one in (1.0, 1.0, 1.0, 2.0, 3.0)])
    assert found is not None
    assert found["before"]["total_time"] == 1.0


def test_a_length_that_is_no_number_is_not_taken() -> None:
    assert before_after([generation(1.0)], [generation(float("nan"))]) is None


@pytest.mark.parametrize(
    "noted", [{"performance_score": "high"}, {"total_generation_time": math.nan}, {"image_resolution": 5}]
)
def test_a_generation_whose_metrics_were_changed_by_hand_counts_for_nothing(noted: dict[str, Any]) -> None:
    odd = generation(1.0)
    facts = {"performance": {**odd.stages[0].facts["performance"], **noted}}
    odd = replace(odd, stages=(replace(odd.stages[0], facts=facts),))
    assert before_after([odd], [generation(9.0)]) is None
    found = before_after([odd, generation(3.0)], [generation(9.0)])
    assert found is not None
    assert found["after"]["total_time"] == 3.0
