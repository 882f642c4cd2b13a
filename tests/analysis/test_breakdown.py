"""Where a run's time went: rows by arithmetic on made records, and the sentence that a slow part gives."""

import math
from dataclasses import replace
from typing import Any

import pytest

from sigmascope.analysis.breakdown import headline, large_places, run_findings, time_breakdown
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import Finding, Folded, FoldedStages, Run, Stage, Steps


def run_of(*stages: Stage, seconds: float = 10.0, **more: Any) -> Run:
    return Run("1", "demo", "2026-01-02T03:04:05+00:00", seconds, stages=stages, **more)


def rows(run: Run) -> dict[str, Any]:
    return {row.label: pytest.approx(row.seconds) for row in time_breakdown(run)}


TWO_STEPS = Steps(started=(0.5, 2.5), seconds=(1.0, 1.0))
"""Half a second before the first, a second after each."""


def generation(denoising: Stage, **more: Any) -> Run:
    call = {"call": {"callback": "preview (generate.py:31)"}}
    text = Stage("text_encoding", 2.0, 1.0)
    return run_of(Stage("generation", 2.0, 6.0, children=(text, denoising), facts=call), **more)


def test_rows_divide_the_wall_time() -> None:
    run = generation(Stage("denoising", 3.0, 4.5, steps=TWO_STEPS))
    assert rows(run) == {
        "before the first stage": 2.0,
        "generation, the rest": 0.5,  # 6 − 1 − 4.5
        "text_encoding": 1.0,
        "denoising, the rest": 0.5,  # before the first step
        "denoising, steps": 2.0,
        "denoising, between steps": 2.0,  # 4.5 − 0.5 − 2
        "after the last stage": 2.0,
    }
    assert sum(row.seconds for row in time_breakdown(run)) == pytest.approx(run.seconds)


def test_the_scheduler_has_its_part_of_the_steps() -> None:
    run = generation(Stage("denoising", 3.0, 4.5, steps=TWO_STEPS, facts={"scheduler_seconds": 1.5}))
    assert rows(run)["denoising, steps"] == 0.5
    assert rows(run)["denoising, scheduler"] == 1.5
    assert sum(row.seconds for row in time_breakdown(run)) == pytest.approx(run.seconds)


def test_stages_of_one_name_in_others_are_told_apart() -> None:
    stages = [
        Stage(name, started, 4.0, children=(Stage("denoising", started, 4.0),))
        for name, started in (("base", 0.0), ("tuned", 5.0))
    ]
    assert rows(run_of(*stages)) == {
        "base: denoising": 4.0,
        "tuned: denoising": 4.0,
        "between stages": 1.0,
        "after the last stage": 1.0,
    }


def test_what_a_text_encoder_took_is_in_its_stage_and_what_lies_outside_it_is_said() -> None:
    encoder = Stage("text_encoder", 0.5, 1.0, facts={"component": "text_encoder"})
    run = run_of(Stage("text_encoding", 0.0, 8.0, children=(encoder,)))
    assert rows(run) == {"text_encoding": 8.0, "after the last stage": 2.0}
    assert headline(run) == (
        "80 % of 10.00 s went into text_encoding: 7.00 s of it outside its models, such as its tokenizer."
    )


def test_a_preview_inside_the_denoising_is_no_part_of_what_is_between_its_steps() -> None:
    preview = Stage("latent_decoding", 4.6, 0.75)
    run = generation(Stage("denoising", 3.0, 4.5, steps=TWO_STEPS, children=(preview,)))
    assert rows(run)["latent_decoding"] == 0.75
    assert rows(run)["denoising, between steps"] == 1.25


def test_the_devices_clock_counts_where_it_timed_the_steps() -> None:
    queued = Steps(started=(0.0, 0.1), seconds=(0.1, 0.1), gpu_seconds=(1.5, 1.5))
    denoising = Stage("denoising", 0.0, 0.2, steps=queued, facts={"device_seconds": 3.0})
    run = run_of(Stage("generation", 0.0, 10.0, children=(denoising,)))
    assert rows(run) == {"generation, the rest": 7.0, "denoising, steps": 3.0}


