"""What is noise has one answer: the first sentence, the table and the check give the same one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.analysis.run_sets import of_parts, run

from sigmascope.analysis.run_comparison import (
    Limits,
    RegressionCheck,
    check_regression,
    compare_run_sets,
    compare_totals,
    is_noise,
)
from sigmascope.analysis.run_order import share_apart
from sigmascope.analysis.what_changed import what_changed
from sigmascope.analysis.work_comparison import compare_work
from sigmascope.records.run import AcceleratorFacts, HostFacts, Run
from sigmascope.records.serialization import run_from_json, run_to_json
from sigmascope.reports.markdown import to_markdown


def runs_of(totals: Sequence[float]) -> list[Run]:
    return [run([total / 4] * 4, other=0.0) for total in totals]


@pytest.mark.parametrize(
    ("now", "before", "differs"),
    [
        ([1.06, 1.07, 1.08], [1.00, 1.01, 1.02], False),  # apart, but by less than 10 %
        ([1.16, 1.17, 1.18], [1.00, 1.01, 1.02], True),
        ([1.16, 1.17, 1.01], [1.00, 1.01, 1.02], False),  # one lies among the others
        ([11.0], [10.0], False),
        ([12.5], [10.0], True),
        ([12.5], [10.0, 10.6, 9.8], False),  # less than a fifth above the slowest of them
        ([12.8], [10.0, 10.6, 9.8], True),
        ([11.0, 11.1, 10.95], [10.0, 10.1, 10.05, 9.95, 10.02, 9.98, 10.04, 10.08, 9.9, 9.97], True),
        ([11.0, 11.1, 10.0], [10.0, 10.1, 10.05, 9.95, 10.02, 9.98, 10.04, 10.08, 9.9, 9.97], False),
        ([10.7, 10.75, 10.72], [10.0, 10.1, 10.05, 9.95, 10.02, 9.98, 10.04], False),  # too few to test
        ([0.09], [0.03], False),  # other programs delay one run by this much
        ([1.08, 1.06, 1.10, 1.07, 1.09], [1.00, 1.02, 1.035, 1.01, 1.03], True),
        (
            [1.04, 1.06, 1.08, 1.05, 1.07],
            [1.00, 1.02, 1.035, 1.01, 1.03],
            False,
        ),  # idle machines drift by this much
        ([1.10, 1.12, 1.14, 1.16, 1.18], [1.00, 1.02, 1.04, 1.06, 1.08], True),
        ([1.12, 1.15, 1.18, 1.21, 1.24], [1.00, 1.02, 1.05, 1.08, 1.11], False),  # one series that rises
        ([1.10, 1.105, 1.101, 1.40, 1.104], [1.00, 1.005, 1.09, 1.001, 1.003], True),  # one late run
        ([1.10, 1.20, 1.09, 1.19, 1.14], [1.00, 1.08, 1.01, 1.07, 1.04], False),  # it scatters as much
        (
            [1.02, 1.021, 1.022, 1.023, 1.024],
            [1.0, 1.001, 1.002, 1.003, 1.004],
            False,
        ),  # sure, and of no matter
    ],
)
def test_the_sentence_the_table_and_the_check_agree(
    now: list[float], before: list[float], differs: bool
) -> None:
    new, old = runs_of(now), runs_of(before)
    assert is_noise(now, before, "seconds") != differs
    assert compare_totals(new, old).has_changed == differs
    assert ("× as long" in what_changed(new, old).headline) == differs
    figures, _ = compare_run_sets(new, old)
    assert next(figure for figure in figures if figure.name == "total").has_changed == differs
    if len(now) >= 5:
        regressed = [figure.comparison.name for figure in check_regression(new, old).regressed]
        assert ("total" in regressed) == differs


def every_answer(new: list[Run], old: list[Run]) -> tuple[str, set[str], set[str], str]:
    """What is said of two sides: the first sentence, what the table calls undecided and changed, the page's sentence."""
    back = [[run_from_json(run_to_json(run)) for run in side] for side in (new, old)]
    compared = compare_work("", *back)
    text = to_markdown([*back[1], *back[0]]) if len(old) == 1 else ""
    assert compared.changed.headline == what_changed(new, old).headline
    return (
        compared.changed.headline,
        {figure.name for figure in compared.figures if figure.undecided},
        {figure.name for figure in compared.figures if figure.has_changed},
        text,
    )


