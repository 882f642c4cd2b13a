"""Public reports of slowness and growth, rebuilt by their figures: the first sentence says what was the matter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.analysis.faulty_runs import component, pipeline, weights
from tests.analysis.run_sets import of_parts
from tests.analysis.series import found, generation, series

from sigmascope.analysis.breakdown import headline
from sigmascope.analysis.diagnostics import diagnose
from sigmascope.analysis.run_comparison import check_regression
from sigmascope.analysis.what_changed import what_changed
from sigmascope.records.run import IMPORTS, AttentionFacts, HostFacts, Run, Stage
from sigmascope.records.serialization import to_plain

MIB = 2**20


def first_sentence(text: str) -> str:
    return text.split(". ")[0]


def runs_of(
    step: float, count: int, *, libraries: Mapping[str, str], denoiser: Mapping[str, Any] | None = None
) -> list[Run]:
    """Three runs of one generation with steps of these seconds, each a little longer than the one before."""
    return [
        replace(
            series(generation(0.0, [step * (1 + 0.002 * number)] * count, denoiser=denoiser or {})),
            host=HostFacts(libraries=libraries),
        )
        for number in range(3)
    ]


THE_SAME = {"diffusers": "0.12.1"}


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        pytest.param(
            runs_of(1 / 16, 20, libraries={"diffusers": "0.25.1"}),
            runs_of(1 / 8, 20, libraries={"diffusers": "0.29.2"}),
            "diffusers 0.25.1 → 0.29.2",
            id="diffusers 8880: half as fast since an update",
        ),
        pytest.param(
            runs_of(1 / 3.9, 28, libraries={"diffusers": "0.33.1", "peft": "0.14.0"}),
            runs_of(1 / 2.9, 28, libraries={"diffusers": "0.35.0", "peft": "0.17.0"}),
            "diffusers 0.33.1 → 0.35.0 and peft 0.14.0 → 0.17.0",
            id="diffusers 12131: slower with a LoRA since an update of two",
        ),
        pytest.param(
            runs_of(1 / 6, 50, libraries=THE_SAME),
            runs_of(1 / 2, 50, libraries=THE_SAME, denoiser={"offload": "sequential"}),
            "transformer offload none → sequential",
            id="diffusers 2266: a third as fast with sequential offload",
        ),
        pytest.param(
            runs_of(10 / 50, 50, libraries=THE_SAME, denoiser={"module": weights(dtype="float16")}),
            runs_of(40 / 50, 50, libraries=THE_SAME, denoiser={"module": weights(dtype="float32")}),
            "transformer dtype float16 → float32",
            id="Leffa 34: 40 s instead of 10 s since the weights are float32",
        ),
    ],
)  # fmt: skip
def test_what_made_it_slower_is_named_at_once(before: Sequence[Run], now: Sequence[Run], words: str) -> None:
    said = first_sentence(what_changed(now, before).headline)
    assert "× as long" in said
    assert words in said
    assert "nothing in the recipe" not in said


def test_memory_that_stays_with_each_lora_is_said() -> None:
    """diffusers 8532: loading and unloading a LoRA leaves 12.6 MiB each time, from 6,730 MiB on."""
    at = [int((6730.1 + 12.6 * number) * MIB) for number in range(11)]
    run = series(*(generation(2.0 * i, [0.3] * 4, rss=(at[i], at[i + 1])) for i in range(10)))
    assert "Memory of the process grows by 12.6 MB each call" in first_sentence(headline(run))


def test_attention_that_a_lora_replaced_is_named() -> None:
    """diffusers 2247: a LoRA took the place of xformers' attention, and each step takes longer."""
    sides = []
    for step, kind in ((0.15, "XFormersAttnProcessor"), (0.4, "LoRACrossAttnProcessor")):
        made = pipeline(attention=AttentionFacts({kind: 32}), unet=component("denoiser"))
        runs = runs_of(step, 50, libraries=THE_SAME)
        of_each = [
            replace(run.stages[0], facts={**run.stages[0].facts, "pipeline": to_plain(made)}) for run in runs
        ]
        sides.append([replace(run, stages=(stage,)) for run, stage in zip(runs, of_each, strict=True)])
    said = first_sentence(what_changed(sides[1], sides[0]).headline)
    assert "attention processors XFormersAttnProcessor → LoRACrossAttnProcessor may explain it" in said