def test_stages_side_by_side_leave_nothing_outside_that_they_cover() -> None:
    run = run_of(Stage("one", 1.0, 5.0), Stage("two", 3.0, 5.0))
    assert rows(run) == {"before the first stage": 1.0, "one": 5.0, "two": 5.0, "after the last stage": 2.0}


@pytest.mark.parametrize(
    ("own", "before", "between", "after"),
    [((0.5, 0.25), 0.5, 1.75, 3.0), ((0.5, 2.5), 0.5, 0.0, 2.5), ((9.0, 9.0), 0.0, 0.0, 0.0)],
)
def test_what_the_watch_itself_took_is_told_apart(
    own: tuple[float, float], before: float, between: float, after: float
) -> None:
    run = run_of(Stage("one", 1.0, 1.0), Stage("two", 4.0, 3.0), facts={"watch_seconds": list(own)})
    expected = {
        "the watch itself": 10.0 - 4.0 - before - between - after,
        "before the first stage": before,
        "between stages": between,
        "after the last stage": after,
    }
    assert rows(run) == {"one": 1.0, "two": 3.0} | {name: value for name, value in expected.items() if value}


@pytest.mark.parametrize("noted", [[0.5], "0.5", [float("nan"), -1.0], None])
def test_a_damaged_note_of_the_watchs_own_time_is_passed_over(noted: Any) -> None:
    run = run_of(Stage("one", 1.0, 9.0), facts={"watch_seconds": noted})
    assert rows(run) == {"before the first stage": 1.0, "one": 9.0}


def test_folded_generations_are_in_their_rows() -> None:
    sums = {
        "generation": FoldedStages(3, 30.0, 12.0),
        "generation/denoising": FoldedStages(3, 24.0, 9.0, steps=60, step_seconds=21.0),
    }
    folded = Folded(1, 3, 0.0, 31.0, sums)
    last = Stage("denoising", 40.0, 8.0, steps=Steps((0.0,), (8.0,)))
    run = run_of(Stage("generation", 40.0, 10.0, children=(last,)), seconds=50.0, folded=folded)
    assert rows(run) == {
        "between stages": 10.0,  # 1 among the folded, 9 after them
        "generation, the rest": 8.0,  # 2, and 6
        "denoising, the rest": 3.0,
        "denoising, steps": 29.0,
    }
    steps = next(row for row in time_breakdown(run) if row.part == "steps")
    assert steps.count == 61


@pytest.mark.parametrize("damage", [{"seconds": float("nan")}, {"seconds": -1.0}])
def test_a_run_without_a_time_has_no_rows(damage: dict[str, float]) -> None:
    assert time_breakdown(run_of(Stage("denoising", 0.0, 1.0), **damage)) == ()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -3.0])
def test_a_stage_whose_time_is_none_adds_nothing(seconds: float) -> None:
    run = run_of(Stage("denoising", 0.0, seconds), Stage("latent_decoding", 1.0, 4.0))
    assert rows(run)["latent_decoding"] == 4.0
    assert "denoising" not in rows(run)


def test_the_headline_names_the_callback_with_its_place() -> None:
    steps = Steps(started=(0.0, 3.0), seconds=(0.25, 0.25))
    run = generation(Stage("denoising", 2.5, 5.25, steps=steps))
    assert headline(run) == (
        "Start 2.00 s (mostly loading); the generation 6.00 s, 79 % of it went into your callback preview "
        "(generate.py:31), 2.38 s after each of 2 steps."
    )


def test_a_script_s_start_and_its_generations_are_two_clauses() -> None:
    """Imports of 4.5 s, and two generations in which a callback takes most of the time."""
    first = generation(Stage("denoising", 4.6, 5.25, steps=Steps((0.0, 3.0), (0.25, 0.25)))).stages[0]
    stages = tuple(
        replace(first, started_seconds=started, seconds=seconds)
        for started, seconds in ((4.5, 6.0), (10.5, 6.5))
    )
    run = replace(run_of(*stages), seconds=17.0, facts={"imports": {"torch": 3.0, "diffusers": 1.5}})
    assert headline(run).startswith(
        "Start 4.50 s (mostly imports); each of 2 generations 6.25 s (6.00 s to 6.50 s), 76 % of it went into your "
        "callback preview (generate.py:31)"
    )


