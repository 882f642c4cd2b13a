"""The sentence that a comparison begins with, of runs that are odd: it says nothing that the records do not hold."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.analysis.series import generation, series

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
        assert headline(*sides).startswith("The times are not compared: a run has none that can be one")


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
    assert headline(bare, runs()).startswith("The runs now have no stages")
    assert headline(runs(), bare).startswith("The runs before have no stages")
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