@pytest.mark.parametrize("factor", [1.15, 0.85])
def test_what_few_runs_cannot_decide_is_said_so_everywhere(factor: float) -> None:
    """Three runs against one, as a page of several records has them."""
    new, old = runs_of([factor, factor + 0.01, factor + 0.02]), runs_of([1.0])
    said, undecided, changed, page = every_answer(new, old)
    growth = f"{100 * (factor + 0.01 - 1):+.1f} %"
    assert said.startswith(f"A change of the whole time by {growth} (1.00 s → ")
    assert said.endswith(
        "1 run before and 3 now are too few for p < 0.01; measure 4 more before and 2 more now."
    )
    assert said[:40] in page
    assert undecided == {"total", "denoising", "denoising step"}
    assert not changed
    checked = check_regression(new, old)
    assert {figure.comparison.name for figure in checked.undecided} == undecided
    assert checked.outcome == "0 figures regressed, 3 undecided"
    assert checked.as_dict()["undecided"] == [figure.comparison.name for figure in checked.undecided]


@pytest.mark.parametrize(
    ("before", "now", "more"),
    [
        (1, 1, "measure 4 more on each side"),
        (3, 3, "measure 2 more on each side"),
        (1, 10, "measure 2 more before"),
        (7, 3, "measure 1 more now"),
    ],
)
def test_as_many_more_runs_as_are_advised_can_decide(before: int, now: int, more: str) -> None:
    """5 beside 5, 3 beside 10, 4 beside 7: two-sided p of 2/252, 2/286 and 2/330 at best."""
    said = what_changed(runs_of([1.08] * now), runs_of([1.0] * before)).headline
    assert said.endswith(f"{more}.")


def test_no_sentence_denies_what_the_table_and_the_check_hold() -> None:
    """A part that takes longer, and a peak of memory, in runs whose whole time is as before."""
    slow = [run([0.0575 + number / 1e4] * 20, other=20.0) for number in range(3)]
    usual = [run([0.05 + number / 1e4] * 20, other=20.0) for number in range(3)]
    said, _, changed, _ = every_answer(slow, usual)
    assert changed == {"denoising", "denoising step"}
    assert said == (
        "denoising +15.0 % (1.00 s → 1.15 s), the whole run as before: 150 ms more in the steps of denoising."
    )
    large, small = ([run([0.05] * 20, rss=size) for _ in range(5)] for size in (1500 * 2**20, 1000 * 2**20))
    said, _, changed, _ = every_answer(large, small)
    assert changed == {"process peak"}
    assert [figure.comparison.name for figure in check_regression(large, small).regressed] == ["process peak"]
    assert said == "The process peak rose by 50.0 % (1,000.0 MB → 1,500.0 MB). Times are as before."


def test_the_limits_that_are_given_reach_every_answer() -> None:
    """3.9 % is less than what is noise unless told otherwise."""
    now, before = [1.04, 1.06, 1.08, 1.05, 1.07], [1.00, 1.02, 1.035, 1.01, 1.03]
    new, old, limits = runs_of(now), runs_of(before), Limits(seconds=0.03)
    assert not is_noise(now, before, "seconds", limits=limits)
    compared = compare_work("", new, old, by_step=True, limits=limits)
    assert compared.changed.headline.startswith("1.04 × as long")
    assert {figure.name for figure in compared.figures if figure.has_changed} >= {"total", "denoising"}
    assert all(step.has_changed for step in compared.steps)
    assert check_regression(new, old, max_slowdown=0.03).regressed
    plainly = compare_work("", new, old, by_step=True)
    assert not any(figure.has_changed for figure in (*plainly.figures, *plainly.steps))