GB = 2**30


@pytest.mark.parametrize("where", ["process", "cuda:0"])
def test_memory_is_what_stays_and_what_a_generation_adds(where: str) -> None:
    """Before the generations 4 GB are in use, then 5; each adds 3 at its peak."""
    device = None if where == "process" else where
    stages = tuple(
        Stage("generation", started, 2.0, memory=in_use(before * GB, device), peak=peak(most * GB, device))
        for started, before, most in ((1.0, 4, 7), (3.0, 5, 8), (5.0, 5, 8))
    )
    assert headline(run_of(*stages)).endswith(
        "8 GB, in generation; 5 GB of it stays in use, each of 3 generations adds 3 GB."
    )


def test_memory_that_one_of_several_generations_adds_is_not_said_of_each() -> None:
    stages = tuple(
        Stage("generation", started, 2.0, memory=in_use(5 * GB, None), peak=peak(most * GB, None))
        for started, most in ((1.0, 8), (3.0, 5), (5.0, 5))
    )
    assert headline(run_of(*stages)).endswith("5 GB of it stays in use, one of 3 generations adds 3 GB.")


def test_memory_that_was_not_recorded_is_not_divided() -> None:
    stage = Stage("generation", 1.0, 2.0, peak=peak(8 * GB, None))
    assert headline(run_of(stage)).endswith("Peak of memory: 8 GB, in generation.")


def in_use(nbytes: int, device: str | None) -> MemoryImpact:
    accelerators = () if device is None else (AcceleratorMemory(device, allocated_bytes=nbytes),)
    snapshot = MemorySnapshot(process_rss_bytes=nbytes, accelerators=accelerators)
    return MemoryImpact(snapshot, snapshot)


def peak(nbytes: int, device: str | None) -> PeakMemory:
    if device is None:
        return PeakMemory(rss_bytes=nbytes)
    return PeakMemory(accelerators=(AcceleratorPeak(device, allocated_bytes=nbytes),))


def test_the_headline_names_imports_and_loading_before_all_stages() -> None:
    run = run_of(Stage("denoising", 7.0, 3.0))
    assert headline(run) == "70 % of 10.00 s passed before the first stage: imports and loading."


def test_a_failure_comes_before_all_times() -> None:
    inner = Stage("denoising", 2.0, 3.0, success=False, error="RuntimeError: size mismatch")
    outer = Stage(
        "generation", 0.0, 9.0, success=False, children=(inner,), error="RuntimeError: size mismatch"
    )
    fault = Finding("picture.black", "error", "All pictures are black.")
    assert (
        headline(run_of(outer, findings=(fault,)))
        == "denoising failed after 3.00 s: RuntimeError: size mismatch."
    )
    assert headline(run_of(Stage("generation", 0.0, 9.0), findings=(fault,))) == "All pictures are black."


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ((2,), "Generation 3 of 4: denoising failed after 3.00 s: ValueError: bad."),
        (
            (1, 2),
            "2 of 4 generations failed, the first of them number 2: denoising failed after 3.00 s: ValueError: bad.",
        ),
        (
            (0, 1, 2, 3),
            "4 of 4 generations failed, the first of them number 1: denoising failed after 3.00 s: ValueError: bad.",
        ),
    ],
)
def test_a_failure_in_a_series_says_which_it_was(fails: tuple[int, ...], says: str) -> None:
    failure: dict[str, Any] = {"success": False, "error": "ValueError: bad"}
    stages = []
    for number in range(4):
        how = failure if number in fails else {}
        inner = Stage("denoising", 4.0 * number, 3.0, **how)
        stages.append(Stage("generation", 4.0 * number, 3.0, children=(inner,), **how))
    series = run_of(*stages)
    assert headline(series) == says
    whole = run_of(*(Stage("generation", stage.started_seconds, 3.0) for stage in stages))
    assert what_changed([series], [whole]).headline.startswith(
        f"{len(fails)} of 4 generations failed (before: 0 of 4)."
    )
    assert "failed" not in what_changed([series], [series]).headline