def loading(seconds: Sequence[float], method: str = "load_lora_weights") -> Run:
    """LoRAs that are put on one after another, and a generation."""
    at = [sum(seconds[:number], 0.0) for number in range(len(seconds))]
    stages = [
        Stage("lora_application", begun, taken, facts={"method": method})
        for begun, taken in zip(at, seconds, strict=True)
    ]
    run = series(generation(sum(seconds), [0.3] * 20))
    run = replace(run, stages=(*stages, *run.stages), seconds=run.seconds + sum(seconds))
    return replace(run, findings=diagnose(run))


def test_loras_that_take_longer_to_load_each_time_are_said() -> None:
    """diffusers 9297, 11816: ten LoRAs, the first in 1.2 s; those that are there already make the next one slower."""
    said = headline(loading([1.22 + 0.45 * number for number in range(10)]))
    assert said.startswith("53 % of 38.55 s could be saved. load_lora_weights took longer each time: 1.22 s")
    assert "5.27 s in the last" in said
    even = headline(loading([1.22, 1.31, 1.18, 1.25, 1.29, 1.2, 1.33, 1.19, 1.24, 1.27]))
    assert "took longer each time" not in even


def test_each_generation_that_is_slower_than_the_last_is_said() -> None:
    """diffusers 1807: in thirty generations of twenty steps the speed drops with each, though no memory leaks."""
    usual = [0.05 * (1 + 0.02 * number) for number in range(30)]
    run = series(*(generation(3.0 * i, [seconds] * 20) for i, seconds in enumerate(usual)))
    assert "Steps became slower from generation to generation" in first_sentence(headline(run))


@pytest.mark.parametrize("count", [2, 3])
def test_a_pipeline_that_is_slower_when_it_is_used_again_says_so(count: int) -> None:
    """diffusers 10705: the same call takes 8 minutes at first and 30 minutes from then on; steps lie in 30 each."""
    run = series(*(generation(1800.0 * i, [60.0 if i else 16.0] * 30) for i in range(count)))
    said = headline(run)
    assert "Steps became slower after the first" in first_sentence(said)
    assert "16.00 s in it, 60.00 s since" in said
    assert "38.00 s" not in said
    alike = series(*(generation(500.0 * i, [16.0 + i] * 30) for i in range(count)))
    assert "became slower" not in headline(alike)


@pytest.mark.parametrize("count", [3, 6])
def test_a_first_generation_that_alone_has_the_usual_speed_is_said(count: int) -> None:
    """InvokeAI 7503: the first generation has the usual speed, every later one takes double, until the next restart."""
    run = series(*(generation(25.0 * i, [2.0 if i else 1.0] * 10) for i in range(count)))
    said = headline(run)
    assert f"Steps became slower after the first of {count} generations" in first_sentence(said)
    assert "1.00 s in it, 2.00 s since (2.00 × as long)" in said


@pytest.mark.parametrize(
    ("pause", "words"), [(90.0, " and a pause of 90.00 s:"), (1.0, " of the same work:")]
)
def test_steps_that_are_slower_from_one_generation_on_are_said(pause: float, words: str) -> None:
    """InvokeAI 7555: hundreds of generations of 12 s; after a break of one or two minutes each takes a minute."""
    before = [generation(13.0 * i, [0.58 + 0.01 * (i % 3)] * 20) for i in range(20)]
    began = 13.0 * 19 + before[-1].seconds + pause
    since = [generation(began + 62.0 * i, [3.0] * 20) for i in range(3)]
    said = headline(series(*before, *since))
    assert "Steps became slower after generation 20 of 23 generations of the same work" in first_sentence(
        said
    )
    assert words in said
    assert "590 ms before, 3.00 s since" in said


def test_steps_that_become_slower_and_slower_are_a_drift_and_no_jump() -> None:
    run = series(*(generation(100.0 * i, [1.0 + i] * 10) for i in range(8)))
    assert "Steps became slower from generation to generation" in headline(run)


def test_one_slow_generation_at_the_end_is_no_jump() -> None:
    run = series(*(generation(50.0 * i, [5.0 if i == 7 else 1.0] * 10) for i in range(8)))
    assert "became slower" not in headline(run)


