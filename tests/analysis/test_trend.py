"""Change points of planted series. Statistical proof on many series is in benchmarks/trend_rates.py."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from sigmascope.analysis import trend
from sigmascope.analysis.run_comparison import Limits, is_noise
from sigmascope.analysis.trend import Change, changed_with_last, is_value, trend_of

GIB = 2.0**30


def gaussian(count: int, seed: int, level: float = 10.0, noise: float = 0.01) -> list[float]:
    rng = random.Random(seed)
    return [level * rng.gauss(1, noise) for _ in range(count)]


def places(values: list[float], unit: str = "seconds") -> list[int]:
    return [change.at for change in trend_of(values, unit).changes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (20.0, 50.0),  # ComfyUI 9675
        (7.0, 540.0),  # stable-diffusion-webui 12267
        (4.6, 20.0),  # ComfyUI 4271, seconds a step
        (10.0, 11.2),
        (20.0, 10.0),
    ],
)
def test_a_step_is_found_three_runs_after_it_began(before: float, after: float) -> None:
    values = gaussian(30, 1, before) + gaussian(3, 2, after)
    assert places(values[:-1]) == []
    [change] = trend_of(values, "seconds").changes
    assert (change.at, change.found_at) == (30, 32)
    assert change.before == pytest.approx(before, rel=0.01)
    assert change.after == pytest.approx(after, rel=0.01)
    assert change.share == pytest.approx(after / before - 1, rel=0.02, abs=0.02)


def test_what_is_a_change_is_no_noise_to_a_comparison() -> None:
    values = gaussian(30, 1) + gaussian(3, 2, 11.2)
    assert not is_noise(values[30:], values[:30], "seconds")
    assert is_noise(gaussian(3, 2, 10.3), values[:30], "seconds")
    assert places(values[:30] + gaussian(3, 2, 10.3)) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "noise",
    [
        lambda rng, n: 10 * (1 + 0.02 * rng.standard_normal(n)),
        lambda rng, n: 10 * np.exp(0.1 * rng.standard_normal(n)),
        lambda rng, n: 10 * (1 + 0.01 * rng.standard_normal(n)) * np.where(rng.random(n) < 0.03, 3.0, 1.0),
        lambda rng, n: 10 * (1 + 0.01 * rng.standard_normal(n)) * (1 + 0.05 * np.arange(n) / n),
    ],
    ids=["gaussian", "log-normal", "late runs", "drift"],
)
def test_noise_is_no_change(noise: Callable[[np.random.Generator, int], np.ndarray], seed: int) -> None:
    assert places(noise(np.random.default_rng(seed), 80).tolist()) == []


def test_late_runs_hide_no_step() -> None:
    values = gaussian(40, 3)
    values[7], values[31] = 30.0, 14.0
    assert places(values + gaussian(3, 4, 12.0)) == [40]
    late = gaussian(3, 4, 12.0)
    late[2] = 40.0
    assert places(values + late) == [40]


@pytest.mark.slow
@pytest.mark.parametrize("change", [1.1, 0.9])
def test_changes_are_found_where_one_run_in_20_is_late(change: float) -> None:
    """One of the three new runs is late in 14 of 100 series, and a rank test misses the other two."""
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(100):
        at = int(rng.integers(20, 80))
        values = 10 * (1 + 0.015 * rng.standard_normal(at + 3))
        late = rng.random(at + 3) < 0.05
        values[late] *= 1 + rng.exponential(0.5, late.sum())
        values[at:] *= change
        found += any(abs(place - at) <= 1 for place in places(values.tolist()))
    assert found >= 95


@pytest.mark.slow
@pytest.mark.parametrize(("drift", "change"), [(0.05, 0.9), (-0.05, 1.1)])
def test_changes_are_found_in_series_that_drift(drift: float, change: float) -> None:
    rng = np.random.default_rng(2)
    found = 0
    for _ in range(100):
        at = int(rng.integers(20, 80))
        values = 10 * (1 + 0.015 * rng.standard_normal(at + 3)) * (1 + drift * np.arange(at + 3) / 100)
        values[at:] *= change
        found += any(abs(place - at) <= 1 for place in places(values.tolist()))
    assert found >= 95


def test_a_drift_that_ends_is_no_change() -> None:
    """The line goes on where the values do not."""
    values = [value * (1 + 0.1 * min(at, 50) / 50) for at, value in enumerate(gaussian(100, 1))]
    assert places(values) == []


@pytest.mark.parametrize("new", [[9.0, 14.0, 9.05], [14.0, 9.0, 9.05], [9.0, 9.05, 14.0]])
def test_a_late_run_among_three_that_are_faster_hides_nothing(new: list[float]) -> None:
    [place] = places(gaussian(40, 3) + new)
    assert abs(place - 40) <= 1
    assert places([*gaussian(40, 3), 7.5, 9.1, 7.6]) == [40]  # late too, and of neither level
    assert places(gaussian(40, 3) + new[:2]) == []


def test_late_runs_are_no_level_unless_they_agree() -> None:
    before = gaussian(40, 3)
    for at, late in zip(range(3, 40, 8), (11.5, 28.0, 16.0, 24.0, 19.0), strict=True):
        before[at] = late
    assert places([*before, 12.5, 14.5, 21.0]) == []
    assert places([*before, 12.5, 12.4, 12.6]) == [40]


def test_a_late_run_before_a_change_does_not_draw_the_place_to_itself() -> None:
    for late in (11.1, 14.0):
        assert places([*gaussian(28, 1), late, 10.04, 11.23, 11.06, 10.92]) == [30]


def test_two_changes_near_each_other_are_both_found() -> None:
    assert places(gaussian(30, 1) + gaussian(4, 2, 12.0) + gaussian(4, 3, 15.0)) == [30, 34]


def test_a_gradual_change_is_a_change_or_a_drift() -> None:
    """Up by half within twelve runs; and by a seventh in a hundred, where no run is the one."""
    ramp = [10 * (1 + 0.5 * step / 12) for step in range(1, 13)]
    quick = trend_of(gaussian(30, 1) + ramp + gaussian(20, 2, 15.0), "seconds")
    assert quick.changes
    assert quick.changes[0].at in range(30, 38)
    assert quick.level == pytest.approx(15.0, rel=0.02)
    slow = trend_of([value * (1 + 0.15 * at / 100) for at, value in enumerate(gaussian(100, 1))], "seconds")
    assert slow.changes == ()
    assert slow.drift == pytest.approx(0.15, abs=0.03)
    assert trend_of(gaussian(100, 1), "seconds").drift is None


def test_what_went_up_and_came_down_is_two_changes() -> None:
    values = gaussian(30, 1) + gaussian(10, 2, 13.0) + gaussian(20, 3)
    first, second = trend_of(values, "seconds").changes
    assert [(first.start, first.at, first.end), (second.start, second.at, second.end)] == [
        (0, 30, 40),
        (30, 40, 60),
    ]
    assert trend_of(values, "seconds").level == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize("back", range(1, 7))
def test_a_change_stays_told_while_the_first_runs_are_back(back: int) -> None:
    """Two were taken for a series that jumps, and the third for a change: in between it had never been slower."""
    values = gaussian(30, 1) + gaussian(12, 2, 12.0) + gaussian(back, 3)
    assert places(values) == [30, 42][: 1 + (back > 2)]


def test_values_without_any_variance() -> None:
    assert places([10.0] * 100) == []
    assert places([20 * GIB] * 30 + [20.25 * GIB] * 3, "bytes") == [30]
    assert places([20 * GIB] * 30 + [20.1 * GIB] * 30, "bytes") == []  # half a per cent
    assert places([0.0] * 20) == []
    assert places([0.0] * 20 + [1.0] * 5) == [20]
    assert trend_of([0.0] * 20 + [1.0] * 5, "seconds").changes[0].share is None


def test_a_peak_that_jumps_between_two_levels_does_not_change() -> None:
    rng = random.Random(5)
    jumping = [(20 if rng.random() < 0.6 else 24) * GIB for _ in range(100)]
    assert places(jumping, "bytes") == []


def test_of_few_runs_a_peak_must_change_by_no_less_than_of_many() -> None:
    """As a process's did, whose allocator keeps 1 % more or less."""
    for before in (5, 7, 30):
        values = [500.9] * before + [489.4] * 5
        assert trend_of(values, "bytes", limits=Limits(bytes=0.03)).changes == ()
        assert places(values, "bytes") == [before]


