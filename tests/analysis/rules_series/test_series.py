"""Generations of one run, judged as a series, on records with the figures of public reports."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from tests.analysis.series import found, generation, series

from sigmascope.analysis.breakdown import headline, time_breakdown, times_in_words
from sigmascope.records.run import Run
from sigmascope.reports import print_run
from sigmascope.reports.html import to_html


def test_waiting_for_a_processor_hides_no_memory_that_stays() -> None:
    mib = 2**20
    busy: dict[str, Any] = {"waited_seconds": 1.5, "throttled_seconds": 0.0}
    run = series(
        *(
            generation(2.0 * i, [0.475] * 4, rss=((1000 + 40 * i) * mib, (1040 + 40 * i) * mib), **busy)
            for i in range(6)
        )
    )
    waits, grows, *_ = headline(run).split(". ")
    assert waits.startswith("The run waited for a processor for 75 %")
    assert grows.startswith("Memory of the process grows by 40 MB each call")


def test_what_compiles_again_for_each_new_size_is_said_first() -> None:
    """Four heights of a compiled model: diffusers issue 11360."""
    firsts = (15.1, 13.5, 15.5, 17.6)
    run = series(
        *(
            generation(20.0 * index, [first, 0.02, 0.018, 0.019], height=512 + 64 * index, compiled=True)
            for index, first in enumerate(firsts)
        )
    )
    [*_, told] = [finding for finding in run.findings if finding.id == "series.first_steps_recur"]
    share = (sum(firsts) - 4 * 0.019) / run.seconds
    assert told.message == (
        "The first step took 13.50 s to 17.60 s in 4 of 4 generations, every other step at most 20.0 ms: each new height "
        f"(512, 576, 640, 704) is compiled again. That is {share:.0%} of 62.33 s.".replace("%", " %")
    )
    assert told.evidence["gain_seconds"] == pytest.approx(sum(firsts[1:]) - 3 * 0.019)
    assert "dynamic=True" in (told.advice or "")
    assert "time.first_step_compiles" not in found(run)
    said = headline(run)
    assert said.startswith(told.message)
    assert "16 steps of 19.0 ms in the median, the longest 17.60 s" in said


@pytest.mark.parametrize("compiled", [True, False])
def test_waiting_for_a_processor_hides_no_compiling(compiled: bool) -> None:
    """The same report on a busy machine; what is compiled again comes first, since it is sure."""
    busy: dict[str, Any] = {"waited_seconds": 11.0, "throttled_seconds": 0.0}
    run = series(
        *(
            generation(
                20.0 * i, [15.0 + i, 0.02, 0.018, 0.019], height=512 + 64 * i, compiled=compiled, **busy
            )
            for i in range(4)
        )
    )
    said = headline(run).split(". ")[:3]
    waits = next(at for at, sentence in enumerate(said) if "waited for a processor" in sentence)
    recurs = next(at for at, sentence in enumerate(said) if "in 4 of 4 generations" in sentence)
    assert (recurs == 0) is compiled
    assert (waits == 0) is not compiled


def test_no_row_tells_of_a_mean_that_no_step_and_no_stage_has() -> None:
    """Of the same report: 16 steps of 3.87 s in the mean, and a decoding that takes long once."""
    run = series(
        *(
            generation(20.0 * index, [first, 0.02, 0.018, 0.019], other=9.0 if index == 0 else 0.1)
            for index, first in enumerate((15.1, 13.5, 15.5, 17.6))
        )
    )
    told = {row.label: times_in_words(row) for row in time_breakdown(run)}
    assert told["denoising, steps"] == "16 × 19.0 ms, the longest 17.60 s"
    assert told["latent_decoding"] == "4 × 100 ms, the longest 9.00 s"
    for view in (page(run), to_html(run)):
        assert "16 × 19.0 ms, the longest 17.60 s" in " ".join(view.split())


def page(run: Run) -> str:
    file = io.StringIO()
    print_run(run, Console(file=file, width=140))
    return file.getvalue()


def test_one_slow_first_step_is_a_warm_up_and_no_series() -> None:
    run = series(*(generation(9.0 * index, [8.0 if index == 0 else 0.02, 0.02, 0.02]) for index in range(4)))
    assert "series.first_steps_recur" not in found(run)
    assert "time.first_step_compiles" in found(run)


def test_a_first_step_that_is_slow_at_one_size_too_is_not_blamed_on_the_size() -> None:
    run = series(*(generation(9.0 * index, [2.0, 0.02, 0.02]) for index in range(3)))
    told = found(run)["series.first_steps_recur"]
    assert "not kept from one generation to the next" in told.message
    assert "warming up once does not help" in (told.advice or "")


def test_steps_that_creep_up_from_generation_to_generation_are_said() -> None:
    """As in diffusers issue 6398: 0.36 s a step at first, 0.63 s eight generations later."""
    usual = (0.36, 0.39, 0.44, 0.47, 0.52, 0.55, 0.60, 0.63)
    run = series(*(generation(5.0 * index, [seconds] * 4) for index, seconds in enumerate(usual)))
    told = found(run)["series.slows_down"]
    assert told.message == (
        "Steps became slower from generation to generation: 360 ms in the first of 8, 630 ms in the last (+75 %)."
    )
    assert headline(run).startswith(told.message)


@pytest.mark.parametrize(
    "usual",
    [
        (0.50, 0.47, 0.51, 0.48, 0.52, 0.50, 0.49, 0.51),
        (0.36, 0.36, 0.36, 0.36, 0.36, 0.36, 0.36, 0.90),  # one alone
        (0.500, 0.502, 0.504, 0.506, 0.508, 0.510, 0.512, 0.514),  # by 3 %
    ],
)
def test_what_is_even_or_jumps_once_does_not_creep_up(usual: Sequence[float]) -> None:
    run = series(*(generation(5.0 * index, [seconds] * 4) for index, seconds in enumerate(usual)))
    assert "series.slows_down" not in found(run)


def test_generations_that_creep_up_since_the_machine_became_busy_are_not_accused() -> None:
    run = series(
        *(
            generation(5.0 * index, [0.36 + 0.04 * index] * 4, waited_seconds=0.6 if index > 2 else 0.0)
            for index in range(8)
        )
    )
    assert "series.slows_down" not in found(run)


def test_sizes_of_different_work_are_no_series() -> None:
    run = series(*(generation(5.0 * i, [0.3 + 0.1 * i] * 4, height=512 + 64 * i) for i in range(8)))
    assert "series.slows_down" not in found(run)


@pytest.mark.parametrize(("count", "is_told"), [(3, False), (4, True), (7, True)])
def test_memory_that_each_of_a_few_generations_adds_is_told(count: int, is_told: bool) -> None:
    mib = 2**20
    run = series(
        *(
            generation(2.0 * i, [0.3] * 4, rss=((900 + 40 * i) * mib, (940 + 40 * i) * mib + 7_000 * i))
            for i in range(count)
        )
    )
    assert ("memory_leak" in found(run)) == is_told
    if is_told:
        assert "Memory of the process grows by 40 MB each call" in headline(run)


def test_memory_that_fills_up_is_no_leak() -> None:
    ends = (900, 1100, 1160, 1180, 1185)
    run = series(*(generation(2.0 * i, [0.3] * 4, rss=(0, end * 2**20)) for i, end in enumerate(ends)))
    assert "memory_leak" not in found(run)


def test_one_generation_among_many_is_named_with_where_and_why() -> None:
    usual = [generation(2.0 * i, [0.3] * 4) for i in range(8)]
    usual[5] = generation(10.0, [0.3] * 4, other=7.0, waited_seconds=6.5)
    told = found(series(*usual))["series.one_stands_out"]
    assert told.message == (
        "Generation 6 took 8.20 s, the others 1.30 s in the median: 6.90 s more in latent_decoding; it waited 6.50 s for a "
        "processor."
    )


def test_odd_records_break_nothing() -> None:
    nan = float("nan")
    odd = [
        generation(0.0, []),
        generation(1.0, [nan, nan, nan]),
        generation(2.0, [1.0]),
        generation(3.0, [0.0] * 4),
    ]
    assert not {name for name in found(series(*odd)) if name.startswith("series.")}
    assert not found(Run("1", "n", "2026-01-02T03:04:05+00:00", 0.0))


def test_memory_that_grows_is_said_beside_steps_that_become_slower() -> None:
    """diffusers 6398: 0.36 to 0.63 s a step over eight generations, and 40 MB more with each."""
    at = [(2000 + 40 * i) * 2**20 for i in range(9)]
    run = series(*(generation(2.6 * i, [0.36 + 0.0386 * i] * 4, rss=(at[i], at[i + 1])) for i in range(8)))
    said = headline(run)
    assert said.startswith(
        "Steps became slower from generation to generation: 360 ms in the first of 8, 630 ms"
    )
    assert "Memory of the process grows by 40 MB each call, over 7 calls." in said


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_generations_that_waited_at_the_end_alone_are_no_jump(slow: int) -> None:
    """Another program came for the last ones: each waited for most of what it took longer."""
    calm = [generation(5.0 * at, [0.4] * 8, waited_seconds=0.0) for at in range(9 - slow)]
    late = [generation(5.0 * at, [0.9] * 8, waited_seconds=4.2) for at in range(9 - slow, 9)]
    assert "series.slows_down" not in found(series(*calm, *late))
    own = [generation(5.0 * at, [0.9] * 8, waited_seconds=0.2) for at in range(9 - slow, 9)]
    assert ("series.slows_down" in found(series(*calm, *own))) == (slow > 1)


def test_a_drift_that_was_waited_for_is_no_drift() -> None:
    """3 % more each time, all of it waited for a processor, of which none waits for a quarter of its time."""

    def rising(waits: bool) -> Run:
        return series(
            *(
                generation(5.0 * at, [0.4 * (1 + 0.03 * at)] * 8, waited_seconds=0.096 * at if waits else 0.0)
                for at in range(8)
            )
        )

    assert "series.slows_down" in found(rising(False))
    assert "series.slows_down" not in found(rising(True))
