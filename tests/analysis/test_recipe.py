"""What changed between runs, on made records: what explains a time by arithmetic, and what is no more than noise."""

from dataclasses import replace
from typing import Any

import pytest

from sigmascope.analysis.what_changed import first_difference, what_changed
from sigmascope.records.run import AcceleratorFacts, HostFacts, Run, Stage, Steps, TensorFacts


def tensor(mean: float | None) -> TensorFacts:
    return TensorFacts((1, 4, 8, 8), "float32", "cpu", 1024, 256, -1.0, 1.0, mean, 0.5, 0, 0)


def generated(
    *,
    steps: int = 4,
    step: float = 1.0,
    between: float = 0.0,
    text: float = 1.0,
    call: dict[str, Any] | None = None,
    recipe: dict[str, Any] | None = None,
    prompt: str = "a cat",
    means: tuple[float | None, float | None] = (0.1, 0.2),
    **facts: Any,
) -> Run:
    """A second outside the stages, then text encoding and denoising; no time but what is said."""
    started = tuple(index * (step + between) for index in range(steps))
    denoising = Stage(
        "denoising",
        1.0 + text,
        steps * (step + between),
        steps=Steps(started, (step,) * steps),
        tensors={"latent": tensor(means[1])},
        facts=facts.pop("denoising", {}),
    )
    encoding = Stage("text_encoding", 1.0, text, tensors={"prompt_embeds": tensor(means[0])})
    whole = text + denoising.seconds
    told = {
        "call": {"num_inference_steps": steps, **(call or {})},
        "recipe": {"arguments": {}, "loras": {}, "threads": 2, **(recipe or {})},
        "prompts": {"prompt": {"sha256": prompt[::-1], "text": prompt}},
        "seeds": [3],
    }
    stage = Stage("generation", 1.0, whole, children=(encoding, denoising), facts=told)
    return Run("1", "demo", "2026-01-02T03:04:05+00:00", 1.0 + whole, stages=(stage,), facts=facts)


def headline(now: Run, before: Run, runs: int = 1) -> str:
    return what_changed([now] * runs, [before] * runs).headline


def test_more_steps_explain_the_time_that_they_take() -> None:
    assert headline(generated(steps=8), generated()) == (
        "1.67 × as long (6.00 s → 10.00 s): num_inference_steps 4 → 8 explains it."
    )


@pytest.mark.parametrize(
    ("step", "says"),
    [(4.0, "explain it."), (16.0, "explain it."), (40.0, "explain part of it.")],
    ids=["in proportion", "by the square", "by more"],
)
def test_a_larger_picture_explains_up_to_the_square_of_its_pixels(step: float, says: str) -> None:
    before = generated(step=1.0, call={"height": 64, "width": 64})
    now = generated(step=step, call={"height": 128, "width": 128})
    assert headline(now, before).endswith(f"height 64 → 128 and width 64 → 128 {says}")


def test_what_no_amount_explains_is_placed_and_the_recipe_asked() -> None:
    slower = generated(step=2.0, recipe={"threads": 1})
    assert headline(slower, generated()) == (
        "1.67 × as long (6.00 s → 10.00 s): 4.00 s more in the steps of denoising; threads 2 → 1 may explain it."
    )
    assert headline(generated(step=2.0), generated()).endswith(
        "4.00 s more in the steps of denoising; nothing in the recipe explains it."
    )


def test_a_callback_that_is_new_is_named() -> None:
    now = generated(between=1.0, call={"callback": "preview (generate.py:31)"})
    assert headline(now, generated()) == (
        "1.67 × as long (6.00 s → 10.00 s): 4.00 s more in your callback preview (generate.py:31)."
    )


def test_less_time_is_explained_as_well() -> None:
    assert headline(generated(), generated(steps=8)) == (
        "1.67 × as fast (10.00 s → 6.00 s): num_inference_steps 8 → 4 explains it."
    )


