"""Generations of one run, judged as a series, on records with the figures of public reports."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from tests.analysis.faulty_runs import component, pipeline
from tests.analysis.series import found, generation, series

from sigmascope.analysis.breakdown import headline, time_breakdown, times_in_words
from sigmascope.records.run import Run, Stage, Steps
from sigmascope.records.serialization import to_plain
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
    calm = [generation(8.0 * at, [0.4] * 8, waited_seconds=0.0) for at in range(9 - slow)]
    late = [generation(8.0 * at, [0.9] * 8, waited_seconds=4.2) for at in range(9 - slow, 9)]
    assert "series.slows_down" not in found(series(*calm, *late))
    own = [generation(8.0 * at, [0.9] * 8, waited_seconds=0.2) for at in range(9 - slow, 9)]
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


def test_what_is_otherwise_since_steps_became_slower_is_named() -> None:
    """The record holds each generation's recipe: a LoRA, offloading, another number format."""
    mixed: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("transformer offload none → sequential", {}, {"offload": "sequential"}),
        (
            "transformer layerwise_casting False → True",
            {"layerwise_casting": False},
            {"layerwise_casting": True},
        ),
    ]
    for words, before, since in mixed:
        run = series(
            *(
                generation(9.0 * i, [0.6 if i > 2 else 0.2] * 10, denoiser=since if i > 2 else before)
                for i in range(6)
            )
        )
        said = headline(run)
        assert said.startswith(
            "Steps became slower after generation 3 of 6 generations of the same size: 200 ms before"
        )
        assert f"(3.00 × as long); {words} may explain it." in said
    assert "generations of the same work" in headline(
        series(*(generation(9.0 * i, [0.6 if i > 2 else 0.2] * 10) for i in range(6)))
    )


def with_loras(stage: Stage, *names: str) -> Stage:
    loras = {f"transformer.{name}": {"strength": [1.0], "active": 9, "layers": 9} for name in names}
    return replace(stage, facts={**stage.facts, "recipe": {"loras": loras}})


def test_a_lora_more_in_each_generation_explains_that_steps_creep_up() -> None:
    run = series(*(with_loras(generation(9.0 * i, [0.2 + 0.04 * i] * 10), *"abcdefgh"[:i]) for i in range(8)))
    assert "(+140 %); LoRAs none → transformer.a, transformer.b" in headline(run)
    prompts = series(*(generation(9.0 * i, [0.2 + 0.04 * i] * 10) for i in range(8)))
    assert "may explain it" not in headline(prompts)


def test_what_compiles_again_with_each_lora_is_named() -> None:
    run = series(
        *(
            with_loras(generation(70.0 * i, [60.0, *[0.9] * 4], compiled=True), name)
            for i, name in enumerate("abc")
        )
    )
    assert "each change of LoRAs is compiled again" in headline(run)


@pytest.mark.parametrize("name", ["latent_decoding", "text_encoding"])
def test_a_part_that_is_slow_the_first_time_is_told_apart(name: str) -> None:
    times = (25.0, 0.3, 0.31, 0.29)
    run = renamed(
        series(*(generation(9.0 * i, [0.2] * 10, other=time) for i, time in enumerate(times))), name
    )
    told = found(run)["series.stage_is_slow_at_first"]
    assert told.message == f"{name} took 25.00 s in generation 1 of 4, and 300 ms since."
    assert told.severity == "info"
    assert told.evidence["gain_seconds"] == pytest.approx(24.7)
    assert "73 % of 33.90 s could be saved" in headline(run)


def renamed(run: Run, name: str) -> Run:
    """With the stage beside the denoising under another name."""
    stages = [
        replace(stage, children=(stage.children[0], replace(stage.children[1], name=name)))
        for stage in run.stages
    ]
    return series(*stages)


