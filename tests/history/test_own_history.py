from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.history.kept_runs import kept_run

from sigmascope.analysis.run_comparison import check_regression
from sigmascope.history.keeper import keep_all
from sigmascope.history.own_history import beside_earlier
from sigmascope.history.store import Store, open_store
from sigmascope.history.trends import comparable_before, trends
from sigmascope.records.run import HostFacts, Run, TensorFacts

Told = Callable[[Run], str | None]


@pytest.fixture
def told(store: Store) -> Told:
    """Keep a run, and give what is said of it."""

    def keep(run: Run) -> str | None:
        store.add(run, "watch")
        return beside_earlier(store, store.kept(run), run)

    return keep


def on_day(day: int, seconds: float, **other: Any) -> Run:
    return kept_run(started_at=f"2026-03-{day:02}T12:00:00+00:00", seconds=seconds, **other)


def test_a_run_that_is_slower_than_all_like_it_is_told_with_what_changed(told: Told) -> None:
    for day in range(1, 6):
        assert told(on_day(day, 10.0 + day / 10)) is None
    slow = on_day(9, 21.0)
    assert slow.host is not None
    line = told(replace(slow, host=replace(slow.host, libraries={"sigmascope": "0.1", "torch": "2.14"})))
    assert line is not None
    assert line.startswith("slower than each of the last 5 runs like it: 2.02 × as long (10.40 s → 21.00 s)")
    assert "torch 2.13 → 2.14" in line


def test_the_third_run_of_a_change_is_told_once_as_the_trend_tells_it(told: Told, store: Store) -> None:
    """12 % more: no single run is a fifth slower than all before it, and the third of them is a change point."""
    before = [10.0 + (7 * day % 20) / 100 for day in range(1, 21)]
    lines = [told(on_day(day, seconds)) for day, seconds in enumerate(before, 1)]
    assert lines == [None] * 20
    lines = [told(on_day(day, 11.4 + (day % 5) / 100)) for day in range(21, 26)]
    assert [line is not None for line in lines] == [False, False, True, False, False]
    assert lines[2] is not None
    assert lines[2].startswith("slower for 3 runs than the runs like it before: 1.13 × as long (10.")
    [series] = trends(store)
    assert [change.change.at for change in series.changes] == [20]


@pytest.mark.parametrize("seconds", [10.9, 11.9, 12.2, 13.5, 30.0])
def test_a_line_is_told_where_the_check_against_the_same_runs_fails(
    told: Told, store: Store, seconds: float
) -> None:
    for day in range(1, 13):
        told(on_day(day, 10.0 + day / 100))
    run = on_day(20, seconds)
    line = told(run)
    before = comparable_before(store, [run])
    regressed = [one.comparison.name for one in check_regression([run], before, is_history=True).regressed]
    assert (line is not None) == ("generation" in regressed) == (seconds > 1.2 * 10.12)
    assert line is None or " × as long (10." in line


@pytest.mark.parametrize(
    ("history", "seconds"),
    [
        ((10.0, 10.0, 10.0), 11.9),  # less than a fifth more
        ((10.0, 19.0, 10.0, 10.0), 21.0),  # one of them was nearly as slow
        ((10.0, 10.0), 30.0),  # of two nobody knows how far they differ
        ((20.0, 20.0, 20.0), 10.0),
    ],
)
def test_noise_is_not_told(told: Told, history: tuple[float, ...], seconds: float) -> None:
    for day, before in enumerate(history, 1):
        told(on_day(day, before))
    assert told(on_day(9, seconds)) is None


def test_a_tenth_of_a_second_is_not_told_of_short_runs(told: Told) -> None:
    def short(day: int, seconds: float) -> Run:
        return replace(on_day(day, 1.0), seconds=seconds, stages=())

    for day in range(1, 6):
        told(short(day, 0.2))
    assert told(short(8, 0.29)) is None
    assert told(short(9, 0.4)) is not None


def test_runs_of_other_work_are_no_measure(told: Told) -> None:
    for day in range(1, 6):
        told(on_day(day, 10.0, size=(512, 512)))
    assert told(on_day(9, 30.0)) is None


def of_a_script(day: int, seconds: float, **other: Any) -> Run:
    """A run that takes a minute to load before its generation."""
    run = on_day(day, seconds, **other)
    generation = replace(run.stages[0], started_seconds=60.0)
    return replace(run, seconds=60.0 + seconds, stages=(generation,))