def test_a_check_says_that_a_side_moves_by_itself() -> None:
    checked = check_regression(
        runs_of([1.12, 1.15, 1.18, 1.21, 1.24]), runs_of([1.00, 1.02, 1.05, 1.08, 1.11])
    )
    [total] = [figure for figure in checked.figures if figure.comparison.name == "total"]
    assert total.verdict == "undecided"
    assert total.why == (
        "+12.4 %, but the runs of one side move by 12.9 % on their own; let the sides take turns"
    )


def begun(totals: Sequence[float], minutes: Sequence[int]) -> list[Run]:
    """Runs of these times, each begun in its minute."""
    runs = zip(runs_of(totals), minutes, strict=True)
    return [replace(made, started_at=f"2026-01-01T00:{minute:02d}:00+00:00") for made, minute in runs]


def test_a_side_drifts_in_the_order_of_its_runs_not_of_its_files() -> None:
    """Of the machine alone, which becomes slower all the time: files that are named by chance do not hide it."""
    before = begun([1.00, 1.02, 1.05, 1.08, 1.11], range(5))
    now = begun([1.12, 1.15, 1.18, 1.21, 1.24], range(5, 10))
    shuffled = [[side[place] for place in (4, 0, 2, 3, 1)] for side in (now, before)]
    assert what_changed(*shuffled).headline == (
        "A change of the whole time by +12.4 % (1.05 s → 1.18 s) cannot be told from noise: the runs of one side move by "
        "12.9 % on their own; let the sides take turns."
    )
    compared = compare_work("", *shuffled, by_step=True)
    assert not any(figure.has_changed for figure in (*compared.figures, *compared.steps))


def test_sides_that_took_turns_drift_together() -> None:
    """10 % more, on a machine that becomes 0.7 % slower with each run: before, after, before, after."""
    at = range(0, 20, 2), range(1, 20, 2)
    before, now = (
        [slower * (1 + 0.007 * slot) for slot in side] for slower, side in zip((1.0, 1.1), at, strict=True)
    )
    turns = begun(now, at[1]), begun(before, at[0])
    apart = begun(now, range(10, 20)), begun(before, range(10))
    assert [what_changed(*sides).headline for sides in (turns, apart)] == [
        "1.11 × as long (1.06 s → 1.18 s): 114 ms more in the steps of denoising; nothing in the recipe explains it.",
        "A change of the whole time by +10.7 % (1.06 s → 1.18 s) cannot be told from noise: the runs of one side move by "
        "11.9 % on their own; let the sides take turns.",
    ]


@pytest.mark.parametrize(
    ("minutes", "apart"),
    [
        ((range(10, 20), range(10)), 1.0),
        (([*range(5, 10), *range(15, 20)], [*range(5), *range(10, 15)]), 0.5),
        ((range(1, 20, 2), range(0, 20, 2)), 0.1),
        (([0] * 10, [0] * 10), 1.0),  # nothing is known of their order
    ],
)
def test_how_far_sides_lie_apart(minutes: tuple[Sequence[int], Sequence[int]], apart: float) -> None:
    new, baseline = (begun([1.0] * len(side), side) for side in minutes)
    assert share_apart(new, baseline) == pytest.approx(apart)


def verdict_on_total(checked: RegressionCheck) -> str:
    return next(figure.verdict for figure in checked.figures if figure.comparison.name == "total")


def test_a_check_calls_nothing_higher_that_a_side_drifts_by_itself() -> None:
    """Beyond chance by the test, within the 20 % allowed, and no more than the side's own 8 %."""
    new, old = runs_of([1.12, 1.15, 1.18, 1.21, 1.24]), runs_of([1.00, 1.02, 1.05, 1.08, 1.11])
    assert verdict_on_total(check_regression(new, old, max_slowdown=0.2)) == "same"


def test_a_check_calls_nothing_lower_that_is_noise() -> None:
    """The interval of the ratio is below 1, as 3 % faster: machines drift by this much."""
    new, old = runs_of([0.970, 0.971, 0.972, 0.973, 0.974]), runs_of([1.000, 1.001, 1.002, 1.003, 1.004])
    assert verdict_on_total(check_regression(new, old)) == "same"


