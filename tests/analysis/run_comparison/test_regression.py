import math
from dataclasses import replace
from typing import Any

import pytest
from scipy.stats import binom
from tests.analysis.run_sets import noisy_runs, queued, run

from sigmascope.analysis import two_samples
from sigmascope.analysis.run_comparison import ALPHA, RegressionCheck, check_regression
from sigmascope.errors import ConfigError
from sigmascope.records.run import Run, Stage


def verdicts(check: RegressionCheck) -> dict[str, str]:
    return {figure.comparison.name: figure.verdict for figure in check.figures}


def test_a_slowdown_beyond_what_is_allowed_has_regressed() -> None:
    check = check_regression(noisy_runs(10, factor=1.1, seed=1), noisy_runs(10, seed=2))
    found = verdicts(check)
    assert found["denoising"] == found["denoising step"] == "regressed"
    assert found["latent_decoding"] == found["process peak"] == "same"
    assert "more than the 5.0 % allowed" in check.regressed[0].why


def test_a_slowdown_within_what_is_allowed_is_higher_only() -> None:
    check = check_regression(noisy_runs(20, factor=1.05, seed=1), noisy_runs(20, seed=2), max_slowdown=0.2)
    assert verdicts(check)["denoising"] == "higher"
    assert not check.regressed


def test_a_speed_up_is_lower() -> None:
    assert (
        verdicts(check_regression(noisy_runs(10, factor=0.8), noisy_runs(10, seed=1)))["denoising"] == "lower"
    )


def test_memory_has_a_limit_of_its_own() -> None:
    new = [run([0.1] * 5, rss=1_100_000_000 + index) for index in range(6)]
    old = [run([0.1] * 5, rss=1_000_000_000 + index) for index in range(6)]
    assert verdicts(check_regression(new, old))["process peak"] == "regressed"
    assert verdicts(check_regression(new, old, max_growth=0.15))["process peak"] == "higher"


def test_too_few_runs_decide_nothing_and_say_what_they_can_show() -> None:
    check = check_regression([run([0.2] * 5)], [run([0.1] * 5)])
    figure = next(figure for figure in check.figures if figure.comparison.name == "denoising")
    assert figure.verdict == "undecided"
    assert figure.why == (
        "+100.0 %, beyond noise, but 1 run before and 1 now are too few for p < 0.01; measure 4 more on each side"
    )


def test_noise_as_large_as_the_slowdown_decides_nothing() -> None:
    new = [run([seconds]) for seconds in (1.0, 1.9, 1.1, 1.2, 2.0, 1.0)]
    old = [run([seconds]) for seconds in (1.1, 1.0, 1.8, 1.0, 1.1, 1.9)]
    figure = next(f for f in check_regression(new, old).figures if f.comparison.name == "denoising")
    assert figure.verdict in ("undecided", "same")


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many checks that look at no interval."""
    monkeypatch.setattr(two_samples, "_RESAMPLES", 20)


@pytest.mark.usefixtures("few_resamples")
@pytest.mark.slow
def test_alike_runs_raise_an_alarm_no_more_often_than_alpha() -> None:
    checks = [
        check_regression(noisy_runs(10, seed=seed), noisy_runs(10, seed=500 + seed)) for seed in range(100)
    ]
    alarms = sum(verdicts(check)["denoising"] == "regressed" for check in checks)
    assert alarms <= binom.ppf(0.9999, 50, ALPHA)


@pytest.mark.usefixtures("few_resamples")
def test_a_planted_slowdown_of_5_percent_is_found() -> None:
    checks = [
        check_regression(
            noisy_runs(10, factor=1.05, seed=seed), noisy_runs(10, seed=500 + seed), max_slowdown=0.03
        )
        for seed in range(20)
    ]
    found = sum(verdicts(check)["denoising step"] == "regressed" for check in checks)
    assert found >= 17  # of 20, where each run's speed varies by 1 % and each step by 2 %


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_slowdown_of_the_device_is_found_also_where_a_run_lacks_its_clock(lacking: int) -> None:
    baseline = [queued(9.0, 1.0 + number / 1e4) for number in range(6)]
    new = [queued(9.0, 1.2 + number / 1e4) for number in range(6 - lacking)] + [queued(None, None)] * lacking
    found = check_regression(new, baseline)
    (step,) = (one for one in found.figures if one.comparison.name == "denoising step")
    assert step.verdict == "regressed"
    said = "1 of 6 new runs left out, because the accelerator did not time them" if lacking else None
    assert step.comparison.unavailable.get("runs") == said


@pytest.mark.parametrize(
    "wrong", [{"max_slowdown": -0.1}, {"max_growth": math.nan}, {"alpha": 0.0}, {"alpha": 1.0}]
)
def test_limits_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        check_regression([run([1.0])], [run([1.0])], **wrong)


def test_no_runs_are_refused() -> None:
    with pytest.raises(ConfigError, match="baseline"):
        check_regression([run([1.0])], [])


def test_runs_of_nothing_in_common_are_no_pass() -> None:
    bare = Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(Stage("generation", 0.0, 1.0),))
    other = replace(bare, stages=(Stage("other", 0.0, math.nan),), seconds=math.nan)
    with pytest.raises(ConfigError, match="no stage, step or peak in common"):
        check_regression([bare], [other])