@pytest.mark.parametrize(
    ("heights", "times"),
    [
        ((512, 640, 768, 896), (1.0, 2.0, 4.0, 8.0)),  # larger pictures take longer
        ((512, 512, 768, 768), (1.0, 1.1, 2.5, 2.4)),
        ((512, 512, 512, 512), (0.5, 0.5, 9.0, 0.5)),  # one alone
    ],
)
def test_decoding_that_takes_long_for_another_reason_is_not_called_slow_at_first(
    heights: Sequence[int], times: Sequence[float]
) -> None:
    run = series(
        *(
            generation(9.0 * i, [0.2] * 10, height=height, other=time)
            for i, (height, time) in enumerate(zip(heights, times, strict=True))
        )
    )
    assert "series.stage_is_slow_at_first" not in found(run)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_decoding_that_waited_for_a_processor_at_first_is_not_accused_unless_it_compiles(
    compiled: bool,
) -> None:
    busy = {"processor": {"own_seconds": 1.0, "waited_seconds": 8.0, "throttled_seconds": 0.0}}
    made = to_plain(pipeline(transformer=component("denoiser"), vae=component("vae", compiled=compiled)))
    stages = []
    for number in range(4):
        stage = generation(9.0 * number, [0.2] * 10, other=0.3 if number else 9.0)
        decoding = stage.children[1] if number else replace(stage.children[1], facts=busy)
        facts = {**stage.facts, "pipeline": made}
        stages.append(replace(stage, children=(stage.children[0], decoding), facts=facts))
    told = [
        finding.message
        for finding in series(*stages).findings
        if finding.id == "series.stage_is_slow_at_first"
    ]
    expected = (
        "latent_decoding took 9.00 s in generation 1 of 4, and 300 ms since: torch.compile compiles in it."
    )
    assert told == ([expected] if compiled else [])


def test_a_part_that_takes_longer_each_time_is_said() -> None:
    run = series(*(generation(9.0 * i, [0.1] * 20, other=0.5 + 0.4 * i) for i in range(8)))
    said = headline(run)
    assert said.startswith(
        "latent_decoding took longer from generation to generation: 500 ms in the first of 8, 3.30 s in the last."
    )
    even = series(*(generation(9.0 * i, [0.1] * 20, other=0.5 + 0.04 * (i % 3)) for i in range(8)))
    assert "series.part_slows_down" not in found(even)


@pytest.mark.parametrize(
    ("callback", "who"),
    [
        ("preview (a.py:3)", "Your callback preview (a.py:3)"),
        (None, "What lies between the steps of denoising"),
    ],
)
def test_a_callback_that_takes_longer_each_time_is_said(callback: str | None, who: str) -> None:
    stages = []
    for number in range(8):
        stage, gap = generation(9.0 * number, [0.1] * 10), 0.02 + 0.05 * number
        started = tuple((0.1 + gap) * step for step in range(10))
        denoising = replace(stage.children[0], seconds=10 * (0.1 + gap), steps=Steps(started, (0.1,) * 10))
        call = {**stage.facts["call"], "callback": callback}
        facts = {**stage.facts, "call": call}
        stages.append(
            replace(
                stage, seconds=denoising.seconds + 0.1, children=(denoising, stage.children[1]), facts=facts
            )
        )
    assert headline(series(*stages)).startswith(
        f"{who} took longer from generation to generation: 200 ms in the first of 8, 3.70 s in the last."
    )


@pytest.mark.parametrize(
    ("second", "said"), [(0.0114, "237 ms and 11.4 ms"), (0.2, "2 × 218 ms")], ids=["far apart", "alike"]
)
def test_of_two_stages_that_are_far_apart_both_are_told(second: float, said: str) -> None:
    """Such as a LoRA's loading and the setting of its strength."""
    run = series(Stage("lora_application", 0.0, 0.237), Stage("lora_application", 1.0, second))
    (row,) = (row for row in time_breakdown(run) if row.label == "lora_application")
    assert times_in_words(row) == said
