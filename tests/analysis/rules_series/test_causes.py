"""What a series is said to suffer from, where something else than the usual is the cause."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.analysis.faulty_runs import component, pipeline, weights
from tests.analysis.series import found, generation, series

from sigmascope.analysis.breakdown import headline
from sigmascope.records.run import Run, Stage, TensorFacts
from sigmascope.records.serialization import to_plain


def with_facts(stage: Stage, **facts: Any) -> Stage:
    return replace(stage, facts={**stage.facts, **facts})


def prompted(stage: Stage, prompt: str, *, tokens: int = 77) -> Stage:
    """With a prompt, and a text encoding whose embeddings have so many tokens."""
    embeds = TensorFacts((1, tokens, 16), "float32", "cpu", 64 * tokens, 16 * tokens)
    encoding = Stage("text_encoding", stage.started_seconds, 0.0, tensors={"prompt_embeds": embeds})
    stage = with_facts(stage, prompts={"prompt": {"sha256": prompt, "text": prompt}})
    return replace(stage, children=(encoding, *stage.children))


# First steps that are slow again and again

SLOW, FAST = [9.0, 0.3, 0.3, 0.3], [0.3] * 4


def of_prompts(prompts: str, slow: str, *, tokens: Sequence[int] = (), compiled: bool = False) -> Run:
    """Generations with prompts of a letter each, of which those with an x have a slow first step."""
    return series(
        *(
            prompted(
                generation(20.0 * i, SLOW if mark == "x" else FAST, compiled=compiled),
                prompt,
                tokens=tokens[i] if tokens else 77,
            )
            for i, (prompt, mark) in enumerate(zip(prompts, slow, strict=True))
        )
    )


def test_a_first_step_that_is_slow_with_each_new_prompt_is_blamed_on_the_prompt() -> None:
    """ComfyUI 9039: with a new prompt the first picture takes 7 times as long, and with the same again none does."""
    told = found(of_prompts("aabbbccd", "x.x..x.x"))["series.first_steps_recur"]
    assert "in 4 of 8 generations" in told.message
    assert ": each change of prompt costs it again." in told.message
    assert "prompt_embeds" in (told.advice or "")


@pytest.mark.parametrize(("prompts", "slow"), [("abcd", "xxxx"), ("aabbccdd", "xx.x.x.x"), ("aaab", "x..x")])
def test_a_prompt_that_changes_with_fast_steps_too_or_always_is_not_blamed(prompts: str, slow: str) -> None:
    assert "prompt" not in found(of_prompts(prompts, slow))["series.first_steps_recur"].message


def test_a_compiled_model_that_takes_texts_of_any_length_is_told_from_one_that_changes_by_itself() -> None:
    """ComfyUI 6415, Comfy-WaveSpeed 18: at one size, and compiled again before each picture once prompts are long."""
    told = found(of_prompts("abcd", "xxxx", tokens=(12, 34, 56, 78), compiled=True))[
        "series.first_steps_recur"
    ]
    assert ": each change of text length is compiled again." in told.message
    assert "dynamic=True" in (told.advice or "")
    even = found(of_prompts("abcd", "xxxx", compiled=True))["series.first_steps_recur"]
    assert "not kept from one generation to the next" in even.message


def compiled(at: float, steps: Sequence[float], height: int, count: int, *why: str) -> Stage:
    noted = {"count": count, "seconds": steps[0] if count else 0.0, "why": list(why)}
    return with_facts(generation(at, steps, height=height, compiled=True), compilations=noted)


def test_sizes_that_one_graph_serves_are_not_said_to_be_compiled() -> None:
    """As torch.compile does by itself: for the first size, then for all."""
    why = "the size at index 2 of sample is 8, not 4"
    run = series(
        *(
            compiled(20.0 * i, SLOW if i < 2 else FAST, 512 + 64 * i, int(i < 2), *([why] if i == 1 else []))
            for i in range(4)
        )
    )
    told = found(run)["series.first_steps_recur"]
    assert ": height (512, 576) was compiled anew, 2 other new sizes not." in told.message
    assert "mark_dynamic" in (told.advice or "")


def test_no_advice_is_given_that_was_followed() -> None:
    """pytorch 104913 and 150702: each size compiles, though all were asked for (dynamic=True)."""
    recipe = {"surroundings": {"transformer dynamic shapes": "True"}}
    told = found(
        series(*(with_facts(compiled(20.0 * i, SLOW, 512 + 64 * i, 1), recipe=recipe) for i in range(3)))
    )
    advice = str(told["series.first_steps_recur"].advice)
    assert advice.startswith("dynamic=True was asked for, and something in the model fixes a size")


def test_what_torch_says_of_a_compilation_is_told_where_nothing_else_explains_it() -> None:
    why = "the stride at index 0 of guidance is 0, not 1"
    told = found(series(*(compiled(20.0 * i, SLOW, 512, 1, why) for i in range(3))))
    assert f"it is compiled again, since {why}." in told["series.first_steps_recur"].message


def test_a_slow_first_step_in_which_nothing_was_compiled_is_not_blamed_on_the_compiler() -> None:
    told = found(series(*(compiled(20.0 * i, SLOW, 512 + 64 * i, 0) for i in range(3))))
    assert "each new height (512, 576, 640) costs it again" in told["series.first_steps_recur"].message


@pytest.mark.parametrize(("role", "is_blamed"), [("denoiser", True), ("other", True), ("vae", False)])
def test_a_first_step_is_blamed_on_the_compiling_of_what_works_in_it(role: str, is_blamed: bool) -> None:
    """A denoiser of one's own has no role that is known; a VAE works in no step."""
    made = to_plain(pipeline(transformer=component("denoiser"), part=component(role, compiled=True)))
    noted = {"count": 2, "seconds": 8.0, "from_cache": 0, "not_in_cache": 2}
    run = series(with_facts(generation(0.0, SLOW), pipeline=made, compilations=noted))
    told = found(run)["time.first_step_compiles"].message
    because = ", because torch.compile compiles in it (0 of 2 graphs from its cache)."
    assert told.endswith(because if is_blamed else "the others 300 ms.")


