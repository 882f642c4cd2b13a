"""The sentence that a comparison begins with, of runs that are odd: it says nothing that the records do not hold."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.analysis.run_sets import of_parts
from tests.analysis.series import generation, series

from sigmascope.analysis.run_comparison import check_regression
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_from_json, run_to_json

NOTHING = "Nothing differs beyond noise."


def runs(step: float = 0.5, *, generations: int = 1) -> list[Run]:
    """Three runs of generations of ten such steps."""
    return [
        series(*(generation(100.0 * at, [step * (1 + 0.002 * number)] * 10) for at in range(generations)))
        for number in range(3)
    ]


def headline(new: list[Run], baseline: list[Run]) -> str:
    return what_changed(new, baseline).headline


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -5.0, 0.0])
def test_a_time_that_can_be_none_is_not_called_noise(seconds: float) -> None:
    odd = [replace(run, seconds=seconds) for run in runs()]
    for sides in ((odd, runs()), (runs(), odd), (odd, odd)):
        assert headline(*sides).startswith("Whole times are not compared: the time of a run is NaN, infinite")


def test_more_generations_explain_a_longer_time() -> None:
    assert headline(runs(generations=2), runs()).endswith(": generations 1 → 2 explains it.")
    assert headline(runs(generations=2), runs(generations=2)) == NOTHING


def test_failures_may_explain_a_shorter_time() -> None:
    failed = [
        replace(run, stages=tuple(replace(stage, success=False) for stage in run.stages)) for run in runs(0.1)
    ]
    said = headline(failed, runs())
    assert said.startswith("3 of 3 generations failed (before: 0 of 3).")
    assert said.endswith("generations that failed may explain it.")


def test_runs_without_stages_say_so() -> None:
    bare = [replace(run, stages=()) for run in runs()]
    assert headline(bare, runs()).startswith("The new runs have no stages")
    assert headline(runs(), bare).startswith("The earlier runs have no stages")
    assert headline(bare, bare) == NOTHING


@pytest.mark.parametrize(
    "altered",
    [
        lambda run: run,
        lambda run: run_from_json(run_to_json(run)),
        lambda run: replace(run, facts={"processor": "x", "others_cpu_share": "y", "full_collections": None}),
        lambda run: replace(run, started_at="1970-01-01T00:00:00+00:00"),
    ],
    ids=["itself", "read back", "facts that are none", "a wall clock that jumped"],
)
def test_what_did_the_same_differs_in_nothing(altered: Callable[[Run], Run]) -> None:
    assert headline([altered(run) for run in runs()], runs()) == NOTHING


def of(**parts: float | list[float]) -> list[Run]:
    """Three runs that differ by next to nothing."""
    return [
        of_parts({name: _times(one, 1 + number / 1000) for name, one in parts.items()}) for number in range(3)
    ]


def _times(seconds: float | list[float], factor: float) -> float | list[float]:
    return seconds * factor if isinstance(seconds, float) else [one * factor for one in seconds]


def test_a_run_without_stages_has_the_same_verdict_on_every_surface() -> None:
    """Of five runs a side, 40 % slower: the whole time is all that there is, and the check fails by it."""
    old = [replace(run, stages=()) for number in range(5) for run in of(denoising=10.0 + number / 1000)[:1]]
    new = [run for number in range(5) for run in of(denoising=14.0 + number / 1000)[:1]]
    assert headline(new, old) == (
        "1.40 × as long (10.00 s → 14.00 s). The earlier runs have no stages, so only whole times can be compared."
    )
    assert [figure.comparison.name for figure in check_regression(new, old).regressed] == ["total"]
    assert what_changed(new, old).rows == ()
    assert headline([replace(run, seconds=0.0) for run in new], old) == (
        "The earlier runs have no stages. Whole times are not compared: the time of a run is NaN, infinite, or not above 0."
    )


def test_a_stage_whose_steps_one_side_lacks_is_compared_as_a_whole() -> None:
    said = headline(of(denoising=14.0, latent_decoding=2.0), of(denoising=[1.0] * 10, latent_decoding=2.0))
    assert said.startswith("1.33 × as long (12.01 s → 16.02 s): 4.00 s more in denoising;")


def test_less_work_explains_no_longer_time() -> None:
    """Half of the height, and twice as long."""
    low, high = (
        [series(generation(0.0, [step] * 10, height=height))] for step, height in ((2.0, 256), (1.0, 512))
    )
    assert headline(low, high).endswith(
        "nothing in the recipe explains it; height 512 → 256 should make it faster."
    )
    assert headline(high, low).endswith("height 256 → 512 should make it slower.")


def test_parts_that_all_changed_alike_are_called_so() -> None:
    """As on a slower machine: 1.5 times as long throughout; a stage that stays as it was says another thing."""
    before = of(text_encoding=2.0, denoising=[1.0] * 8, latent_decoding=1.0)
    alike = of(text_encoding=3.0, denoising=[1.5] * 8, latent_decoding=1.52)
    assert headline(alike, before).endswith("explains it; all parts are alike, as on a slower machine.")
    assert headline(before, alike).endswith("explains it; all parts are alike, as on a faster machine.")
    one = of(text_encoding=2.0, denoising=[1.5] * 8, latent_decoding=1.5)
    assert headline(one, before).endswith("nothing in the recipe explains it.")


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.5, "1.50 × as long"), (25.04, "25.0 × as long"), (1013.4, "1,013 × as long")]
)
def test_ratios_have_no_more_digits_than_they_are_worth(ratio: float, words: str) -> None:
    assert headline(of(denoising=ratio), of(denoising=1.0)).startswith(words)