def test_peaks_that_jump_to_a_level_that_varies_do_not_change() -> None:
    told = 0
    for seed in range(40):
        rng = random.Random(seed)
        told += bool(
            places(
                [20 * GIB if rng.random() < 0.7 else 24 * GIB * rng.gauss(1, 0.02) for _ in range(100)],
                "bytes",
            )
        )
    assert told <= 0.01 * 40


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_times_that_jump_between_two_levels_do_not_change(share: float) -> None:
    """Of 60 such series some begin with a few runs of one level and a few of the other, and some hold three in a row."""
    told = 0
    for seed in range(60):
        rng = random.Random(seed)
        told += bool(
            places([10.0 * rng.gauss(1, 0.01) * (1.3 if rng.random() < share else 1) for _ in range(100)])
        )
    assert told <= 0.01 * 60


def test_a_change_is_withdrawn_once_the_series_is_seen_to_jump() -> None:
    low, high = [10.0, 10.1, 9.9], [13.0, 13.1, 12.9]
    assert places(low + high) == [3]
    assert places([*low, *high, 10.0, 13.0, 10.1, 9.9, 13.1]) == []
    assert places(gaussian(30, 1) + gaussian(5, 2, 13.0) + gaussian(20, 3)) == [30, 35]  # it came, and went
    before, rare = gaussian(30, 1), gaussian(4, 5, 13.0)
    before[9] = before[21] = rare[3]
    assert places(before + rare[:3] + gaussian(20, 3)) == []  # it was there before