def test_a_function_that_is_compiled_no_more_is_said_before_all_else() -> None:
    """From the ninth size on, by PyTorch's default, steps run uncompiled."""
    stages = [compiled(20.0 * i, SLOW, 512 + 64 * i, 1) for i in range(8)]
    given_up = {"count": 0, "gave_up": True}
    last = with_facts(generation(200.0, [0.9] * 4, height=1024, compiled=True), compilations=given_up)
    run = series(*stages, last)
    assert headline(run).startswith("torch.compile has compiled a function as often as is allowed")
    assert "other new size" not in found(run)["series.first_steps_recur"].message


# All steps of one generation


@pytest.mark.parametrize("number", [0, 5])
def test_a_generation_that_was_set_up_otherwise_is_not_blamed_on_the_machine(number: int) -> None:
    float32, half = (
        {"module": weights(dtype=dtype, gib=size)} for dtype, size in (("float32", 4), ("bfloat16", 2))
    )
    run = series(
        *(
            generation(20.0 * i, [1.2 if i == number else 0.3] * 8, denoiser=float32 if i == number else half)
            for i in range(9)
        )
    )
    said = headline(run)
    sides = "bfloat16 → float32" if number else "float32 → bfloat16"
    assert f"; transformer dtype {sides} may explain it." in said
    assert "of the same work" not in said


def test_a_generation_of_more_steps_is_not_blamed_on_another_program() -> None:
    run = series(*(generation(60.0 * i, [0.3] * (100 if i == 5 else 4)) for i in range(9)))
    told = found(run)["series.one_stands_out"]
    assert told.message.endswith("in denoising; num_inference_steps 4 → 100 may explain it.")
    assert "another program" not in (told.advice or "")


# Generations at once


def test_generations_that_run_at_once_are_said_to_share_what_they_run_on() -> None:
    """diffusers 5709: a request takes 5 s, and each of five that come at once takes 25 s."""
    alone = [generation(10.0 * i, [0.25] * 20) for i in range(3)]
    at_once = [generation(40.0 + 0.1 * i, [1.25] * 20) for i in range(5)]
    said = headline(series(*alone, *at_once))
    assert said.startswith(
        "5 of 8 generations ran at the same time, up to 5 at once: their steps took 1.25 s, and 250 ms in those that ran "
        "alone (5.00 × as long)."
    )
    assert "became slower" not in said
    assert headline(series(*at_once)).startswith(
        "5 of 5 generations ran at the same time, up to 5 at once: their steps took 1.25 s, since they shared"
    )


def test_generations_at_once_that_take_no_longer_are_not_told() -> None:
    alone = [generation(10.0 * i, [0.25] * 20) for i in range(3)]
    at_once = [generation(40.0, [0.26] * 20) for _ in range(2)]
    assert "series.at_once" not in found(series(*alone, *at_once))


def test_generations_on_devices_of_their_own_share_nothing() -> None:
    devices = [{"module": weights(device=f"cuda:{number}")} for number in range(4)]
    assert "series.at_once" not in found(
        series(*(generation(0.0, [0.3] * 9, denoiser=one) for one in devices))
    )


def test_generations_in_turn_do_not_run_at_once() -> None:
    run = series(*(generation(2.0 * i, [0.3] * 6, other=0.2) for i in range(6)))
    assert not {name for name in found(run) if name.startswith("series.")}


def test_memory_that_went_to_the_disk_is_named_where_steps_are_slower_since() -> None:
    """As is suspected in diffusers 10705: 8 minutes for the first picture, 30 for each since, with memory full."""
    run = series(
        *(
            with_facts(
                generation(2000.0 * i, [60.0 if i else 16.0] * 30),
                processor={"own_seconds": 1.0, "major_faults": 90_000 if i else 12},
            )
            for i in range(3)
        )
    )
    pages = "pages read from a disk (swap, or weights) 12 → 90,000 in each may explain it."
    assert f"60.00 s since (3.75 × as long); {pages}" in headline(run)