def test_a_model_that_compiles_again_with_each_lora_is_said() -> None:
    """diffusers 9279: a compiled transformer at one size, another LoRA before each call."""
    firsts = (61.0, 58.0, 63.0)
    run = series(
        *(generation(70.0 * i, [first, *[0.9] * 4], compiled=True) for i, first in enumerate(firsts))
    )
    said = headline(run)
    assert "The first step took 58.00 s to 63.00 s in 3 of 3 generations" in first_sentence(said)
    assert "not kept from one generation to the next" in first_sentence(said)


def test_a_pipeline_that_is_slower_from_its_second_use_on_says_so_by_half() -> None:
    """ComfyUI 3426: 64 steps at 4.73 a second, and in the queue behind it at 2.07, 2.03 and so on."""
    rates = (4.73, 2.07, 2.03, 2.05)
    run = series(*(generation(40.0 * i, [1 / rate] * 64) for i, rate in enumerate(rates)))
    said = headline(run)
    assert "Steps became slower after the first" in first_sentence(said)
    assert "211 ms in it, 488 ms since" in said


def test_a_second_that_every_ten_pictures_cost_more_is_said() -> None:
    """stable-diffusion-webui 10812: 20 steps in 4.25 s, after ten renders in 5 s, after twenty in 6 s: a staircase."""
    steps = [(4.25, 5.0, 6.0, 7.0, 8.0)[number // 10] / 20 for number in range(50)]
    run = series(*(generation(9.0 * i, [seconds] * 20) for i, seconds in enumerate(steps)))
    assert "212 ms in the first of 50, 400 ms in the last" in first_sentence(headline(run))


def test_a_first_generation_whose_steps_are_all_slow_is_told_from_the_others() -> None:
    """ComfyUI 4266: the first picture takes 40 minutes, 78 s a step, and each one after it 45 s."""
    slow, usual = [77.98] * 30, [1.1] * 40
    run = series(*(generation(4000.0 * i, slow if i == 0 else usual) for i in range(4)))
    said = headline(run)
    assert "All steps of the first of 4 generations of the same work were slow" in first_sentence(said)
    assert "77.98 s each, 1.10 s since" in said
    alone = series(generation(0.0, slow))
    assert "were slow" not in headline(alone)
    warm = series(*(generation(50.0 * i, [9.0, *usual] if i == 0 else usual) for i in range(4)))
    assert "were slow" not in headline(warm)


def test_what_a_start_script_sets_explains_what_lies_beside_the_steps() -> None:
    """InvokeAI 6007: 2.9 steps a second both ways, but 10 s more around them when started by its script."""
    sides = []
    for other, variable in ((1.0, {}), (11.0, {"MALLOC_MMAP_THRESHOLD_": "1048576"})):
        made = generation(0.0, [1 / 2.9] * 30, other=other)
        recipe = {"surroundings": {"train mode": "none", **variable}}
        sides.append(series(replace(made, facts={**made.facts, "recipe": recipe})))
    said = first_sentence(what_changed(sides[1:], sides[:1]).headline)
    assert "10.00 s more in latent_decoding" in said
    assert "MALLOC_MMAP_THRESHOLD_ not set → 1048576 may explain it" in said


def test_a_script_that_imports_for_most_of_its_time_has_a_start_of_its_own() -> None:
    """diffusers 3338: importing takes 13 to 15 s in a container."""
    run = replace(series(generation(14.2, [0.2] * 20)), seconds=18.4, facts={IMPORTS: {"diffusers": 13.8}})
    assert headline(run).startswith(
        "Start 14.20 s (mostly imports); the generation 4.10 s, 98 % of it went into denoising"
    )


def test_what_saves_the_pictures_is_said_to_take_the_time() -> None:
    """stable-diffusion-webui 10000: the picture is there, and saving it takes another 45 s."""
    run = replace(series(generation(0.0, [0.2] * 20)), seconds=49.1)
    assert first_sentence(headline(run)).startswith("92 % of 49.10 s passed after the last stage: saving")


def test_memory_that_rises_by_fits_and_starts_is_said() -> None:
    """stable-diffusion-webui 6068: 12.1 GiB in use after the first picture, 19.5 after the seventh, by no even steps."""
    gib = [8.7, 12.1, 13.9, 15.5, 15.5, 17.2, 18.8, 19.5]
    at = [int(size * 1024 * MIB) for size in gib]
    run = series(*(generation(6.1 * i, [0.3] * 20, rss=(at[i], at[i + 1])) for i in range(7)))
    assert headline(run).startswith("Memory of the process grows by 1.6 GB each call, over 6 calls.")
    sizes = [
        replace(stage, facts={**stage.facts, "call": {"height": 512 + 64 * i}})
        for i, stage in enumerate(run.stages)
    ]
    assert "grows" not in headline(series(*sizes))


def test_memory_that_each_step_keeps_is_said_with_its_usual_cause() -> None:
    """FRESCO 48: more memory with each call of the denoiser in a loop of one's own, for want of `torch.no_grad`."""
    made = generation(0.0, [0.3] * 20)
    denoising = made.children[0]
    rss = tuple((2_000 + 310 * step) * MIB for step in range(20))
    kept = replace(denoising, steps=replace(denoising.steps, rss_bytes=rss))
    run = series(replace(made, children=(kept, *made.children[1:])))
    assert first_sentence(headline(run)) == "Memory of the process grows by 310 MB each step, over 15 steps"
    assert "missing no_grad" in str(found(run)["memory_leak"].advice)


def test_a_container_that_is_held_back_by_its_quota_is_named() -> None:
    """ollama 17916: eight threads in four processors' worth of quota, throttled in 3115 of 4567 periods of 0.1 s."""
    held_back = generation(0.0, [22.8] * 20, own_seconds=1820.0, waited_seconds=10.0, throttled_seconds=311.5)
    run = series(held_back)
    assert first_sentence(headline(run)) == (
        "The run waited for a processor for 70 % of 456 s: the quota of its control group held it back for 312 s"
    )
    assert "use fewer threads" in str(found(run)["time.waited_for_processor"].advice)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        pytest.param(
            {512: (20.0, 0.5), 640: (21.0, 0.5), 768: (22.0, 0.5)},
            "latent_decoding took 20.00 s to 22.00 s the first time at each new height (512, 640, 768), and 500 ms when that came again",
            id="InvokeAI 7976: each new resolution is decoded slowly once",
        ),
        pytest.param(
            {1280: (37 * 60.0, 10.0, 5.0)},
            "latent_decoding took 2,220 s in generation 1 of 3, and 7.50 s since",
            id="TheRock 2591: the first decoding of a size takes 37 minutes, later ones 5 to 10 s",
        ),
    ],
)  # fmt: skip
def test_a_decoding_that_is_tuned_for_each_size_is_said(
    times: Mapping[int, Sequence[float]], words: str
) -> None:
    """Also unsloth 11636: `cudnn.benchmark` lets MIOpen search for 10 to 23 minutes at each new size."""
    stages = [
        generation(0.0, [0.4] * 20, height=height, other=seconds)
        for height, of_height in times.items()
        for seconds in of_height
    ]
    said = headline(series(*stages)).split(" could be saved. ")
    assert said[1].startswith(f"{words}.")


def test_infomap_943_two_blocks_a_side_accuse_nothing_that_one_block_shows() -> None:
    """infomap 943: unchanged code, measured in blocks of 3.86 s before and 4.52 s now, and again of 4.18 s and 4.26 s.

    Within a block runs differ by 1 %. One block a side cannot know of the other, but that all parts are slower alike is told.
    """
    first, second = (
        [_block(median, minute) for median, minute in sides]
        for sides in (((3.855, 0), (4.523, 10)), ((4.183, 20), (4.261, 30)))
    )
    assert what_changed(first[1], first[0]).headline.endswith("all parts are alike, as on a slower machine.")
    assert not check_regression(second[1], second[0]).regressed
    taken_in_turns = [[*first[side], *second[side]] for side in (1, 0)]
    assert not check_regression(*taken_in_turns).regressed
    assert what_changed(*taken_in_turns).headline.endswith("let the sides take turns.")


def _block(median: float, minute: int) -> list[Run]:
    """Five runs, a third of them in the decoding."""
    return [
        of_parts(
            {"denoising": [median * spread / 6] * 4, "latent_decoding": median * spread / 3},
            minute=minute + number,
        )
        for number, spread in enumerate((1.0, 0.99, 1.01, 0.995, 1.005))
    ]