def test_other_work_on_the_processor_is_named() -> None:
    busy = generated(step=2.0, others_cpu_share=0.6)
    assert headline(busy, generated(others_cpu_share=0.0)) == (
        "The times are not comparable: other programs used 60 % of the processor (before: 0 %). Measure again when nothing "
        "else runs."
    )


def test_waiting_for_a_disk_is_named() -> None:
    before = generated(major_page_faults=3, disk_read_bytes=4 << 20)
    now = generated(step=2.0, major_page_faults=9_000, disk_read_bytes=400 << 20)
    assert what_changed([now], [before]).recipe == {
        "page faults from disk": ("3", "9,000"),
        "read from disk": ("4 MB", "400 MB"),
    }
    assert "page faults from disk 3 → 9,000 and read from disk 4 MB → 400 MB may explain it" in headline(
        now, before
    )
    assert what_changed([generated()], [before]).recipe == {}


@pytest.mark.parametrize(
    ("runs", "factor", "said"),
    [
        (
            1,
            1.15,
            "A change of the whole time by +15.0 % (6.00 s → 6.90 s) cannot be told from noise: 1 run before and 1 now are "
            "too few for p < 0.01; measure 4 more on each side.",
        ),
        (
            3,
            1.08,
            "A change of the whole time by +8.0 % (6.00 s → 6.48 s) cannot be told from noise: 3 runs before and 3 now are "
            "too few for p < 0.01; measure 2 more on each side.",
        ),
        (5, 1.02, "Nothing differs beyond noise."),
    ],
)
def test_a_small_change_is_noise_the_more_so_the_fewer_runs_there_are(
    runs: int, factor: float, said: str
) -> None:
    now = [replace(generated(), seconds=6.0 * factor + index / 1000) for index in range(runs)]
    before = [replace(generated(), seconds=6.0 + index / 1000) for index in range(runs)]
    assert what_changed(now, before).headline == said
    slower = [replace(run, seconds=run.seconds * 1.2) for run in now]
    assert "× as long" in what_changed(slower, before).headline


def test_steps_decide_nothing_that_the_whole_time_leaves_open() -> None:
    """What slows a whole run, as a processor's clock does, is in its steps too, and these are of no more runs."""
    now, before = ([generated(steps=8, step=step + run / 100) for run in range(3)] for step in (1.11, 1.0))
    assert what_changed(now, before).headline.startswith(
        "A change of the whole time by +8.7 % (10.08 s → 10.96 s) cannot be told from noise: 3 runs before and 3 now are too few"
    )


def test_runs_that_overlap_are_no_slower() -> None:
    now = [replace(generated(), seconds=seconds) for seconds in (6.0, 8.0, 8.5)]
    before = [replace(generated(), seconds=seconds) for seconds in (5.0, 6.0, 7.9)]
    assert what_changed(now, before).headline.startswith(
        "A change of the whole time by +33.3 % (6.00 s → 8.00 s) cannot be told from noise: "
    )


def test_the_first_output_that_differs_is_named_with_what_acts_there() -> None:
    other = generated(prompt="a dog", means=(0.3, 0.4))
    assert headline(other, generated()) == (
        "The outputs differ from the prompt_embeds of text_encoding on: prompt a cat → a dog. "
        "Times are as before."
    )
    lora = generated(
        recipe={"loras": {"unet.style": {"strength": [1.0, 1.0], "layers": 4, "active": 4}}}, means=(0.1, 0.4)
    )
    assert headline(lora, generated()).endswith(
        "the latent of denoising on: LoRAs none → unet.style. Times are as before."
    )
    assert headline(generated(means=(0.1, 0.4)), generated()).endswith(
        "nothing in the recipe explains it; what your own code does between the pipeline's stages is not looked at, "
        "nor more than 64 values of each weight, nor what was written through a weight's .data after it was first read. Times are as before."
    )


def test_what_could_not_be_read_is_said_where_nothing_else_explains_an_output() -> None:
    recipe = {"not_looked_at": {"control": "ControlState"}, "models": {"unet": None, "vae": "1f"}}
    said = headline(generated(means=(0.1, 0.4), recipe=recipe), generated(recipe=recipe))
    assert said.endswith(
        "nothing in the recipe explains it; not looked at: control (ControlState), unet weights, "
        "more than 64 values of each weight, what was written through a weight's .data after it was first read. Times are as before."
    )


