"""The test and the interval against SciPy's."""

import numpy as np
import pytest
from scipy.stats import bootstrap, mannwhitneyu

from sigmascope.analysis.two_samples import p_of_higher, ratio_interval


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (5, 5), (8, 60), (60, 8), (1, 40), (9, 9), (30, 200)])
@pytest.mark.parametrize("values", ["all different", "with ties", "mostly ties"])
@pytest.mark.parametrize("shift", [-2.0, 0.0, 1.0])
def test_p_is_scipys(sizes: tuple[int, int], values: str, shift: float) -> None:
    digits = {"all different": 15, "with ties": 1, "mostly ties": 0}[values]
    generator = np.random.default_rng(sizes)
    new, baseline = (generator.normal(10, 1, size).round(digits) for size in sizes)
    new = new + shift
    if len({*new, *baseline}) == 1:  # SciPy has no answer, and nothing is higher than its equal
        assert p_of_higher(new.tolist(), baseline.tolist()) == 1.0
        return
    expected = mannwhitneyu(new, baseline, alternative="greater").pvalue
    assert p_of_higher(new.tolist(), baseline.tolist()) == pytest.approx(expected, rel=1e-9)


def test_exact_p_of_eight_values_beside_two_thousand_is_quick_and_scipys() -> None:
    generator = np.random.default_rng(0)
    new, baseline = generator.normal(0.2, 1, 8), generator.normal(0, 1, 2_000)
    expected = mannwhitneyu(new, baseline, alternative="greater", method="exact").pvalue
    assert p_of_higher(new.tolist(), baseline.tolist()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("x", "y", "p"), [
    # The number of orders of 3 + 3 values is 20, of which one has all new values on top.
    ([4.0, 5.0, 6.0], [1.0, 2.0, 3.0], 1 / 20),
    ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 1.0),
    ([2.0, 4.0, 6.0], [1.0, 3.0, 5.0], 7 / 20),
])  # fmt: skip
def test_p_is_what_counting_gives(x: list[float], y: list[float], p: float) -> None:
    assert p_of_higher(x, y) == pytest.approx(p)


def test_ties_in_other_samples_change_nothing() -> None:
    """https://github.com/scipy/scipy/issues/26115: SciPy gives an untied sample another p beside a tied one."""
    untied = p_of_higher([0.0, 1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 11.0])
    p_of_higher([20.0, 20.0, 22.0, 23.0, 29.0], [24.0, 25.0, 26.0, 27.0, 28.0, 30.0, 31.0])
    assert p_of_higher([0.0, 1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 11.0]) == untied
    exact = mannwhitneyu([0, 1, 2, 3, 9], [4, 5, 6, 7, 8, 10, 11], alternative="greater", method="exact")
    assert untied == pytest.approx(exact.pvalue)


@pytest.mark.parametrize("sizes", [(3, 3), (20, 7), (60, 400)])
def test_interval_is_scipys(sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(sizes)
    new, baseline = (generator.lognormal(0, 0.1, size) for size in sizes)
    expected = bootstrap(
        (new, baseline),
        lambda ours, theirs, axis: np.median(ours, axis=axis) / np.median(theirs, axis=axis),
        confidence_level=0.95,
        n_resamples=4_999,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(7),
    ).confidence_interval
    found = ratio_interval(new.tolist(), baseline.tolist(), confidence=0.95, seed=7)
    assert found == pytest.approx((expected.low, expected.high), rel=1e-12)
