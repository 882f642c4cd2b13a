"""Runs whose processors had another clock."""

from dataclasses import replace

import pytest
from tests.analysis.series import generation, series

from sigmascope.analysis.recipe import recipe_differences
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import Run


def runs(step: float, gigahertz: object) -> list[Run]:
    """Three runs of a generation of ten such steps."""
    facts = {} if gigahertz is None else {"processor_clock": {"gigahertz": gigahertz, "celsius": None}}
    found = []
    for number in range(3):
        run = series(generation(0.0, [step * (1 + 0.002 * number)] * 10))
        stages = tuple(replace(stage, facts={**stage.facts, **facts}) for stage in run.stages)
        found.append(replace(run, stages=stages))
    return found


def test_a_slower_clock_is_named_as_what_may_explain_a_longer_time() -> None:
    told = what_changed(runs(1.0, 1.4), runs(0.5, 3.2))
    assert "processor clock 3.2 GHz → 1.4 GHz may explain it" in told.headline.split(". ")[0] + "."
    assert told.recipe["processor clock"] == ("3.2 GHz", "1.4 GHz")


def test_a_faster_clock_is_named_where_runs_became_faster() -> None:
    assert (
        "processor clock 1.4 GHz → 3.2 GHz may explain it"
        in what_changed(runs(0.5, 3.2), runs(1.0, 1.4)).headline
    )


def test_a_faster_clock_explains_no_longer_time() -> None:
    headline = what_changed(runs(1.0, 3.2), runs(0.5, 1.4)).headline
    assert "nothing in the recipe explains it" in headline


def test_another_clock_without_another_time_is_not_worth_a_sentence() -> None:
    assert what_changed(runs(0.5, 1.4), runs(0.5, 3.2)).headline == "Nothing differs beyond noise."


@pytest.mark.parametrize("before", [None, 3.1, "fast", float("nan"), 0.0, -1.0])
def test_clocks_that_are_alike_or_not_known_are_no_difference(before: object) -> None:
    assert "processor clock" not in recipe_differences(runs(0.5, 3.0), runs(0.5, before))
    assert "processor clock" not in recipe_differences(runs(0.5, before), runs(0.5, 3.0))