def test_outputs_that_differ_on_one_side_alone_or_were_not_read_say_nothing() -> None:
    unseeded = [generated(means=(0.1, mean)) for mean in (0.5, 0.6)]
    assert first_difference(unseeded, [generated(means=(0.1, 0.7))] * 2) is None
    assert first_difference([generated(means=(None, None))], [generated()]) is None
    assert first_difference([generated()], [generated()]) is None


def test_noise_that_nobody_seeded_accuses_no_part() -> None:
    runs = []
    for mean in (0.5, 0.6):
        run = generated(means=(0.1, mean))
        facts = {name: value for name, value in run.stages[0].facts.items() if name != "seeds"}
        runs.append(replace(run, stages=(replace(run.stages[0], facts=facts),)))
    assert headline(runs[1], runs[0]) == (
        "The outputs differ from the latent of denoising on, as they do without a seed. Times are as before."
    )


def test_what_takes_time_alone_explains_no_output() -> None:
    before = generated(disk_read_bytes=4 << 20, others_cpu_share=0.0)
    now = generated(disk_read_bytes=400 << 20, others_cpu_share=0.6, means=(0.1, 0.4))
    assert headline(now, before).endswith(
        "nothing in the recipe explains it; what your own code does between the pipeline's stages is not looked at, "
        "nor more than 64 values of each weight, nor what was written through a weight's .data after it was first read. The recipe differs: read from disk 4 MB → 400 MB. Times are as before."
    )


def test_records_that_do_not_add_up_are_compared_all_the_same() -> None:
    before = generated()
    assert headline(replace(before, seconds=3.0), before).startswith("2.00 × as fast (6.00 s → 3.00 s)")


def test_a_recipe_that_differs_without_an_effect_is_told() -> None:
    hosts = [HostFacts(libraries={"torch": version}) for version in ("2.12", "2.13")]
    before, now = (replace(generated(), host=host) for host in hosts)
    assert headline(now, before) == "The recipe differs: torch 2.12 → 2.13. Times are as before."


def test_records_from_before_recipes_were_kept_compare_with_those_of_today() -> None:
    now = generated()
    stage = now.stages[0]
    facts = {name: value for name, value in stage.facts.items() if name not in ("recipe", "seeds")}
    old = replace(now, stages=(replace(stage, facts=facts),))
    assert what_changed([now], [old]).recipe == {}


def hashed(run: Run, **hashes: str | None) -> Run:
    """The run with these hashes of its stages' tensors, "prompt_embeds" and "latent"."""
    (generation,) = run.stages
    children = tuple(
        replace(
            child,
            facts={**child.facts, "output_hashes": {name: hashes.get(name) for name in child.tensors}},
        )
        for child in generation.children
    )
    return replace(run, stages=(replace(generation, children=children),))


def test_outputs_are_told_apart_by_their_hashes_where_all_runs_have_them() -> None:
    unread = generated(means=(None, None))
    before = hashed(unread, prompt_embeds="aa", latent="bb")
    assert first_difference([hashed(unread, prompt_embeds="aa", latent="cc")], [before]) == (
        "denoising: latent"
    )
    assert first_difference([hashed(unread, prompt_embeds="cc", latent="cc")], [before]) == (
        "text_encoding: prompt_embeds"
    )
    assert first_difference([before], [before]) is None


def test_equal_statistics_of_other_bytes_are_another_output() -> None:
    before, now = (hashed(generated(), prompt_embeds="aa", latent=digest) for digest in ("bb", "cc"))
    assert first_difference([now], [before]) == "denoising: latent"


def test_a_record_without_hashes_is_compared_by_statistics() -> None:
    now = hashed(generated(means=(0.1, 0.5)), prompt_embeds="aa", latent="bb")
    assert first_difference([now], [generated()]) == "denoising: latent"
    assert first_difference([hashed(generated(), prompt_embeds="aa", latent="bb")], [generated()]) is None
    lacking = hashed(generated(), prompt_embeds="aa", latent=None)
    assert first_difference([lacking], [hashed(generated(), prompt_embeds="aa", latent="bb")]) is None