@pytest.mark.parametrize(("apart", "is_beside"), [(1.0, True), (4.0, False)])
def test_calls_of_one_pipeline_at_the_same_time_are_named_where_a_scheduler_runs_out_of_steps(
    apart: float, is_beside: bool
) -> None:
    """diffusers 7851 and 3672, Qwen-Image 236: two requests at once, and both end in an IndexError."""
    failure: dict[str, Any] = {
        "success": False,
        "error": "IndexError: index 11 is out of bounds for dimension 0 with size 11",
    }
    stages = [
        Stage("generation", at, 3.0, children=(Stage("denoising", at, 3.0, **failure),), **failure)
        for at in (0.0, apart)
    ]
    said = headline(run_of(*stages))
    assert (
        "another generation ran at the same time, and a scheduler that both use counts the steps" in said
    ) is is_beside
    other = {**failure, "error": "ValueError: bad"}
    assert "at the same time" not in headline(
        run_of(*(Stage("generation", at, 3.0, **other) for at in (0.0, 1.0)))
    )


def test_what_was_interrupted_is_not_said_to_have_failed() -> None:
    stopped: dict[str, Any] = {"success": False, "error": "KeyboardInterrupt"}
    run = run_of(
        Stage("generation", 0.0, 3.0, children=(Stage("denoising", 0.0, 2.0, **stopped),), **stopped)
    )
    assert headline(run).startswith("denoising was interrupted after 2.00 s: KeyboardInterrupt.")


def test_an_attempt_that_failed_in_a_stage_that_went_well_is_no_failure() -> None:
    attempt = Stage("direct", 0.0, 1.0, success=False, error="OutOfMemoryError: 8 GB")
    run = run_of(Stage("latent_decoding", 0.0, 9.0, children=(attempt,)))
    assert headline(run) == "90 % of 10.00 s went into latent_decoding."


def test_what_could_be_saved_is_said_from_a_quarter_of_the_time_on() -> None:
    finding = Finding(
        "time.first_step_compiles",
        "info",
        "The first step took 6.00 s, the others 1.00 s.",
        {"gain_seconds": 5.0},
    )
    stages = Stage("denoising", 0.0, 10.0, steps=Steps((0.0, 6.0), (6.0, 4.0)))
    assert headline(run_of(stages, findings=(finding,))) == (
        "50 % of 10.00 s could be saved. The first step took 6.00 s, the others 1.00 s."
    )
    small = Finding(finding.id, "info", finding.message, {"gain_seconds": 2.0})
    assert headline(run_of(stages, findings=(small,))).startswith(
        "100 % of 10.00 s went into denoising: 2 steps"
    )


def test_the_highest_memory_is_the_devices_where_there_is_one() -> None:
    peak = PeakMemory(3 * 2**30, 0.5, accelerators=(AcceleratorPeak("cuda:0", 2**30, 0.5),))
    run = run_of(Stage("latent_decoding", 0.0, 10.0, peak=peak, facts={"component": "vae"}))
    assert headline(run).endswith("Peak of cuda:0: 1 GB, in latent_decoding (vae).")


def test_of_findings_on_the_series_by_one_rule_the_one_that_costs_most_leads() -> None:
    few, many = (
        Finding("series.slows_down", "warning", f"{name} became slower.", {"gain_seconds": gain})
        for name, gain in (("Small pictures", 1.0), ("Large pictures", 3.0))
    )
    run = Run("1", "", "", 20.0, stages=(Stage("denoising", 0.0, 20.0),), findings=(many, few))
    assert headline(run).startswith("Large pictures became slower. ")
    assert headline(replace(run, findings=(few, many))).startswith("Large pictures became slower. ")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_nothing_could_be_saved_of_a_time_that_is_not_known(seconds: float) -> None:
    finding = Finding("a", "info", "A.", {"gain_seconds": 1.0})
    run = Run("1", "", "", seconds, stages=(Stage("denoising", 0.0, 2.0),), findings=(finding,))
    assert headline(run) == "How long it took is not known: the record holds no valid time."


