import itertools

import pytest

from sigmascope.monitor.utilization import LONGEST_SERIES, Series, highest_of, mean_of


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def test_a_series_of_means_is_bounded_and_keeps_its_mean() -> None:
    series = Series(mean_of, "d")
    for second in range(10_000):
        series.add(ns(second), float(second % 100))
    at_seconds, values = series.freeze(0)
    assert len(values) == len(at_seconds) <= LONGEST_SERIES
    assert at_seconds[0] == 0.0
    assert at_seconds[-1] < 10_000
    assert sum(values) / len(values) == pytest.approx(49.5, abs=0.5)
    assert all(b > a for a, b in itertools.pairwise(at_seconds))


@pytest.mark.parametrize("at", [0, 17, 255, 256, 257, 5000, 9999])
def test_a_series_of_the_highest_keeps_each_peak_at_its_own_time(at: int) -> None:
    series = Series(highest_of, "q")
    for second in range(10_000):
        series.add(ns(second), 7_000_000_000 if second == at else second % 100)
    at_seconds, values = series.freeze(0)
    assert len(values) == len(at_seconds) <= LONGEST_SERIES
    assert (float(at), 7_000_000_000) in zip(at_seconds, values, strict=True)
    assert all(b > a for a, b in itertools.pairwise(at_seconds))


def test_a_short_series_is_what_was_added_in_seconds_since_the_start() -> None:
    series = Series(highest_of, "q")
    for second, value in ((3, 5), (4, 2), (6, 9)):
        series.add(ns(second), value)
    assert series.freeze(ns(2)) == ((1.0, 2.0, 4.0), (5, 2, 9))


def test_an_empty_series_is_empty() -> None:
    assert Series(mean_of, "d").freeze(0) == ((), ())
