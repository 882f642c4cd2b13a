import math

import pytest
from scipy.stats import norm
from tests.analysis.run_sets import noisy_runs, noisy_steps, run

from sigmascope.analysis import two_samples
from sigmascope.analysis.run_comparison import compare_run_sets, compare_values


def test_the_exact_test_of_separated_samples_is_one_over_the_number_of_splits() -> None:
    compared = compare_values("x", "seconds", [6.0, 7.0, 8.0, 9.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert compared.p_slower == pytest.approx(1 / 252)
    assert compared.least_p == pytest.approx(1 / 252)
    assert compared.ratio == pytest.approx(8 / 3)


def test_lower_values_are_never_called_slower() -> None:
    assert compare_values("x", "seconds", [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]).p_slower == 1.0


def test_equal_values_differ_in_nothing() -> None:
    compared = compare_values("x", "bytes", [5.0] * 6, [5.0] * 6)
    assert (compared.p_slower, compared.ratio, compared.lower, compared.upper) == (1.0, 1.0, 1.0, 1.0)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_samples, "_RESAMPLES", 499)
    covered = 0
    for seed in range(60):
        new = [sum(steps) for steps in noisy_steps(12, factor=1.1, seed=seed)]
        old = [sum(steps) for steps in noisy_steps(12, seed=1000 + seed)]
        one = compare_values("denoising", "seconds", new, old, seed=seed)
        assert one.lower is not None
        assert one.upper is not None
        covered += one.lower <= 1.1 <= one.upper
    # 95 % of 60 is 57; fewer than 49 would be a chance of one in 10,000 at 91 %, which the bootstrap's bias allows.
    assert covered >= 60 * 0.91 + norm.ppf(1e-4) * math.sqrt(60 * 0.91 * 0.09)


def test_too_few_runs_have_no_interval_and_say_so() -> None:
    compared = compare_values("x", "seconds", [1.0, 2.0], [1.0, 2.0, 3.0])
    assert compared.lower is None
    assert "3 runs" in compared.unavailable["interval"]


def test_nothing_is_no_measure() -> None:
    compared = compare_values("x", "seconds", [1.0] * 3, [0.0] * 3)
    assert compared.ratio is None
    assert compared.unavailable["ratio"] == "the baseline's median is 0"


def test_figures_of_one_side_alone_are_named() -> None:
    compared, missing = compare_run_sets([run([1.0], device_bytes=5)], [run([1.0])])
    assert "cuda:0 peak" not in [one.name for one in compared]
    assert missing == {"cuda:0 peak": "not in the baseline"}


def test_the_same_seed_gives_the_same_interval() -> None:
    sides = noisy_runs(8, seed=1), noisy_runs(8, seed=2)
    assert compare_run_sets(*sides, seed=3) == compare_run_sets(*sides, seed=3)


@pytest.mark.parametrize("baseline", [[0.0, 0.0, 1.0, 1.0, 1.0], [5e-324, 1.0, 1.0]])
def test_values_of_0_in_the_baseline_leave_the_ratio_without_an_interval(baseline: list[float]) -> None:
    found = compare_values("stage", "seconds", [1.0, 2.0, 3.0, 2.0, 2.0], baseline)
    assert (found.ratio, found.lower, found.upper) == (2.0, None, None)
    assert found.unavailable["interval"] == "some of the baseline's values are 0"


def test_a_ratio_is_never_infinite() -> None:
    assert compare_values("stage", "seconds", [1.0] * 3, [5e-324] * 3).ratio is None
