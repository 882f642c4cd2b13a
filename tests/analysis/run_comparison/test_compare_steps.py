from dataclasses import replace

import pytest
from tests.analysis.run_sets import noisy_runs, queued, run

from sigmascope.analysis.run_comparison import compare_by_step, compare_pooled_steps


def test_pooled_steps_are_all_but_each_runs_first() -> None:
    (one,) = compare_pooled_steps([run([9.0, 2.0, 4.0, 6.0])], [run([9.0, 1.0]), run([9.0, 3.0, 5.0])])
    assert (one.name, one.runs, one.baseline, one.new) == ("denoising step", (3, 3), 3.0, 4.0)


def test_the_steps_of_two_single_runs_have_an_interval_around_their_ratio() -> None:
    (one,) = compare_pooled_steps(noisy_runs(1, factor=1.2, noise=0.01), noisy_runs(1, noise=0.01, seed=1))
    assert one.lower is not None
    assert one.upper is not None
    assert one.lower <= 1.2 <= one.upper
    assert one.upper - one.lower < 0.1


def test_steps_are_compared_by_their_number() -> None:
    found = compare_by_step([run([8.0, 1.0])] * 3, [run([4.0, 1.0, 1.0])] * 3)
    assert {one.name: one.ratio for one in found} == {
        "denoising step 1": pytest.approx(2.0),
        "denoising step 2": pytest.approx(1.0),
    }


def test_a_run_without_steps_has_none_to_compare() -> None:
    without = replace(run([1.0]), stages=())
    assert compare_by_step([without], [run([1.0])]) == ()
    assert compare_pooled_steps([without], [run([1.0])]) == ()


def test_steps_that_were_not_seen_to_finish_are_left_out_under_their_own_number() -> None:
    new, old = [queued(9.0, None, 0.6)], [queued(9.0, 0.2, 0.3)]
    assert {one.name: one.ratio for one in compare_by_step(new, old)} == {
        "denoising step 1": 1.0,
        "denoising step 3": 2.0,
    }
    (pooled,) = compare_pooled_steps(new, old)
    assert (pooled.new, pooled.baseline, pooled.runs) == (0.6, 0.25, (2, 1))


def test_two_clocks_are_never_set_beside_each_other() -> None:
    (pooled,) = compare_pooled_steps([queued(None, None)], [queued(9.0, 0.2)])
    assert (pooled.new, pooled.baseline) == (0.001, 0.001)
