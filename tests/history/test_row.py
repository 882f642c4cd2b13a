from dataclasses import replace

import pytest
from tests.history.kept_runs import kept_run

from sigmascope.errors import ConfigError
from sigmascope.history.row import row_of
from sigmascope.records.run import ExceptionDetails, Run, Stage


def test_the_columns_of_a_generation() -> None:
    row = row_of(kept_run(seconds=11.0))
    assert (row.pipeline, row.model, row.outcome) == ("FluxPipeline", "models/flux", "ok")
    assert (row.width, row.height, row.num_frames, row.batch_size, row.steps) == (1024, 768, None, 1, 4)
    assert (row.seconds, row.generations, row.generation_seconds) == (11.0, 1, 10.0)
    assert (row.device, row.hardware) == ("cuda:0", "NVIDIA H200")
    assert row.peak_bytes == 20 << 30  # the device's, not the process's 5 GiB
    assert row.version == "0.1"


def test_times_are_in_utc_and_sort_as_text() -> None:
    row = row_of(kept_run(started_at="2026-03-01T12:00:00+02:00"))
    assert row.started_at == "2026-03-01T10:00:00.000000+00:00"


def test_loras_go_by_their_files_and_else_by_their_adapters() -> None:
    loras = {
        "transformer.style": {"file": "style.safetensors", "strength": [1.0]},
        "transformer.default_0": {"file": None},
    }
    assert row_of(kept_run(loras=loras)).loras == ("style.safetensors", "default_0")


@pytest.mark.parametrize(
    ("error", "complete", "outcome"),
    [
        (None, True, "ok"),
        ("ValueError: NaN", True, "failed"),
        ("ValueError: NaN", False, "failed"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False, "out of memory"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", False, "out of memory"),
        ("KeyboardInterrupt", False, "interrupted"),
        (None, False, "interrupted"),
    ],
)
def test_how_a_run_ended(error: str | None, complete: bool, outcome: str) -> None:
    assert row_of(kept_run(error=error, complete=complete)).outcome == outcome


def test_what_failed_inside_and_was_caught_is_no_failure() -> None:
    failed = Stage("latent_decoding", 0.0, 1.0, success=False, error="MemoryError: ")
    run = kept_run()
    whole = replace(run.stages[0], children=(*run.stages[0].children, failed))
    assert row_of(replace(run, stages=(whole,))).outcome == "ok"


def test_a_failure_without_its_words_is_known_by_its_type() -> None:
    details = ExceptionDetails("torch.OutOfMemoryError", "out of memory", "")
    stage = replace(kept_run(error="OutOfMemoryError").stages[0], exception_details=details)
    assert row_of(replace(kept_run(), stages=(stage,))).outcome == "out of memory"


def test_a_processor_is_named_where_no_device_works() -> None:
    row = row_of(kept_run(device="cpu"))
    assert (row.device, row.hardware) == ("cpu", "EPYC")


def test_an_empty_run_has_a_row() -> None:
    row = row_of(Run("1", "x", "2026-01-01T00:00:00", 0.0))
    assert (row.pipeline, row.recipe, row.device, row.peak_bytes, row.loras) == (None, None, None, None, ())


def test_facts_changed_by_hand_do_not_fail() -> None:
    wild = {"pipeline": [], "call": 3, "recipe": "x", "lora_verdicts": 7, "files": "x", "performance": []}
    stage = Stage("generation", 0.0, 1.0, facts=wild)
    run = Run("1", "x", "2026-01-01T00:00:00", 1.0, stages=(stage,), facts={"comfyui": "x", "benchmark": []})
    assert row_of(run).outcome == "ok"


def test_impossible_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="seconds is nan"):
        row_of(Run("1", "x", "2026-01-01T00:00:00", float("nan")))


def test_the_recipe_is_that_of_the_request() -> None:
    digest = row_of(kept_run()).recipe
    assert digest is not None
    assert len(digest) == 16
    assert row_of(kept_run(seconds=99.0, device="cpu", source="elsewhere")).recipe == digest
    assert row_of(kept_run(prompt="1" * 64)).recipe != digest
    assert row_of(kept_run(steps=5)).recipe != digest
    assert row_of(kept_run(loras={"a": {"strength": [0.5]}})).recipe != digest


def test_the_recipe_is_the_same_whether_the_text_of_prompts_is_kept() -> None:
    run = kept_run()
    prompts = {"prompt": {"sha256": "0" * 64, "text": "a red fox"}}
    stage = replace(run.stages[0], facts={**run.stages[0].facts, "prompts": prompts})
    assert row_of(replace(run, stages=(stage,))).recipe == row_of(run).recipe


def test_a_prompt_of_comfyui_is_named_by_its_kinds_of_nodes_and_its_files() -> None:
    def prompt(*kinds: str) -> Run:
        nodes = [{"id": str(number), "class_type": kind} for number, kind in enumerate(kinds)]
        loader = Stage(
            "Loader",
            0.0,
            1.0,
            facts={"files": [{"file": "style.safetensors"}, {"file": "flux.safetensors"}]},
        )
        lora = Stage("LoraLoader", 0.0, 1.0, facts={"lora_verdicts": [{"lora": "sub\\style.safetensors"}]})
        generation = Stage("generation", 0.0, 2.0, children=(loader, lora), facts={"call": {}})
        return Run(
            "1",
            "ComfyUI",
            "2026-01-01T00:00:00",
            2.0,
            stages=(generation,),
            facts={"comfyui": {"nodes": nodes}},
        )

    row = row_of(prompt("A", "B"))
    assert row.pipeline is not None
    assert row.pipeline.startswith("ComfyUI ")
    assert row_of(prompt("B", "A")).pipeline == row.pipeline != row_of(prompt("A", "C")).pipeline
    assert (row.model, row.loras) == ("flux.safetensors", ("style.safetensors",))


def test_what_a_database_cannot_hold_is_replaced() -> None:
    row = row_of(kept_run(id="a\0b\ud800", source="x\n\x1b[31m"))
    assert row.id.encode()
    assert "\0" not in row.id
    assert row.model is not None
    assert row.model.isprintable()