def test_no_rule_on_times_judges_a_generation_that_has_no_valid_one() -> None:
    steps = Steps((0.0, 0.3), (0.3, 0.3))
    denoising, decoding = Stage("denoising", 0.0, 0.6, steps=steps), Stage("latent_decoding", 0.6, 0.4)
    for seconds, ids in ((1.0, {"time.vae_share"}), (math.nan, set())):
        made = Stage("generation", 0.0, seconds, children=(denoising, decoding), facts={"call": {}})
        assert {finding.id for finding in diagnose(run_of(made, seconds=seconds))} == ids


def test_findings_come_once_the_gravest_first_then_those_with_most_to_gain() -> None:
    twice = Finding("a", "info", "A.", {"gain_seconds": 1.0})
    more = Finding("b", "info", "B.", {"gain_seconds": 2.0})
    grave = Finding("c", "error", "C.")
    run = run_of(Stage("denoising", 0.0, 1.0, findings=(twice, grave)), findings=(twice, more))
    assert [finding.id for finding in run_findings(run)] == ["c", "b", "a"]


def test_a_run_without_stages_says_so() -> None:
    assert headline(run_of()) == "Nothing was recorded: no stage was opened."
    launcher = replace(run_of(), facts={"children_cpu_seconds": 12.0})
    assert headline(launcher) == (
        "Nothing was recorded in this process: no stage was opened. Its child processes used 12.00 s of processor time; each "
        "needs a watch of its own."
    )


def stacks(*places: tuple[str, str, str, float]) -> dict[str, Any]:
    kept = [
        {
            "stage": stage,
            "part": part,
            "function": function,
            "file": "script.py",
            "line": 12,
            "seconds": seconds,
            "samples": 9,
        }
        for stage, part, function, seconds in places
    ]
    return {"host_stacks": {"samples": 99, "cost_seconds": 0.01, "cost_share": 0.001, "places": kept}}


OUTSIDE = ("before the first stage", "outside stages")


def places_of(run: Run) -> dict[str, list[tuple[str, Any]]]:
    return {
        row.label: [(place.label, pytest.approx(place.seconds)) for place in row.places]
        for row in time_breakdown(run)
        if row.places
    }


def test_places_lie_under_the_rows_that_nothing_else_explains() -> None:
    seen = stacks(
        (*OUTSIDE, "main", 0.5),
        (*OUTSIDE, "read_image", 1.0),
        ("generation", "stage", "convert", 0.25),
        (
            "generation/text_encoding",
            "stage",
            "tokenize",
            0.75,
        ),  # it has a row of its own that says what it is
        ("generation/denoising", "between steps", "preview", 1.5),
        ("generation/denoising", "stage", "", 0.25),
        ("gone", "stage", "nowhere", 1.0),
    )
    assert places_of(generation(Stage("denoising", 3.0, 4.5, steps=TWO_STEPS), facts=seen)) == {
        "before the first stage": [("read_image (script.py:12)", 1.0), ("main (script.py:12)", 0.5)],
        "generation, the rest": [("convert (script.py:12)", 0.25)],
        "denoising, between steps": [("preview (script.py:12)", 1.5)],
        "denoising, the rest": [("script.py:12", 0.25)],
    }


def test_places_take_no_longer_than_their_row() -> None:
    run = run_of(Stage("denoising", 2.0, 8.0), facts=stacks((*OUTSIDE, "a", 3.0), (*OUTSIDE, "b", 1.0)))
    assert places_of(run) == {
        "before the first stage": [("a (script.py:12)", 1.5), ("b (script.py:12)", 0.5)]
    }


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 0.0])
def test_a_place_without_a_time_is_left_out(seconds: float) -> None:
    assert places_of(run_of(Stage("denoising", 2.0, 8.0), facts=stacks((*OUTSIDE, "a", seconds)))) == {}


def test_a_stage_that_somebody_named_has_places_too() -> None:
    run = run_of(Stage("upload", 0.0, 10.0), facts=stacks(("upload", "stage", "send", 8.0)))
    assert headline(run) == "100 % of 10.00 s went into upload; 8.00 s of it in send (script.py:12)."