def test_the_alpha_of_a_check_reaches_its_first_sentence() -> None:
    now, before = [1.10, 1.11, 1.12, 1.13, 1.00], [1.00, 1.01, 1.02, 1.03, 1.04]  # p = 0.048, two-sided 0.095
    assert what_changed(runs_of(now), runs_of(before)).headline == (
        "A change of the whole time by +8.8 % (1.02 s → 1.11 s) cannot be told from noise: the two sides overlap "
        "(p = 0.058); measure as many runs again, in turns."
    )
    bold = what_changed(runs_of(now), runs_of(before), limits=Limits(alpha=0.2)).headline
    assert bold.startswith("1.09 × as long (1.02 s → 1.11 s)")


def beside_others(
    seconds: float, own: float, waited: float | None, stopped: float = 0.0, **facts: float
) -> Run:
    made = run([seconds / 4] * 4, other=0.0)
    use = {"own_seconds": own, "waited_seconds": waited, "throttled_seconds": 0.0, "stopped_seconds": stopped}
    stages = tuple(replace(stage, facts={"processor": use}) for stage in made.stages[:1])
    return replace(made, stages=stages, facts={"processor": use, **facts})


def test_a_busy_machine_is_not_blamed_on_the_run() -> None:
    """As measured: the same work, the same processor time, and 1.2 s more on the wall beside two other programs."""
    before, now = beside_others(2.0, 3.9, 0.1), beside_others(3.2, 4.0, 1.4, others_cpu_share=0.9)
    assert what_changed([now], [before]).headline == (
        "The times are not comparable: the run waited for a processor for 44 % of its time (before: 5 %); other programs "
        "ran. The run's own processor time is as before: 3.90 s → 4.00 s. Measure again when nothing else runs."
    )
    figures, _ = compare_run_sets([now], [before])
    assert not any(figure.has_changed for figure in figures)
    assert {figure.name for figure in figures if not figure.is_comparable} == {
        "total",
        "denoising",
        "denoising step",
    }


def test_a_process_that_was_stopped_is_not_blamed_on_the_run() -> None:
    before, now = beside_others(2.0, 3.9, 0.1), beside_others(12.0, 3.9, 0.1, 10.0, others_cpu_share=0.02)
    assert what_changed([now], [before]).headline == (
        "The times are not comparable: the process was stopped for 84 % of its time; no other program ran. The run's own "
        "processor time is as before: 3.90 s → 3.90 s."
    )
    assert "the process before was stopped for 84 % of its time;" in what_changed([before], [now]).headline


def test_what_waited_is_not_comparable_even_where_the_clock_shows_no_change() -> None:
    """A wait of more than a quarter comes first, not behind that nothing differs."""
    before, now = beside_others(2.0, 3.9, 0.1), beside_others(2.05, 3.9, 0.8, others_cpu_share=0.9)
    assert what_changed([now], [before]).headline == (
        "The times are not comparable: the run waited for a processor for 39 % of its time (before: 5 %); other programs "
        "ran. By the clock they are as before, but a small change could not be seen. Measure again when nothing else runs."
    )


def test_where_both_waited_a_wait_is_no_change() -> None:
    before, now = beside_others(2.0, 2.0, 1.0), beside_others(2.05, 2.0, 1.1, others_cpu_share=0.9)
    assert what_changed([now], [before]).headline == (
        "Nothing differs beyond noise. A small change of times could not be seen: the run waited for a processor for 54 % of "
        "its time (before: 50 %)."
    )


@pytest.mark.parametrize(
    ("is_before", "words"),
    [
        (True, "the run before waited for a processor for 90 % of its time (now: not recorded)"),
        (False, "the run waited for a processor for 90 % of its time (before: not recorded)"),
    ],
)
def test_a_record_without_waits_beside_one_that_waited_is_not_comparable(is_before: bool, words: str) -> None:
    waited, old = beside_others(27.0, 3.0, 24.3), run([0.75] * 4, other=0.0)
    sides = ([old], [waited]) if is_before else ([waited], [old])
    assert what_changed(*sides).headline.startswith(f"The times are not comparable: {words}.")
    calm = beside_others(27.0, 26.0, 0.5)
    assert " × as " in what_changed([old] if is_before else [calm], [calm] if is_before else [old]).headline


