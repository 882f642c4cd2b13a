from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.analysis.faulty_runs import component, pipeline, stage, steps, weights

from sigmascope.records.run import Finding

Found = Callable[..., dict[str, Finding]]


def test_a_missed_target_names_the_longest_stage(found: Found) -> None:
    performance = {"target_met": False, "total_generation_time": 16.0, "target_generation_time": 5.0}
    generation = stage(
        "generation", 16.0, facts={"performance": performance},
        children=(stage("text_encoding", 2.0), stage("denoising", 12.0)),
    )  # fmt: skip
    finding = found(generation)["time.target_missed"]
    assert finding.message == "16.00 s, 3.2 times the target of 5.00 s. denoising took 75 % of it."


def test_a_missed_target_refers_to_other_findings_only_if_they_say_what_they_would_save(found: Found) -> None:
    performance = {"target_met": False, "total_generation_time": 16.0, "target_generation_time": 5.0}
    inside = stage("text_encoding", 2.0), stage("denoising", 12.0)
    alone = found(stage("generation", 16.0, facts={"performance": performance}, children=inside))
    assert list(alone) == ["time.target_missed"]
    assert alone["time.target_missed"].advice is None
    compiling = stage("denoising", 14.0, steps=steps([10.0] + [0.5] * 8))
    both = found(stage("generation", 16.0, facts={"performance": performance}, children=(compiling,)))
    assert both["time.first_step_compiles"].evidence["gain_seconds"]
    assert "other findings" in (both["time.target_missed"].advice or "")


def test_a_target_that_was_met_is_no_finding(found: Found) -> None:
    performance = {"target_met": True, "total_generation_time": 2.4, "target_generation_time": 5.0}
    assert not found(stage("generation", 2.4, facts={"performance": performance}))


def test_a_vae_that_takes_long_is_told_with_its_share(found: Found) -> None:
    findings = found(stage("denoising", 6.0), stage("latent_decoding", 4.0))
    assert findings["time.vae_share"].evidence["share"] == 0.4
    assert "time.vae_share" not in found(stage("denoising", 9.0), stage("latent_decoding", 1.0))


def test_a_vae_is_counted_once_where_its_attempts_are_stages_of_their_own(found: Found) -> None:
    inner = stage("latent_encoding", 2.0)
    findings = found(stage("latent_encoding", 4.0, children=(inner,)), stage("denoising", 6.0))
    assert findings["time.vae_share"].evidence["vae_seconds"] == 4.0


def test_tiling_that_costs_time_is_advised_against(found: Found) -> None:
    pipe = pipeline(unet=component("denoiser"), vae=component("vae", tiling=True))
    findings = found(stage("denoising", 5.0), stage("latent_decoding", 5.0), pipe=pipe)
    assert "disable_tiling" in (findings["time.vae_share"].advice or "")


@pytest.mark.parametrize("class_name", ["AutoencoderKLMiniMaxH3", "AutoencoderKLAllegro"])
def test_tiling_that_a_model_needs_is_not_advised_against(found: Found, class_name: str) -> None:
    pipe = pipeline(
        unet=component("denoiser"), vae=replace(component("vae", tiling=True), class_name=class_name)
    )
    findings = found(stage("denoising", 5.0), stage("latent_decoding", 5.0), pipe=pipe)
    assert "iling" not in (findings["time.vae_share"].advice or "")


def test_text_encoding_on_the_cpu_is_named(found: Found) -> None:
    pipe = pipeline(text_encoder_2=component("text_encoder", module=weights(device="cpu")))
    finding = found(stage("text_encoding", 3.0), stage("denoising", 7.0), pipe=pipe)[
        "time.text_encoding_share"
    ]
    assert finding.evidence["on_cpu"] == "text_encoder_2"


def test_a_first_step_that_compiles_is_told_with_what_it_costs(found: Found) -> None:
    pipe = pipeline(transformer=component("denoiser", compiled=True))
    finding = found(stage("denoising", 40.0, steps=steps([31.0] + [1.0] * 9)), pipe=pipe)[
        "time.first_step_compiles"
    ]
    assert finding.evidence["gain_seconds"] == 30.0
    assert "torch.compile compiles in it" in finding.message


