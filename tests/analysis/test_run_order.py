"""The order of runs comes from the store where they have a place there, else from the clock, as far as that can be believed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.analysis.run_sets import run

from sigmascope.analysis.run_comparison import check_regression
from sigmascope.analysis.run_order import in_order, share_apart
from sigmascope.analysis.what_changed import what_changed
from sigmascope.history.store import open_store
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_from_json, run_to_json

RISING = ([1.00, 1.02, 1.05, 1.08, 1.11], [1.12, 1.15, 1.18, 1.21, 1.24])
"""Seconds before and now, one run after another, of a machine that becomes slower all the time."""
DRIFTS = "12.9 % on their own; let the sides take turns."


def begun(totals: Sequence[float], moments: Sequence[str]) -> list[Run]:
    """Runs of these times, each begun at its moment."""
    runs = zip((run([total / 4] * 4, other=0.0) for total in totals), moments, strict=True)
    return [replace(made, started_at=moment) for made, moment in runs]


def at(*moments: str) -> list[Run]:
    return begun([1.0] * len(moments), moments)


def minutes(numbers: Sequence[int], day: str = "2026-03-02") -> list[str]:
    return [f"{day}T12:{minute:02d}:00+00:00" for minute in numbers]


def told(now: list[Run], before: list[Run]) -> str:
    return what_changed(now, before).headline


def test_a_clock_that_is_put_back_in_the_middle_of_a_side_is_no_turn_taken() -> None:
    """mininet 398: ntpd puts it back by 25,000 s. By the clock alone, the last three of the new runs lie before the old ones."""
    before = begun(RISING[0], minutes(range(5)))
    put_back = [
        f"2026-03-02T05:{minute}:20+00:00" for minute in (10, 11, 12)
    ]  # 12:07 to 12:09, less 6 h 56 min 40 s
    now = begun(RISING[1], [*minutes((5, 6)), *put_back])
    assert share_apart(now, before) == 1.0
    assert told(now, before).endswith(DRIFTS)
    assert not check_regression(now, before).regressed


def test_one_run_from_2099_turns_nothing_over() -> None:
    before = begun(RISING[0], [*minutes([0]), "2099-01-01T00:00:00+00:00", *minutes((2, 3, 4))])
    now = begun(RISING[1], minutes(range(5, 10)))
    assert share_apart(now, before) == 1.0
    assert told(now, before).endswith(DRIFTS)


def test_beside_one_run_from_2099_sides_that_took_turns_have_taken_turns() -> None:
    """Nine of ten pairs lie near each other: nobody knows of one in ten."""
    before, now = at(*minutes(range(0, 20, 2))), at(*minutes(range(1, 21, 2)))
    assert share_apart(now, before) == pytest.approx(0.1)
    before[4] = replace(before[4], started_at="2099-01-01T00:00:00+00:00")
    assert share_apart(now, before) == pytest.approx(0.18)  # of the others, 49 of 90 pairs lie one way


@pytest.mark.parametrize(
    ("hours", "apart"),
    [
        ((8, 9), 0.0),
        ((8, 20), 0.5),  # from one turn to the other nobody knows the order: half of the pairs
    ],
)
def test_only_turns_near_each_other_count(hours: tuple[int, int], apart: float) -> None:
    """Each turn has a run before, two now, and one before: its four pairs cancel out."""
    before, now = (
        [f"2026-03-01T{hour:02d}:{minute:02d}:00+00:00" for hour in hours for minute in of_side]
        for of_side in ((0, 50), (20, 30))
    )
    assert share_apart(at(*now), at(*before)) == apart


def test_moments_of_several_time_zones_are_one_time() -> None:
    """Each of these began ten minutes after the one before it; as texts they lie the other way round."""
    first, second, third = "2026-03-01T12:00:00+02:00", "2026-03-01T10:10:00Z", "2026-03-01T05:20:00-05:00"
    runs = at(third, first, second)
    assert [made.started_at for made in in_order(runs)] == [first, second, third]


def test_a_moment_that_is_none_says_nothing() -> None:
    runs = at("yesterday", *minutes([1, 0]))
    assert [made.started_at for made in in_order(runs)] == ["yesterday", *minutes([0, 1])]
    assert share_apart(runs[:1], runs[1:]) == 1.0


def test_runs_of_the_store_stand_as_they_were_kept_whatever_their_clocks_say(store_file: Path) -> None:
    """Kept in turns, and by their clocks a day apart."""
    assert store_file.name
    before, now = at(*minutes(range(5))), at(*minutes(range(5), "2026-03-03"))
    in_turns = [one for pair in zip(before, now, strict=True) for one in pair]
    assert share_apart(now, before) == 1.0
    with open_store() as store:
        for one in in_turns:
            store.add(one, "watch")
        kept = [store.record(listed.number) for listed in reversed(store.runs())]
    assert kept == in_turns
    assert share_apart(kept[1::2], kept[::2]) == pytest.approx(0.2)
    assert in_order(kept[::-1]) == kept
    assert share_apart(kept[5:], kept[:5]) == 1.0


def test_a_place_of_the_store_is_in_no_file() -> None:
    placed = replace(at(*minutes([0]))[0], place=("2026-03-01T12:00:00.000000+00:00", 7))
    text = run_to_json(placed)
    assert '"place"' not in text
    assert run_from_json(text) == placed
    assert run_from_json(text).place is None
