import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.analysis.run_sets import queued, run

from sigmascope.analysis.run_figures import BenchSummary, Latency, summarise
from sigmascope.records.run import Run, Stage


def generation(seconds: Sequence[float], *, rss: int = 10**9, device_bytes: int | None = None) -> Run:
    """A run whose stages lie in a generation, which takes 0.1 s more than they do."""
    whole = run(list(seconds), rss=rss, device_bytes=device_bytes)
    outer = Stage("generation", 0.0, whole.seconds + 0.1, children=whole.stages)
    return replace(whole, stages=(outer,), seconds=whole.seconds + 0.2)


def test_percentiles_are_those_of_mlperf() -> None:
    latency = Latency.of([float(value) for value in range(200, 0, -1)])
    assert (latency.p50, latency.p90, latency.p99) == (101.0, 181.0, 199.0)


def test_one_value_has_no_spread() -> None:
    assert Latency.of([2.0]).spread is None


def test_the_spread_is_that_of_the_standard_library() -> None:
    seconds = [1.0, 2.0, 4.0]
    assert Latency.of(seconds).spread == pytest.approx(statistics.stdev(seconds) / statistics.mean(seconds))


def test_a_generation_takes_its_own_time_not_the_recorders() -> None:
    assert summarise([generation([1.0, 2.0])]).generation.mean == pytest.approx(3.6)


def test_throughput_is_all_samples_over_all_time() -> None:
    runs = [generation([1.0, 1.4]), generation([4.0, 1.4])]  # 3 s and 6 s
    assert summarise(runs, samples=4).samples_per_second == pytest.approx(8 / 9)


def test_the_first_step_of_each_repeat_is_left_out() -> None:
    step = summarise([generation([9.0, 1.0, 2.0]), generation([9.0, 3.0])]).step
    assert step is not None
    assert (step.count, step.least, step.most) == (3, 1.0, 3.0)


def test_stages_are_in_their_order_and_nothing_else_is_among_them() -> None:
    assert list(summarise([generation([1.0, 2.0])]).stages) == ["denoising", "latent_decoding"]


def test_peaks_are_the_highest_of_all_repeats() -> None:
    runs = [generation([1.0], rss=5, device_bytes=30), generation([1.0], rss=7, device_bytes=20)]
    assert summarise(runs).peak_bytes == {"process": 7, "cuda:0": 30}


def test_the_first_generation_is_that_of_the_warm_up() -> None:
    summary = summarise([generation([1.0])], warm_up=[generation([8.0]), generation([1.0])])
    assert summary.first_seconds == pytest.approx(8.6)


def notes(totals: Sequence[float]) -> str:
    return " ".join(summarise([replace(run([1.0]), seconds=total, stages=()) for total in totals]).notes)


@pytest.mark.parametrize(
    ("count", "note"),
    [(1, "p50 and p90 and p99 of 1"), (5, "p90 and p99 of 5"), (50, "p99 of 50 repeats is"), (200, "")],
)
def test_a_percentile_that_is_the_slowest_is_called_so(count: int, note: str) -> None:
    found = notes([1.0] * count)
    assert note in found if note else not found


def test_even_repeats_of_chance_order_are_not_called_noisy_or_drifting() -> None:
    rng = random.Random(0)
    found = notes([rng.gauss(1, 0.02) for _ in range(20)])
    assert "vary" not in found
    assert "became" not in found


def test_uneven_repeats_are_noted_with_how_much() -> None:
    assert "vary by 34 %" in notes([1.0, 2.0] * 10)


@pytest.mark.parametrize(("sign", "words"), [(1, "19 % slower"), (-1, "19 % faster")])
def test_a_trend_is_noted_with_its_direction(sign: int, words: str) -> None:
    assert words in notes([1 + sign * 0.02 * (index - 4.5) * 1.05 for index in range(10)])


@pytest.mark.parametrize(("share", "is_noted"), [(0.05, False), (0.6, True), (None, False)])
def test_a_busy_machine_is_noted(share: float | None, is_noted: bool) -> None:
    noted = {"benchmark": {"others_cpu_share": share}}
    found = " ".join(summarise([replace(run([1.0]), facts=noted)] * 2).notes)
    assert ("Other programs used 60 % of the processor" in found) is is_noted


def test_the_summary_is_plain_json() -> None:
    summary: BenchSummary = summarise([generation([1.0, 2.0])])
    plain = summary.as_dict()
    assert plain["stages"]["denoising"]["p50"] == 3.0
    assert plain["step"]["count"] == 1


def test_steps_that_the_device_was_not_seen_to_finish_are_counted_in_a_note() -> None:
    found = summarise([queued(9.0, 0.4, 0.4), queued(9.0, 0.4, None)])
    assert found.step is not None
    assert found.step.count == 3
    assert found.step.mean == pytest.approx(0.4)
    assert found.notes[-1].startswith("1 of 6 steps are missing from the table")