@pytest.mark.parametrize("first", [1.0, 2.9, 1.4])
def test_a_first_step_a_little_longer_is_no_finding(found: Found, first: float) -> None:
    assert not found(stage("denoising", 10.0, steps=steps([first] + [1.0] * 9)))


def test_steps_that_stand_out_are_listed_by_their_number(found: Found) -> None:
    seconds = [1.0] * 20
    seconds[4] = seconds[12] = 5.0
    finding = found(stage("denoising", 28.0, steps=steps(seconds)))["time.steps_stand_out"]
    assert finding.evidence["steps"] == "5, 13"
    assert finding.evidence["gain_seconds"] == 8.0
    assert finding.severity == "warning"


def test_even_steps_and_steps_of_two_kinds_stand_out_in_nothing(found: Found) -> None:
    assert not found(stage("denoising", 20.0, steps=steps([1.0, 1.02, 0.98, 1.01] * 5)))
    assert not found(stage("denoising", 30.0, steps=steps([1.0, 3.0] * 10)))


def test_steps_that_slow_down_steadily_are_told(found: Found) -> None:
    seconds = [1.0 + 0.01 * index for index in range(30)]
    finding = found(stage("denoising", 34.0, steps=steps(seconds)))["time.steps_slow_down"]
    assert finding.evidence["growth_seconds"] == pytest.approx(0.28)


def test_steps_that_are_only_noisy_do_not_slow_down(found: Found) -> None:
    noise = [0.97, 1.03, 1.01, 0.99, 1.02, 0.98, 1.0] * 6
    assert not found(stage("denoising", 42.0, steps=steps(noise)))


def test_a_device_that_waits_for_the_host_is_told(found: Found) -> None:
    finding = found(stage("denoising", 10.0, steps=steps([1.0] * 10, gpu=[0.3] * 10)))["time.device_waits"]
    assert finding.evidence["busy_seconds"] == pytest.approx(3.0)
    assert not found(stage("denoising", 10.0, steps=steps([1.0] * 10, gpu=[0.95] * 10)))


def test_where_nothing_is_generated_encoding_is_no_large_share_but_the_work(found: Found) -> None:
    assert not found(stage("text_encoding", 5.0), stage("latent_encoding", 5.0))


def test_steps_that_the_device_was_not_seen_to_finish_are_counted_and_the_others_keep_their_clock(
    found: Found,
) -> None:
    gpu = [0.1, 0.1, 0.1, None, 0.1, 0.5, 0.1, 0.1, 0.1]
    finding = found(stage("denoising", steps=steps([0.001] * 9, gpu)))["time.steps_stand_out"]
    assert finding.message.startswith("1 of 8 steps took more than twice as long as the rest: 6.")
    assert finding.evidence["steps_not_timed"] == 1


def test_a_device_that_was_read_too_early_waits_for_nobody(found: Found) -> None:
    assert "time.device_waits" not in found(
        stage("denoising", 9.0, steps=steps([1.0] * 20, [1.0] * 7 + [None] * 13))
    )
    assert "time.device_waits" not in found(
        stage("denoising", 9.0, steps=steps([1.0] * 9, [1.0, None] * 4 + [1.0]))
    )
    waits = found(stage("denoising", 20.0, steps=steps([1.0] * 20, [0.2] * 19 + [None])))["time.device_waits"]
    assert (waits.evidence["seconds"], waits.evidence["steps_not_timed"]) == (19.0, 1)


def test_steps_in_part_without_a_time_are_summed_by_the_clock_that_has_them_all(found: Found) -> None:
    performance = {"target_met": False, "total_generation_time": 10.0, "target_generation_time": 5.0}
    parts = stage(
        "generation", 10.0, facts={"performance": performance}, steps=steps([3.0] * 3, [2.9, None, None])
    )
    assert "its steps took 90 % of it" in found(parts)["time.target_missed"].message
