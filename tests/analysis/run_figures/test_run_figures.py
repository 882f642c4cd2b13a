import math
from dataclasses import replace

import pytest
from tests.analysis.run_sets import queued, run

from sigmascope.analysis.run_figures import figures_of, timed_on_device
from sigmascope.records.memory import PeakMemory
from sigmascope.records.run import Folded, FoldedStages, Run, Stage


def test_a_run_gives_its_total_its_stages_its_steps_and_its_peaks() -> None:
    figures = figures_of([run([9.0, 1.0, 1.5, 2.0], device_bytes=2**30)])
    assert {name: (figure.unit, figure.values) for name, figure in figures.items()} == {
        "total": ("seconds", (14.0,)),
        "denoising": ("seconds", (13.5,)),
        "denoising step": ("seconds", (1.5,)),  # the median without the first
        "latent_decoding": ("seconds", (0.5,)),
        "process peak": ("bytes", (1e9,)),
        "cuda:0 peak": ("bytes", (2.0**30,)),
    }


def test_a_single_step_is_its_own_median() -> None:
    assert figures_of([run([2.0])])["denoising step"].values == (2.0,)


def test_each_run_adds_one_value() -> None:
    assert figures_of([run([1.0, 1.0]), run([2.0, 2.0])])["denoising"].values == (2.0, 4.0)


def test_a_stage_counts_each_time_it_runs_but_not_twice_inside_itself() -> None:
    inner = Stage("encode", 0.0, 1.0)
    stages = (Stage("encode", 0.0, 2.0, children=(inner,)), Stage("encode", 2.0, 3.0))
    figures = figures_of([Run("id", "run", "2026-01-01T00:00:00+00:00", 5.0, stages=stages)])
    assert figures["encode"].values == (5.0,)


def test_a_single_generation_has_no_total_beside_its_own_time() -> None:
    """What a monitor does before and after it, such as reading the machine, is not the pipeline's time."""
    made = Run("id", "run", "2026-01-01T00:00:00+00:00", 1.2, stages=(Stage("generation", 0.1, 1.0),))
    assert set(figures_of([made])) == {"generation"}


def test_what_is_no_finite_number_is_no_figure() -> None:
    made = replace(run([1.0, math.nan, 3.0]), seconds=math.inf)
    found = figures_of([made, run([1.0, 2.0])])
    assert found["total"].values == (3.5,)
    assert found["denoising step"].values == (3.0, 2.0)
    assert found["denoising"].values == (3.0,)


def decoded(host: float, device: float | None) -> Run:
    facts = {} if device is None else {"device_seconds": device}
    decoding = Stage("latent_decoding", 0.0, host, facts=facts)
    around = Stage("generation", 0.0, 5.0, facts={"device_seconds": 4.0}, children=(decoding,))
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 5.0, stages=(around,))


def test_a_stage_goes_by_the_device_s_clock_where_all_runs_have_it() -> None:
    runs = [decoded(0.001, 2.0), decoded(0.002, 3.0)]
    figures = figures_of(runs, timed_on_device(runs))
    assert figures["latent_decoding"].values == (2.0, 3.0)
    assert figures["generation"].values == (5.0, 5.0)  # what is waited for


def test_a_run_without_the_device_s_clock_makes_the_host_s_that_of_all() -> None:
    runs = [decoded(0.001, 2.0), decoded(2.5, None)]
    assert figures_of(runs, timed_on_device(runs))["latent_decoding"].values == (0.001, 2.5)


def test_a_step_that_was_not_seen_to_finish_leaves_the_others_their_clock() -> None:
    runs = [queued(9.0, 0.5, 0.5, None), queued(9.0, 0.4, 0.6, 0.8)]
    assert figures_of(runs, timed_on_device(runs))["denoising step"].values == (0.5, 0.6)


def test_a_run_of_which_no_step_was_seen_to_finish_makes_the_host_s_clock_that_of_all() -> None:
    runs = [queued(9.0, 0.5, 0.5), queued(None, None, None)]
    assert figures_of(runs, timed_on_device(runs))["denoising step"].values == (0.001, 0.001)


def test_a_run_of_many_that_lacks_the_device_s_clock_is_left_out_and_counted() -> None:
    baseline = [decoded(0.001, 2.0)] * 5 + [decoded(9.0, None)]
    new = [decoded(0.001, 3.0)] * 6
    on_device = timed_on_device(new, baseline)
    figure = figures_of(baseline, on_device)["latent_decoding"]
    assert (figure.values, figure.untimed) == ((2.0,) * 5, 1)
    assert figures_of(new, on_device)["latent_decoding"].untimed == 0


@pytest.mark.parametrize(("timed", "untimed"), [(4, 1), (5, 2), (0, 6)])
def test_where_too_few_would_be_left_all_go_by_the_host_s_clock(timed: int, untimed: int) -> None:
    baseline = [decoded(0.001, 2.0)] * timed + [decoded(0.002, None)] * untimed
    new = [decoded(0.001, 2.0)] * 6
    figure = figures_of(baseline, timed_on_device(new, baseline))["latent_decoding"]
    assert figure.values == (0.001,) * timed + (0.002,) * untimed


def test_a_run_whose_steps_lack_the_device_s_clock_is_left_out_of_them_too() -> None:
    runs = [queued(9.0, 0.5, 0.5)] * 5 + [queued(None, None, None)]
    figure = figures_of(runs, timed_on_device(runs))["denoising step"]
    assert (figure.values, figure.untimed) == ((0.5,) * 5, 1)


def served(on_device: int) -> Run:
    """A generation in full after three that are folded, of which the accelerator timed some."""
    sums = {
        "generation": FoldedStages(3, 30.0, 12.0, device_seconds=27.0, timed_on_device=on_device),
        "generation/encode": FoldedStages(3, 6.0, 2.0),
        "generation/encode/encode": FoldedStages(3, 3.0, 1.0),
    }
    inner = Stage("encode", 40.0, 2.0)
    stages = (Stage("generation", 40.0, 8.0, facts={"device_seconds": 7.0}, children=(inner,)),)
    folded = Folded(1, 3, 0.0, 30.0, sums, PeakMemory(500, 9.0))
    return Run("id", "run", "2026-01-01T00:00:00+00:00", 48.0, stages=stages, folded=folded)


def test_folded_stages_are_in_the_sums_and_in_the_peak() -> None:
    figures = figures_of([served(3)])
    assert figures["generation"].values == (38.0,)
    assert figures["encode"].values == (8.0,)  # not twice inside itself
    assert figures["process peak"].values == (500.0,)


def test_folded_stages_go_by_the_device_s_clock_if_it_timed_them_all() -> None:
    figure = figures_of([served(3), served(2)], {"generation"})["generation"]
    assert (figure.values, figure.untimed) == ((34.0,), 1)
