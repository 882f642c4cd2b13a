import pytest

from sigmascope.analysis.generations import meets_target, performance_score, projected_seconds


@pytest.mark.parametrize(
    ("seconds", "score"), [(16.0, 31.2), (2.4, 100.0), (5.0, 100.0), (10.0, 50.0), (0.0, 100.0)]
)
def test_the_score_is_the_target_s_share_of_the_time(seconds: float, score: float) -> None:
    assert performance_score(seconds, 5.0) == score


def test_what_took_an_unknown_time_has_no_score() -> None:
    assert performance_score(None, 5.0) is None
    assert meets_target(None, 5.0) is None


@pytest.mark.parametrize(("seconds", "met"), [(4.9, True), (5.0, True), (5.1, False)])
def test_a_target_is_met_up_to_itself(seconds: float, met: bool) -> None:
    assert meets_target(seconds, 5.0) is met


def test_a_projection_adds_what_the_steps_left_will_take() -> None:
    assert projected_seconds(2.0, 0.5, 4) == 4.0
    assert projected_seconds(2.0, 0.5, -1) == 2.0
