"""What a service exports of a run, in numbers."""

import re
from dataclasses import replace

import pytest
from tests.reports.metrics.runs import GIB, generation, stage

from sigmascope.records.merge import merge_runs
from sigmascope.records.run import Run, Stage, Steps
from sigmascope.reports.measurements import Label, Measured, measured, model_label


def only(run: Run) -> Measured:
    [part] = measured(run)
    return part


def test_a_generation_is_its_stages_steps_and_peaks_by_the_clock_of_the_device() -> None:
    part = only(generation())
    assert (part.pipeline, part.generation_seconds, part.outcome) == ("FluxPipeline", 3.0, "ok")
    assert part.stages == (("text_encoding", 0.25), ("denoising", 1.75))
    assert part.steps == (0.5, 0.5, 0.75)
    assert part.peaks == {"cuda:0": 5 * GIB, "process": 2 * GIB}
    assert part.totals == {"cuda:0": 24 * GIB}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB", "oom"),
        ("KeyboardInterrupt", "cancelled"),
        ("CancelledError", "cancelled"),
        ("ValueError: a red fox", "error"),
    ],
)
def test_a_generation_that_fails_says_how(error: str, outcome: str) -> None:
    assert only(generation(success=False, error=error)).outcome == outcome


def test_a_stage_outside_of_generations_is_no_generation() -> None:
    part = only(generation(name="model_loading"))
    assert part.generation_seconds is None
    assert part.outcome is None
    assert part.stages[0] == ("model_loading", 3.0)


def test_steps_of_which_the_device_missed_one_are_told_by_the_host() -> None:
    steps = Steps(started=(0.0, 1.0), seconds=(1.0, 2.0), gpu_seconds=(1.5, None))
    assert only(generation(stage("denoising", 0.0, 3.0, steps=steps))).steps == (1.0, 2.0)


def test_tiles_are_no_denoising_steps() -> None:
    steps = Steps(started=(0.0,), seconds=(1.0,))
    assert only(generation(stage("latent_decoding", 0.0, 3.0, steps=steps))).steps == ()


def test_a_stage_that_is_named_by_the_prompt_has_no_name() -> None:
    prompts = {"prompts": {"prompt": {"sha256": "0" * 64, "text": "portrait"}}}
    assert only(generation(stage("portrait", 0.0, 1.0), facts=prompts)).stages == (("", 1.0),)


def test_each_rank_of_a_merged_run_is_counted() -> None:
    ranks = [replace(generation(), id=str(number)) for number in range(2)]
    parts = list(measured(merge_runs(ranks)))
    assert [part.generation_seconds for part in parts] == [3.0, 3.0]
    assert sorted(device for part in parts for device in part.peaks) == [
        "cuda:0 (rank 0)", "cuda:0 (rank 1)", "process", "process",
    ]  # fmt: skip


def test_a_prompt_of_comfyui_is_one_generation_with_its_wait_in_the_queue() -> None:
    node = Stage("KSampler", 0.0, 2.0, facts={"lora_verdicts": [{"lora": "x", "effective": False}]})
    nodes = (Stage("generation", 0.0, 2.5, children=(node,)),)
    facts = {"comfyui": {"seconds_before": {"queue": 4.5}, "nodes": []}}
    part = only(Run("1", "prompt", "2026-03-01T10:00:00+00:00", 2.5, None, nodes, facts=facts))
    assert (part.pipeline, part.generation_seconds, part.queue_seconds) == ("ComfyUI", 2.5, 4.5)
    assert part.stages == (("KSampler", 2.0),)
    assert part.verdicts == ("no_effect",)


LORA = {"active": 3}
WITHOUT_VALUES = {"id": "lora_without_values", "severity": "error", "message": "", "evidence": {"acting": 1}}


@pytest.mark.parametrize(
    ("facts", "verdicts"),
    [
        ({"recipe": {"loras": {"unet.style": LORA, "text_encoder.style": LORA}}}, ("acts",)),
        ({"recipe": {"loras": {"unet.style": LORA, "unet.off": {"active": 0}}}}, ("acts",)),
        ({"recipe": {"loras": {"unet.style": {"active": 0}}}, "idle_loras": [{"severity": "warning"}]}, ("no_effect",)),
        ({"recipe": {"loras": {"unet.style": LORA}}, "idle_loras": [{"severity": "info"}]}, ("unknown",)),
        ({"recipe": {"loras": {"unet.style": LORA}}, "idle_loras": [WITHOUT_VALUES]}, ("unknown",)),
        ({"recipe": {"loras": {"unet.style": LORA}}, "idle_loras": [{"severity": "warning", "id": "lora_encoder_not_run"}]}, ("unknown",)),
        ({"lora_application": {"effective": True}}, ("acts",)),
        ({"lora_application": {"effective": False}}, ("no_effect",)),
        ({"lora_application": {"effective": None}}, ("unknown",)),
        ({"recipe": {"loras": {}}}, ()),
        ({"recipe": "mended by hand", "idle_loras": 7, "lora_application": [], "seconds_before": 1}, ()),
    ],
)  # fmt: skip
def test_what_loras_did_is_said_once_for_each(facts: dict[str, object], verdicts: tuple[str, ...]) -> None:
    assert only(generation(facts=facts)).verdicts == verdicts


def test_a_label_takes_what_is_known_and_the_first_names() -> None:
    label = Label(re.compile("[a-z]+"), 2, ("KNOWN",))
    assert [label.of(name) for name in ("a", "b", "c", "a", "KNOWN", "no name", "other")] == [
        "a", "b", "other", "a", "KNOWN", "other", "other",
    ]  # fmt: skip
    assert label.of(None) == "unknown"
    assert label.folded == 2


@pytest.mark.parametrize(
    ("name", "label"),
    [("/models/flux/dev/", "dev"), ("black-forest-labs/FLUX.1-dev", "FLUX.1-dev"), (r"C:\m\x.gguf", "x.gguf"), ("/", None)],
)  # fmt: skip
def test_a_model_that_is_named_by_a_path_is_called_by_its_last_part(name: str, label: str | None) -> None:
    assert model_label(name) == label