def test_the_headline_names_a_place_with_a_quarter_of_the_longest_row() -> None:
    stage = Stage("denoising", 8.0, 2.0)
    said = "80 % of 10.00 s passed before the first stage: imports and loading"
    assert headline(run_of(stage, facts=stacks((*OUTSIDE, "read", 1.9)))) == f"{said}."
    assert headline(run_of(stage, facts=stacks((*OUTSIDE, "read", 2.1)))) == (
        f"{said}; 2.10 s of it in read (script.py:12)."
    )


def test_a_place_that_is_longer_than_each_row_is_the_headline() -> None:
    seen = stacks((*OUTSIDE, "read", 2.9), ("after the last stage", "outside stages", "read", 2.9))
    run = run_of(Stage("denoising", 3.0, 4.0), facts=seen)
    assert headline(run) == (
        "58 % of 10.00 s went into read (script.py:12), outside of what the rows explain."
    )


def test_small_places_are_not_shown() -> None:
    seen = stacks(
        *[(*OUTSIDE, name, seconds) for name, seconds in zip("abcd", (1.0, 0.9, 0.8, 0.7), strict=True)]
    )
    run = run_of(Stage("denoising", 5.0, 5.0), facts=seen)
    (row,) = [row for row in time_breakdown(run) if row.places]
    assert [place.function for place in large_places(row, run)] == ["a", "b", "c"]
    few = run_of(Stage("denoising", 5.0, 5.0), facts=stacks((*OUTSIDE, "a", 0.04)))
    assert large_places(time_breakdown(few)[0], few) == []


PACKAGES = {"torch": 3.0, "diffusers": 2.0, "mine": 0.5, "numpy": 0.25}


def test_imports_have_a_row_and_the_script_s_own_loading_another() -> None:
    facts = {"imports": PACKAGES, "watch_seconds": [0.25, 0.0]}
    run = run_of(Stage("denoising", 8.0, 2.0), facts=facts)
    assert rows(run) == {
        "the watch itself": 0.25,
        "imports": 5.75,
        "before the first stage": 2.0,
        "denoising": 2.0,
    }
    assert headline(run) == "58 % of 10.00 s went into imports: torch 3.00 s, diffusers 2.00 s, mine 500 ms."


def test_loading_is_the_script_s_own_where_imports_are_known() -> None:
    run = run_of(Stage("denoising", 8.0, 2.0), facts={"imports": {"torch": 1.0}})
    assert headline(run) == "70 % of 10.00 s passed before the first stage: the script's own loading."


def test_imports_take_no_longer_than_what_was_before_the_first_stage() -> None:
    run = run_of(Stage("denoising", 1.0, 9.0), facts={"imports": PACKAGES})
    assert rows(run) == {"imports": 1.0, "denoising": 9.0}


@pytest.mark.parametrize("noted", ["torch", [1.0], {"torch": "3"}, {"torch": float("nan")}, {"torch": -1.0}])
def test_a_damaged_note_of_imports_is_passed_over(noted: Any) -> None:
    assert rows(run_of(Stage("one", 1.0, 9.0), facts={"imports": noted})) == {
        "before the first stage": 1.0,
        "one": 9.0,
    }


def test_a_place_that_imports_is_in_the_row_of_imports() -> None:
    seen = stacks((*OUTSIDE, "import", 1.0), (*OUTSIDE, "read", 0.5))
    stage = Stage("denoising", 2.0, 8.0)
    both = [("import (script.py:12)", 1.0), ("read (script.py:12)", 0.5)]
    assert places_of(run_of(stage, facts=seen)) == {"before the first stage": both}
    assert places_of(run_of(stage, facts={**seen, "imports": {"torch": 1.0}})) == {
        "before the first stage": both[1:]
    }


def test_a_run_that_took_no_time_says_so() -> None:
    assert (
        headline(Run("1", "", "2026-03-01T10:00:00+00:00", 0.0, stages=(Stage("x", 0.0, 0.0),)))
        == "It took 0.00 s."
    )