def test_hashes_that_differ_within_one_side_say_nothing() -> None:
    sides = [hashed(generated(), prompt_embeds="aa", latent=digest) for digest in ("bb", "cc")]
    assert first_difference(sides, [sides[0]] * 2) is None


def test_another_model_is_named_and_costs_no_time() -> None:
    before, now = (
        generated(step=step, recipe={"models": {"unet": fingerprint}}, means=(0.1, mean))
        for step, fingerprint, mean in ((1.0, "aa", 0.2), (2.0, "bb", 0.3))
    )
    assert headline(now, before) == (
        "1.67 × as long (6.00 s → 10.00 s): 4.00 s more in the steps of denoising; nothing in the recipe explains it. "
        "The outputs differ from the latent of denoising on: unet weights aa → bb."
    )


def test_a_model_without_a_fingerprint_on_one_side_is_no_difference() -> None:
    before, now = (generated(recipe={"models": {"unet": fingerprint}}) for fingerprint in ("aa", None))
    assert what_changed([now], [before]).recipe == {}


def lora(**more: Any) -> dict[str, Any]:
    return {"loras": {"unet.style": {"strength": [1.0, 1.0], "layers": 4, "active": 4, **more}}}


def test_a_lora_that_is_gone_explains_the_parameters_that_are_gone_with_it() -> None:
    def of(lora: str | None, parameters: int) -> Run:
        loras = {} if lora is None else {lora: {"strength": [1.0, 1.0], "active": 2, "layers": 2}}
        sizes = {"text_encoder parameters": str(parameters)}
        return generated(
            recipe={"loras": loras, "surroundings": sizes}, means=(float(parameters), float(parameters))
        )

    said = "The outputs differ from the prompt_embeds of text_encoding on: "
    with_it, without = of("text_encoder.style", 12), of(None, 10)
    assert said + "LoRAs text_encoder.style → none." in headline(without, with_it)
    assert f"{said}text_encoder parameters 12 → 10." in headline(without, of("unet.style", 12))


def test_a_loras_file_says_more_than_its_content() -> None:
    before, now = (
        generated(recipe=lora(content=digit * 2, file="style.safetensors", sha256=digit * 64))
        for digit in "ab"
    )
    assert what_changed([now], [before]).recipe == {
        "LoRA unet.style file": (
            "sha256 aaaaaaaaaaaa style.safetensors",
            "sha256 bbbbbbbbbbbb style.safetensors",
        )
    }
    unknown = generated(recipe=lora(content="cc"))
    assert what_changed([unknown], [before]).recipe == {"LoRA unet.style content": ("aa", "cc")}


def test_a_lora_that_was_fused_since_is_named() -> None:
    before, now = generated(recipe=lora()), generated(recipe=lora(merged=4))
    assert what_changed([now], [before]).recipe == {"LoRA unet.style merged": ("no", "in 4 of 4 layers")}


def renamed(*loras: tuple[str, str, float]) -> Run:
    facts = {
        name: {"strength": [strength] * 2, "layers": 4, "active": 4, "content": content}
        for name, content, strength in loras
    }
    return generated(recipe={"loras": facts})


def test_a_loras_strength_is_compared_though_its_adapter_has_another_name() -> None:
    before = renamed(("unet.style", "aa", 1.0), ("unet.other", "bb", 1.0))
    now = renamed(("unet.other", "bb", 1.0), ("unet.default_0", "aa", 0.5))
    assert what_changed([now], [before]).recipe == {
        "LoRA unet.style (now default_0) strength": ("1.0", "0.5")
    }
    fewer = renamed(("unet.default_0", "aa", 1.0))
    assert what_changed([fewer], [before]).recipe == {
        "LoRAs": ("unet.style (now default_0), unet.other", "unet.style (now default_0)")
    }
    same = renamed(("unet.default_0", "aa", 1.0), ("unet.default_1", "bb", 1.0))
    assert what_changed([same], [before]).recipe == {}


