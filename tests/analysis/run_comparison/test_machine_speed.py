"""Runs of a machine that became slower or faster: the watch's own work tells it from a pipeline that did."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.analysis.run_sets import of_parts

from sigmascope.analysis.run_comparison import check_regression, compare_run_sets, compare_totals
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import AcceleratorFacts, HostFacts, Run

HOST = HostFacts(cpu_model="CPU", cpu_count_logical=2, libraries={"torch": "2.13.0"})


def runs(
    seconds: float,
    work: object,
    *,
    minute: int = 0,
    facts: Mapping[str, Any] = {},
    host: HostFacts = HOST,
    count: int = 6,
) -> list[Run]:
    """Runs of two stages that take so long by turns, whose watch took so many milliseconds of the processor's time."""
    found = []
    for number in range(count):
        late = 1 + 0.002 * (number % 3)
        made = of_parts({"text_encoding": 0.2 * seconds * late, "denoising": [0.2 * seconds * late] * 4})
        cpu = work * late / 1e3 if isinstance(work, float) else work
        of_watch = {} if cpu is None else {"watch_cpu_seconds": cpu}
        started = f"2026-01-01T00:{minute + number:02d}:00+00:00"
        made = replace(
            made, host=host, started_at=started, facts={**made.facts, "runs_before": 3, **facts, **of_watch}
        )
        found.append(made)
    return found


BEFORE = runs(1.0, 17.5)


def after(seconds: float, work: object, **more: Any) -> list[Run]:
    return runs(seconds, work, minute=30, **more)


@pytest.mark.parametrize(
    ("seconds", "work", "word"),
    [(1.18, 20.5, "slower"), (1.18, 24.0, "slower"), (1.5, 25.9, "slower"), (0.85, 14.8, "faster")],
)
def test_times_of_a_machine_that_changed_are_not_comparable(seconds: float, work: float, word: str) -> None:
    compared = compare_totals(after(seconds, work), BEFORE)
    assert (compared.state, compared.undecided) == ("not comparable", None)
    assert (
        f"the machine itself was {word}, since the same work of the watch took {1.002 * work:.1f} ms"
        in compared.unavailable["wall"]
    )
    rows, _ = compare_run_sets(after(seconds, work), BEFORE)
    assert {row.name: row.state for row in rows if row.unit == "seconds"} == dict.fromkeys(
        ("total", "text_encoding", "denoising", "denoising step"), "not comparable"
    )
    check = check_regression(after(seconds, work), BEFORE)
    times = [figure for figure in check.figures if figure.comparison.unit == "seconds"]
    assert [figure.verdict for figure in times] == ["undecided"] * 4
    headline = what_changed(after(seconds, work), BEFORE).headline
    assert f"the machine itself was {word}" in headline
    assert "nothing in the recipe explains it" not in headline


@pytest.mark.parametrize(
    ("seconds", "work"),
    [
        (1.18, 17.5),  # the machine is as it was
        (1.18, 14.0),  # and even faster
        (1.5, 20.0),  # slower, but not by half
        (0.85, 21.0),
    ],
)
def test_what_a_machines_speed_does_not_explain_has_changed(seconds: float, work: float) -> None:
    compared = compare_totals(after(seconds, work), BEFORE)
    assert (compared.state, compared.unavailable) == ("changed", {})


@pytest.mark.parametrize(("work", "word"), [(15.0, "faster"), (20.5, "slower")])
def test_a_machine_that_changed_may_hide_a_change(work: float, word: str) -> None:
    compared = compare_totals(after(1.0, work), BEFORE)
    assert (compared.state, compared.undecided) == ("not comparable", None)
    assert f"the machine itself was {word}, which may hide a change" in compared.unavailable["wall"]
    assert f"the machine itself was {word}, which may hide" in what_changed(after(1.0, work), BEFORE).headline


@pytest.mark.parametrize(
    ("work", "more"),
    [
        (17.0, {}),  # by too little
        (15.0, {"facts": {"runs_before": 0}}),  # the watch may have had other work
    ],
)
def test_a_machine_that_hides_nothing_leaves_it_as_before(work: float, more: Mapping[str, Any]) -> None:
    assert compare_totals(after(1.0, work, **more), BEFORE).state == "as before"


@pytest.mark.parametrize("work", [None, float("nan"), -1.0, 0.0, "20", [20.0]])
def test_without_the_watchs_work_nothing_is_said_of_the_machine(work: object) -> None:
    assert compare_totals(after(1.18, work), BEFORE).state == "changed"
    assert compare_totals(BEFORE, after(1.18, work)).state == "changed"


@pytest.mark.parametrize(
    "more",
    [
        {"facts": {"runs_before": 0}},  # a process's first run loads more
        {"host": replace(HOST, libraries={"torch": "2.14.1"})},
        {"host": replace(HOST, cpu_model="another")},
        {"host": replace(HOST, accelerators=(AcceleratorFacts("cuda:0", "GPU"),))},
    ],
)
def test_where_the_watch_may_have_had_other_work_it_tells_nothing(more: Mapping[str, Any]) -> None:
    assert compare_totals(after(1.18, 20.5, **more), BEFORE).state == "changed"


@pytest.mark.parametrize(
    ("seconds", "work", "state"),
    [(1.06, 18.0, "not comparable"), (1.06, 17.5, "changed"), (1.1, 18.0, "changed")],
    ids=["slower by half of it", "as it was", "slower by a third of it"],
)
def test_a_machine_that_is_a_little_slower_explains_no_more_than_a_little(
    seconds: float, work: float, state: str
) -> None:
    assert compare_totals(after(seconds, work), BEFORE).state == state


def test_one_late_look_of_the_watch_is_no_slower_machine() -> None:
    now = after(1.18, 17.5)
    now[0] = replace(now[0], facts={**now[0].facts, "watch_cpu_seconds": 0.5})
    assert compare_totals(now, BEFORE).state == "changed"


def test_one_run_a_side_says_it_where_it_is_plain() -> None:
    now, before = after(1.5, 26.0, count=1), runs(1.0, 17.5, count=1)
    assert compare_totals(now, before).state == "not comparable"