def test_a_slower_generation_is_told_where_loading_hides_it(told: Told) -> None:
    for day in range(1, 6):
        assert told(of_a_script(day, 10.0 + day / 10)) is None
    line = told(of_a_script(9, 16.0, more={"surroundings": {"deterministic algorithms": "True"}}))
    assert line is not None
    assert line.startswith(
        "its generations are slower than in each of the last 5 runs like it: 1.60 × as long (9.40 s → 15.00 s): "
    )
    assert "in the steps of denoising" in line


@pytest.mark.parametrize("waited", [0.0, 5.0])
def test_a_generation_that_waited_for_a_processor_is_not_blamed(told: Told, waited: float) -> None:
    def beside_others(day: int, seconds: float, waits: float) -> Run:
        run = of_a_script(day, seconds)
        processor = {"own_seconds": 9.0, "waited_seconds": waits}
        generation = replace(run.stages[0], facts={**run.stages[0].facts, "processor": processor})
        return replace(
            run, stages=(generation,), facts={"processor": {"own_seconds": 20.0, "waited_seconds": waits}}
        )

    for day in range(1, 6):
        told(beside_others(day, 10.0, 0.0))
    assert (told(beside_others(9, 16.0, waited)) is None) == (waited > 0)


def test_the_first_run_of_a_process_is_held_against_first_ones(told: Told) -> None:
    for day in range(1, 6):
        told(on_day(day, 10.0, facts={"runs_before": day}))
    assert told(on_day(9, 15.0, facts={"runs_before": 0})) is None  # it compiles
    assert told(on_day(10, 19.0, facts={"runs_before": 1})) is not None
    for day in (11, 12):
        told(on_day(day, 15.0, facts={"runs_before": 0}))
    line = told(on_day(13, 25.0, facts={"runs_before": 0}))
    assert line is not None
    assert line.startswith("slower than each of the last 3 runs like it: 1.67 × as long (15.00 s → 25.00 s)")


def test_a_run_that_waited_for_a_processor_is_not_blamed(told: Told) -> None:
    for day in range(1, 6):
        told(on_day(day, 10.0, facts={"processor": {"own_seconds": 9.0, "waited_seconds": 0.1}}))
    busy = on_day(9, 30.0, facts={"processor": {"own_seconds": 9.0, "waited_seconds": 20.0}})
    assert (
        told(
            replace(
                busy,
                host=HostFacts(cpu_model="EPYC", accelerators=busy.host.accelerators if busy.host else ()),
            )
        )
        is None
    )


def with_output(run: Run, value: float, **facts: Any) -> Run:
    latent = TensorFacts((1,), "float32", "cuda:0", 4, 1, value, value, value, 0.0, 0, 0)
    generation = run.stages[0]
    denoising = replace(generation.children[0], tensors={"latent": latent})
    changed = replace(generation, children=(denoising,), facts={**generation.facts, **facts})
    return replace(run, stages=(changed,))


def test_another_output_of_the_same_recipe_is_told(told: Told) -> None:
    seeded = {"seeds": [7]}
    assert told(with_output(on_day(1, 10.0), 1.0, **seeded)) is None
    assert told(with_output(on_day(2, 10.0), 1.0, **seeded)) is None
    line = told(with_output(on_day(3, 10.0), 2.0, **seeded))
    assert line is not None
    assert line.startswith("another output than that of the last run of the same recipe: ")
    assert "latent of denoising" in line


def test_another_output_of_another_recipe_or_without_a_seed_is_none(told: Told) -> None:
    told(with_output(on_day(1, 10.0), 1.0, seeds=[7]))
    assert told(with_output(on_day(2, 10.0, prompt="1" * 64), 2.0, seeds=[7])) is None
    told(with_output(on_day(3, 10.0), 1.0))
    assert told(with_output(on_day(4, 10.0), 2.0)) is None


def test_the_keeper_says_it_of_what_was_watched(file: Any) -> None:
    said: list[str] = []
    for source in ("bench", "watch"):
        runs = [on_day(day, 10.0 if day < 9 else 30.0, pipeline=source) for day in range(1, 10)]
        keep_all(runs, source, said.append)
    with open_store() as store:
        assert store.count() == 18
    assert [line[:26] for line in said] == ["runs are kept in " + str(file)[:9], "slower than each of the la"]