def test_of_few_runs_only_a_clear_change_is_told() -> None:
    assert places([10.0, 10.1, 10.2, 15.0, 15.1, 15.0]) == [3]
    assert places([10.0, 10.1, 10.2, 11.4, 11.1, 11.2]) == [3]
    assert places([10.0, 10.4, 9.7, 11.4, 11.1, 11.2]) == []
    assert places([10.0, 15.0, 15.0, 15.0]) == []
    assert places([]) == []
    assert trend_of([], "seconds").level is None
    assert trend_of([3.0], "seconds").level == 3.0


def test_a_change_is_told_with_one_run_only() -> None:
    values = gaussian(30, 1) + gaussian(6, 2, 12.0)
    told = [changed_with_last(values[:end], "seconds") for end in range(30, 37)]
    assert [change is not None for change in told] == [False, False, False, True, False, False, False]


def test_windows_taken_at_once_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long series only candidates are looked at; one by one the same comes out."""
    values = gaussian(120, 1) + gaussian(90, 2, 10.9) + gaussian(80, 3, 13.0, 0.05) + gaussian(100, 4, 9.0)
    quick = trend_of(values, "seconds").changes
    monkeypatch.setattr(trend, "_candidates", lambda series, unit: [True] * len(series))
    assert quick == trend_of(values, "seconds").changes
    assert len(quick) >= 3


def test_what_is_no_value_is_refused() -> None:
    wrong = (float("nan"), float("inf"), -1.0, None, True, "3")
    assert [is_value(value) for value in wrong] == [False] * len(wrong)
    with pytest.raises(ValueError, match="nan"):
        trend_of([1.0, float("nan")], "seconds")


def test_a_change_says_where_its_levels_are() -> None:
    assert Change(3, 5, 10.0, 12.0, 0, 6).share == pytest.approx(0.2)