def test_a_lora_of_another_content_or_component_is_another() -> None:
    before = renamed(("unet.style", "aa", 1.0))
    for name, content in (("unet.new", "cc"), ("text_encoder.new", "aa")):
        now = renamed((name, content, 0.5))
        assert what_changed([now], [before]).recipe == {"LoRAs": ("unet.style", name)}


def test_a_generators_state_is_named_where_its_seed_is_the_same() -> None:
    before, now = (
        generated(recipe={"generator_states": [state]}, means=(0.1, 0.2)) for state in ("aa", "bb")
    )
    assert what_changed([now], [before]).recipe == {"generator state": ("aa", "bb")}


@pytest.mark.parametrize(("is_on", "varies"), [("False", True), ("True", False)])
def test_pictures_that_differ_each_time_are_laid_to_kernels_that_may(is_on: str, varies: bool) -> None:
    """diffusers 3061 and 1339: the same call twice with the same seed on a GPU, and pictures that differ a little."""
    host = HostFacts(accelerators=(AcceleratorFacts("cuda:0", "NVIDIA A100", 40 * 2**30, "550", "8.0"),))
    given = {"surroundings": {"deterministic algorithms": is_on}}
    sides = [replace(generated(recipe=given, means=(0.1, mean)), host=host) for mean in (0.2, 0.2001)]
    told = what_changed(sides[1:], sides[:1])
    assert told.recipe == {}
    assert "nothing in the recipe explains it" in told.headline
    assert ("since deterministic algorithms are off" in told.headline) is varies


def test_a_seed_that_another_device_draws_with_is_named_and_its_state_is_not() -> None:
    """diffusers 13298: the same seed, and another picture, since the generator is on the GPU."""
    before, now = (
        generated(
            recipe={"generator_devices": [device], "generator_states": [state]},
            call={"seed": 134},
            means=means,
        )
        for device, state, means in (("cpu", "aa", (0.1, 0.2)), ("cuda", "bb", (0.1, 0.4)))
    )
    changed = what_changed([now], [before])
    assert changed.recipe == {"generator device": ("cpu", "cuda")}
    assert "generator device cpu → cuda" in changed.headline.split(". ")[0]


def test_garbage_and_compiling_are_named() -> None:
    before = generated(full_collections=2, compiled_graphs=0)
    now = generated(step=2.0, full_collections=40, compiled_graphs=3)
    assert "graphs compiled 0 → 3 may explain it" in headline(now, before)
    garbage = generated(step=2.0, full_collections=40, compiled_graphs=0)
    assert "full garbage collections 2 → 40 may explain it" in headline(garbage, before)
    assert what_changed([generated(full_collections=5, compiled_graphs=0)], [before]).recipe == {}


def test_other_programs_are_no_change_of_a_run_that_takes_as_long() -> None:
    before, now = (generated(others_cpu_share=share) for share in (0.5, 0.7))
    changed = what_changed([now], [before])
    assert changed.headline == "Nothing differs beyond noise."
    assert changed.recipe == {"processor used by others": ("50 %", "70 %")}


def test_a_run_that_broke_off_is_not_compared_as_if_it_were_whole() -> None:
    whole = Run("a", "run", "2026-01-01T00:00:00+00:00", 10.0, stages=(Stage("denoising", 0.0, 9.0),))
    broken = replace(whole, id="b", seconds=1.0, stages=(Stage("denoising", 0.0, 0.9),), complete=False)
    changed = what_changed([broken], [whole])
    assert changed.headline.startswith("The new run broke off. Times and outputs are not compared.")
    assert changed.rows == ()
    assert what_changed([whole], [broken]).headline.startswith("The earlier run broke off.")
    among = what_changed([whole, replace(whole, id="c"), broken], [replace(whole, id="d")])
    assert among.headline == "Nothing differs beyond noise. 1 of 3 new runs broke off."