def test_more_work_beside_other_programs_is_still_seen_in_the_processor_time() -> None:
    before, now = beside_others(2.0, 3.9, 0.1), beside_others(6.0, 7.8, 2.5, others_cpu_share=0.9)
    assert what_changed([now], [before]).headline.endswith(
        "The run's own processor time was 3.90 s → 7.80 s, which other programs can change, too. "
        "Measure again when nothing else runs."
    )


def test_what_a_run_slept_is_told_beside_other_programs() -> None:
    """A callback that sleeps for 1.6 s, on a machine where the run waits for half a second of 0.8 s as of 2.4 s."""
    before, now = (
        of_parts({"denoising": [0.2] * 4, "saving": slept}, others=others)
        for slept, others in ((0.0, 0.8), (1.6, 0.93))
    )
    use = {"own_seconds": 0.3, "waited_seconds": 0.5, "throttled_seconds": 0.0}
    before, now = (replace(one, facts={**one.facts, "processor": use}) for one in (before, now))
    said = what_changed([now], [before]).headline
    assert said.startswith("The times are not comparable: ")
    assert (
        "But for 1.60 s more than before it neither worked nor waited for a processor: 1.60 s more in saving."
        in said
    )
    assert "But for" not in what_changed([before], [now]).headline
    busier = replace(now, facts={**now.facts, "processor": {**use, "waited_seconds": 2.1}})
    assert "But for" not in what_changed([busier], [before]).headline


def test_processors_that_are_all_in_use_make_times_not_comparable() -> None:
    """As measured with two threads of OpenMP beside one program: the threads wait for each other, and spin."""
    host = HostFacts(cpu_count_logical=2)
    before = replace(beside_others(1.4, 2.7, 0.0, others_cpu_share=0.0), host=host)
    now = replace(beside_others(3.3, 4.4, 0.1, others_cpu_share=0.33), host=host)
    said = what_changed([now], [before]).headline
    assert said.startswith(
        "The times are not comparable: other programs used 33 % of the processor (before: 0 %)."
    )
    too_short = replace(before, facts={"processor": before.facts["processor"]})
    assert what_changed([now], [too_short]).headline.startswith(
        "The times are not comparable: other programs used 33 % of the processor (before: not recorded)."
    )
    many = replace(host, cpu_count_logical=64)
    on_many = [replace(side, host=many) for side in (before, now)]
    assert what_changed(on_many[1:], on_many[:1]).headline.startswith("2.36 × as long")


def test_a_check_beside_other_programs_is_undecided_and_says_why() -> None:
    before = [beside_others(2.0 + index / 100, 3.9, 0.1) for index in range(6)]
    now = [beside_others(3.2 + index / 100, 4.0 + index / 100, 1.4) for index in range(6)]
    checked = check_regression(now, before)
    assert checked.regressed == ()
    [total] = [figure for figure in checked.figures if figure.comparison.name == "total"]
    assert total.verdict == "undecided"
    assert total.why.startswith("not comparable: the run waited for a processor for 43 % of its time")


def test_time_that_was_waited_for_explains_a_smaller_difference_too() -> None:
    """A fifth of its time waited is no reason to distrust the clock; but it is all of the difference."""
    before, now = beside_others(10.0, 19.0, 0.0), beside_others(12.5, 19.0, 2.4)
    assert "not comparable" in what_changed([now], [before]).headline
    slower = beside_others(12.5, 24.0, 0.4)
    assert what_changed([slower], [before]).headline.startswith("1.25 × as long")


def test_processor_time_says_nothing_where_the_host_waits_for_an_accelerator() -> None:
    host = HostFacts(accelerators=(AcceleratorFacts("cuda:0"),))
    before, now = (
        replace(beside_others(2.0, 2.0, 0.1), host=host),
        replace(beside_others(6.0, 6.0, 3.0), host=host),
    )
    headline = what_changed([now], [before]).headline
    assert "not comparable" in headline
    assert "processor time" not in headline
