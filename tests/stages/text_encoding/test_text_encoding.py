"""The public functions on real encoders of small size."""

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import make_pipeline
from tests.families.family import FAMILIES
from torch import nn

import sigmascope
from sigmascope.records.memory import PeakMemory
from sigmascope.stages.text_encoding import (
    TextEncodingThresholds,
    analyze_text_encoding_results,
    capture_text_encoding_baseline,
)

Encode = Callable[[nn.Module, str], Any]
PROMPT, NEGATIVE = "a red fox, (detailed:1.2)", "blurry"
SEED_KEYS = {
    "encoding_success",
    "elapsed_time",
    "positive_conditioning",
    "negative_conditioning",
    "text_processing",
    "memory_impact",
    "peak_memory",
    "baseline",
    "current_memory",
    "performance",
    "model_state",
    "efficiency",
    "validation",
}


@pytest.fixture
def clip(make_clip: Any) -> nn.Module:
    model: nn.Module = make_clip()
    return model


@pytest.fixture
def analysis(clip: nn.Module, clip_tokenizer: Any, encode: Encode) -> dict[str, Any]:
    unet = nn.Linear(4, 4)
    baseline = capture_text_encoding_baseline(unet, clip, tokenizer=clip_tokenizer)
    positive, negative = encode(clip, PROMPT), encode(clip, NEGATIVE)
    return dict(analyze_text_encoding_results(baseline, positive, negative, PROMPT, NEGATIVE, 0.5))


def test_every_key_of_the_specification_is_there(analysis: dict[str, Any]) -> None:
    assert set(analysis) >= SEED_KEYS
    assert analysis["encoding_success"] is True


def test_the_conditioning_is_described(analysis: dict[str, Any], clip: nn.Module, encode: Encode) -> None:
    found, output = analysis["positive_conditioning"], encode(clip, PROMPT)
    tensor = output.last_hidden_state
    assert (found["status"], found["shape"], found["dtype"], found["device"]) == (
        "success",
        [1, 77, 32],
        "float32",
        "cpu",
    )
    assert (found["num_elements"], found["size_mb"]) == (77 * 32, 77 * 32 * 4 / 2**20)
    assert found["pooled"]["shape"] == [1, 32]
    assert found["statistics"]["std"] == pytest.approx(tensor.std().item())
    assert found["statistics"]["max"] == pytest.approx(tensor.max().item())
    assert found["statistics"]["nan_count"] == 0


def test_times_by_character_and_token(analysis: dict[str, Any], clip_tokenizer: Any) -> None:
    characters = len(PROMPT) + len(NEGATIVE)
    tokens = sum(len(clip_tokenizer(text)["input_ids"]) - 2 for text in (PROMPT, NEGATIVE))
    assert analysis["performance"]["time_per_character"] == pytest.approx(0.5 / characters)
    assert analysis["performance"]["time_per_token"] == pytest.approx(0.5 / tokens)
    assert analysis["efficiency"]["characters_per_second"] == pytest.approx(characters / 0.5)


def test_memory_by_character_is_that_of_the_conditionings(analysis: dict[str, Any]) -> None:
    nbytes = 2 * (77 * 32 + 32) * 4
    expected = nbytes / 2**20 / len(PROMPT + NEGATIVE)
    assert analysis["efficiency"]["memory_per_character_mb"] == pytest.approx(expected)


def test_an_analysis_is_plain_json(analysis: dict[str, Any]) -> None:
    assert json.loads(json.dumps(analysis))["text_processing"]["positive"]["text_content"] == PROMPT


def test_without_accelerator_gpu_figures_are_none(analysis: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert set(analysis["memory_impact"]["gpu"].values()) == {None}
    assert "no accelerator" in analysis["current_memory"]["unavailable"]["gpu"]


def test_times_measured_apart_and_peaks_are_taken_over(clip: nn.Module) -> None:
    baseline = capture_text_encoding_baseline(None, clip)
    found = analyze_text_encoding_results(
        baseline,
        torch.ones(1, 77, 32),
        None,
        "x",
        None,
        1.0,
        positive_seconds=0.7,
        peak_memory=PeakMemory(rss_bytes=2**20, rss_at_seconds=0.1),
    )
    assert found["performance"]["positive_encoding_time"] == 0.7
    assert found["peak_memory"] is not None
    assert found["peak_memory"]["process"] == {"peak_rss_mb": 1.0, "peak_rss_at_seconds": 0.1}


def test_a_missing_negative_is_no_failure(clip: nn.Module) -> None:
    found = analyze_text_encoding_results(None, torch.ones(1, 77, 32), None, "x", None, 1.0)
    assert found["encoding_success"]
    assert found["negative_conditioning"]["status"] == "missing"


def test_token_ids_in_place_of_a_conditioning_are_called_what_they_are() -> None:
    found = analyze_text_encoding_results(None, torch.ones(1, 77, dtype=torch.long), None, "x", None, 0.1)
    assert found["error"] == "positive: no embeddings were found in it, but (1, 77) int64"


def test_an_encoder_that_raises_is_on_record(clip: nn.Module) -> None:
    baseline = capture_text_encoding_baseline(None, clip)
    with pytest.raises(AttributeError) as raised:
        clip("no ids")
    error = raised.value
    found = analyze_text_encoding_results(baseline, None, None, "x", "", 0.1, error=error)
    assert not found["encoding_success"]
    assert found["error"] == f"{type(error).__name__}: {error}"
    assert found["exception_details"] is not None
    assert "Traceback" in found["exception_details"]["traceback"]


def test_nan_in_the_output_is_a_failure() -> None:
    tensor = torch.ones(1, 77, 32)
    tensor[0, 3, :2] = torch.nan
    found = analyze_text_encoding_results(None, tensor, None, "x", None, 0.1)
    assert not found["encoding_success"]
    assert found["error"] == "positive: 2 of 2464 elements are NaN"
    assert found["positive_conditioning"]["statistics"] is not None
    assert found["positive_conditioning"]["statistics"]["nan_count"] == 2


@pytest.mark.parametrize("seconds", [None, -1.0, float("nan"), float("inf"), "soon", True])
def test_a_time_that_is_none_is_unknown(seconds: object) -> None:
    found = analyze_text_encoding_results(None, torch.ones(1, 77, 32), None, "x", None, seconds)
    assert found["elapsed_time"] is None
    assert found["performance"]["time_per_character"] is None
    assert "elapsed_time" in found["unavailable"]


def test_an_empty_prompt_has_no_rate_and_no_error(clip_tokenizer: Any, clip: nn.Module) -> None:
    baseline = capture_text_encoding_baseline(None, clip, tokenizer=clip_tokenizer)
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 32), None, "", None, 0.1)
    assert found["encoding_success"]
    assert found["performance"]["unavailable"]["time_per_character"] == "there are no characters"


@pytest.mark.parametrize("baseline", [None, {}, {"clip": 7}, {"references": "from a file"}])
def test_a_foreign_baseline_does_no_harm(baseline: Any) -> None:
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 768), None, "x", None, 0.1)
    assert found["memory_impact"] is None
    assert found["unavailable"]["memory_impact"] == "there is no baseline"
    assert found["positive_conditioning"]["clip_variant"] == "SD 1.5 CLIP"


def test_objects_that_raise_whatever_they_like_do_no_harm() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt if name == "nothing" else LookupError(name)

        def __iter__(self) -> Any:
            raise ZeroDivisionError

    class HostileMapping(dict[str, Any]):
        def items(self) -> Any:
            raise NotImplementedError("not today")

    baseline = capture_text_encoding_baseline(Hostile(), Hostile())
    found = analyze_text_encoding_results(baseline, HostileMapping(a=1), Hostile(), "x", Hostile(), 0.1)
    assert found["positive_conditioning"]["status"] == "failed"
    assert not found["encoding_success"]


def test_a_baseline_keeps_no_model_alive(make_clip: Any) -> None:
    model = make_clip(48)
    reference = weakref.ref(model)
    baseline = capture_text_encoding_baseline(None, model)
    del model
    gc.collect()
    assert reference() is None
    found = analyze_text_encoding_results(baseline, None, None, "x", None, 0.1)
    assert "gone" in found["model_state"]["clip"]["unavailable"]["model_id"]


def test_an_analysis_keeps_no_tensor_alive() -> None:
    tensor = torch.ones(1, 77, 32)
    reference = weakref.ref(tensor)
    found = analyze_text_encoding_results(None, [[tensor, {}]], None, "x", None, 0.1)
    del tensor
    gc.collect()
    assert reference() is None
    assert found["encoding_success"]


def test_a_model_that_changed_is_noticed(clip: nn.Module) -> None:
    baseline = capture_text_encoding_baseline(None, clip)
    clip.half()
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 32), None, "x", None, 0.1)
    clip.float()
    assert found["model_state"]["clip"]["changed"] == ["dtype"]
    assert found["validation"]["compatibility"]["clip_model"]["passed"] is False


def test_encoders_in_a_mapping_are_compared_with_before(make_clip: Any) -> None:
    pair = {"text_encoder": make_clip(), "text_encoder_2": make_clip(projection=True)}
    baseline = capture_text_encoding_baseline(None, pair)
    same = analyze_text_encoding_results(baseline, torch.ones(1, 77, 64), None, "x", None, 0.1)
    pair["text_encoder_2"].half()
    other = analyze_text_encoding_results(baseline, torch.ones(1, 77, 64), None, "x", None, 0.1)
    assert same["model_state"]["clip"]["changed"] == []
    assert same["validation"]["compatibility"]["clip_model"]["passed"] is True
    assert other["model_state"]["clip"]["changed"] == ["dtype"]


def test_encoders_in_a_mapping_are_not_kept_alive(make_clip: Any) -> None:
    model = make_clip()
    reference = weakref.ref(model)
    baseline = capture_text_encoding_baseline(None, {"text_encoder": model})
    del model
    gc.collect()
    assert reference() is None
    found = analyze_text_encoding_results(baseline, None, None, "x", None, 0.1)
    assert found["model_state"]["clip"]["model_id"] is None


def test_comfyui_patches_are_counted(make_comfy_clip: Any) -> None:
    clip = make_comfy_clip(clip_l=8)
    baseline = capture_text_encoding_baseline(clip.patcher, clip)
    assert (baseline["clip"]["patches_count"], baseline["clip"]["patches_uuid"]) == (0, "uuid-1")
    clip.patcher.patches["x"] = []
    clip.patcher.patches_uuid = "uuid-2"
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 8), None, "x", None, 0.1)
    for state in (found["model_state"]["clip"], found["model_state"]["unet"]):
        assert state["changed"] == ["patches_count", "patches_uuid"]


def test_the_tokenizer_of_a_comfyui_clip_is_used(make_comfy_clip: Any) -> None:
    baseline = capture_text_encoding_baseline(None, make_comfy_clip(clip_l=8))
    clip = make_comfy_clip(clip_l=8)
    baseline = capture_text_encoding_baseline(None, clip)
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 8), None, "one two three", None, 0.1)
    assert found["text_processing"]["positive"]["token_count"] == 3
    assert not [note for note in found["validation"]["notes"] if "plain text" in note]


def test_private_prompts_appear_nowhere(clip: nn.Module, clip_tokenizer: Any) -> None:
    secret = "the secret unicorn " * 60
    baseline = capture_text_encoding_baseline(None, clip, tokenizer=clip_tokenizer)
    cond = [[torch.ones(1, 77, 32), {"text": secret, "strength": 1.0}]]
    error = ValueError(f"cannot encode {secret}")
    for privacy in ("hash", "none"):
        found = analyze_text_encoding_results(
            baseline, cond, None, secret, None, 0.1, error=error, prompt_privacy=privacy
        )
        assert "unicorn" not in json.dumps(found)
        assert found["text_processing"]["positive"]["truncated_tokens"]


def test_conditionings_are_dumped_where_asked(tmp_path: Path, clip: nn.Module) -> None:
    dumps = sigmascope.TensorDumps(tmp_path, run_id="r1")
    cond = [[torch.arange(77 * 32.0).reshape(1, 77, 32), {"pooled_output": torch.ones(1, 32)}]]
    baseline = capture_text_encoding_baseline(None, clip)
    found = analyze_text_encoding_results(baseline, cond, None, "a secret", None, 0.1, dumps=dumps)
    path = found["positive_conditioning"]["tensor_dump"]
    assert path is not None
    saved = sigmascope.load_tensors(path)
    assert any(torch.equal(tensor, cond[0][0]) for tensor in saved.values())  # type: ignore[arg-type]
    assert b"a secret" not in Path(path).read_bytes()
    assert found["negative_conditioning"]["unavailable"]["tensor_dump"] == "no conditioning was given"


def test_dumps_of_two_pipelines_have_the_same_names(tmp_path: Path) -> None:
    from sigmascope.analysis.tensor_comparison import compare_runs

    embeds, pooled = torch.randn(1, 77, 8), torch.randn(1, 12)
    comfyui = [[embeds, {"pooled_output": pooled, "strength": 0.8}]]
    diffusers = (embeds.bfloat16(), embeds + 1, pooled.bfloat16(), pooled + 1)
    runs = [sigmascope.TensorDumps(tmp_path / name) for name in ("comfyui", "diffusers")]
    for run, cond in zip(runs, (comfyui, diffusers[::2]), strict=True):
        analyze_text_encoding_results(None, cond, None, "a fox", None, 0.1, dumps=run)
    found = compare_runs(runs[0], runs[1]).dumps["positive_conditioning"]
    assert [pair.name_a for pair in found.pairs] == ["embeddings", "pooled"]
    assert found.verdict == "rounding"


def test_a_dump_keeps_what_was_around_the_tensors(tmp_path: Path) -> None:
    regions = [
        [torch.ones(1, 77, 8), {}],
        [torch.ones(1, 77, 8), {"strength": 0.5, "mask": torch.ones(1, 8, 8)}],
    ]
    dumps = sigmascope.TensorDumps(tmp_path)
    analyze_text_encoding_results(None, regions, None, "a fox", None, 0.1, dumps=dumps)
    dump = dumps["positive_conditioning"]
    assert list(dump) == ["embeddings", "entry_2.embeddings", "entry_2.other.mask"]
    assert dump.metadata.metadata["entries"] == [{}, {"strength": 0.5}]
    assert dump.metadata.metadata["structure"] == "comfyui"


def test_a_dump_that_fails_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    dumps = sigmascope.TensorDumps(tmp_path / "file")
    found = analyze_text_encoding_results(None, torch.ones(1, 77, 8), None, "x", None, 0.1, dumps=dumps)
    assert found["encoding_success"]
    assert "WriteError" in found["positive_conditioning"]["unavailable"]["tensor_dump"]


def failing(thresholds: TextEncodingThresholds, **changes: Any) -> set[str]:
    cond = changes.get("cond", torch.full((1, 77, 32), 3.0))
    negative = changes.get("negative")
    baseline = capture_text_encoding_baseline(None, None, tokenizer=changes.get("tokenizer"))
    found = analyze_text_encoding_results(
        baseline, cond, negative, changes.get("prompt", "a red fox"), None, 2.0, thresholds=thresholds
    )
    validation = found["validation"]
    checks = {**validation, **validation["compatibility"]}
    failed = {
        name for name, check in checks.items() if isinstance(check, dict) and check.get("passed") is False
    }
    assert validation["success"] == (not failed)
    return failed


@pytest.mark.parametrize(
    ("limits", "changes", "expected"),
    [
        ({}, {}, set()),
        ({"max_seconds": 1.9}, {}, {"performance"}),
        ({"max_seconds": 2.0}, {}, set()),
        ({"max_prompt_characters": 8}, {}, {"input"}),
        ({"allow_empty_prompt": False}, {"prompt": ""}, {"input"}),
        ({}, {"prompt": 7}, {"input"}),
        ({"max_absolute_value": 2.0}, {}, {"output"}),
        ({}, {"cond": torch.zeros(1, 77, 32)}, {"output"}),
        ({}, {"cond": {"no": "tensor"}}, {"output"}),
        ({"expected_width": 64}, {}, {"tensor_dimensions"}),
        ({"expected_tokens": 154}, {}, {"tensor_dimensions"}),
        ({"expected_dtype": "bfloat16"}, {}, {"tensor_dimensions"}),
        ({}, {"negative": torch.ones(1, 77, 16)}, {"tensor_dimensions"}),
        ({"expected_device": "cuda"}, {}, {"device_placement"}),
        ({"expected_device": "cpu"}, {}, set()),
        ({"max_ram_percent": 0.0}, {}, {"memory_threshold"}),
        ({"max_rss_growth_mb": -1e9}, {}, {"memory_threshold"}),
    ],
)
def test_each_threshold_is_held(limits: dict[str, Any], changes: dict[str, Any], expected: set[str]) -> None:
    assert failing(TextEncodingThresholds(**limits), **changes) == expected


def test_tokens_cut_off_fail_the_input_unless_allowed(clip_tokenizer: Any) -> None:
    long = {"prompt": "fox " * 200, "tokenizer": clip_tokenizer}
    assert failing(TextEncodingThresholds(), **long) == {"input"}
    assert failing(TextEncodingThresholds(max_truncated_tokens=None), **long) == set()


def test_a_width_that_the_encoder_does_not_give_fails(clip: nn.Module) -> None:
    baseline = capture_text_encoding_baseline(None, {"text_encoder": clip})
    found = analyze_text_encoding_results(baseline, torch.ones(1, 77, 48), None, "x", None, 0.1)
    check = found["validation"]["compatibility"]["tensor_dimensions"]
    assert check["messages"] == ["positive: width 48, but the encoder gives 32"]


def test_weights_that_are_plain_text_are_noted(analysis: dict[str, Any]) -> None:
    notes = analysis["validation"]["notes"]
    assert "positive: weights such as (red:1.3) are plain text to this tokenizer" in notes


def test_values_that_were_not_read_are_noted() -> None:
    found = analyze_text_encoding_results(None, torch.ones(1, 77, 8), None, "x", None, 0.1, statistics=False)
    assert found["encoding_success"]
    assert "positive: not checked for NaN and Inf (not asked for)" in found["validation"]["notes"]


def test_outputs_are_the_same_bit_for_bit_and_no_hook_is_left(
    clip: nn.Module, clip_tokenizer: Any, encode: Encode
) -> None:
    alone = encode(clip, PROMPT).last_hidden_state
    state = torch.get_rng_state()
    baseline = capture_text_encoding_baseline(None, clip, tokenizer=clip_tokenizer)
    watched = encode(clip, PROMPT).last_hidden_state
    copy = watched.clone()
    analyze_text_encoding_results(baseline, watched, None, PROMPT, None, 0.1)
    assert torch.equal(alone, watched)
    assert torch.equal(copy, watched)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in clip.modules())


@pytest.mark.parametrize("kind", ["projection", "t5", "umt5", "qwen"])
def test_every_encoder(kind: str, make_clip: Any, make_t5: Any, qwen: nn.Module, t5_tokenizer: Any) -> None:
    models = {
        "projection": lambda: make_clip(projection=True),
        "t5": make_t5,
        "umt5": lambda: make_t5(umt5=True),
        "qwen": lambda: qwen,
    }
    families = {"projection": "CLIP", "t5": "T5", "umt5": "UMT5", "qwen": "Qwen2.5-VL"}
    model = models[kind]()
    baseline = capture_text_encoding_baseline(None, model, tokenizer=t5_tokenizer)
    with torch.no_grad():
        output = model(t5_tokenizer("a red fox", return_tensors="pt")["input_ids"])
    found = analyze_text_encoding_results(baseline, output, None, "a red fox", None, 0.1)
    assert found["encoding_success"]
    assert found["positive_conditioning"]["encoder_family"] == families[kind]
    assert found["validation"]["success"]


@pytest.mark.parametrize("family", ["sdxl", "sd3", "flux"])
def test_the_first_encoder_of_a_pipeline_alone_is_no_failure(family: str) -> None:
    pipe = make_pipeline(family)
    texts = ("a fox", None) if family != "sd3" else ("a fox", None, None)
    embeddings = pipe.encode_prompt(*texts, device="cpu")[0]
    baseline = capture_text_encoding_baseline(getattr(pipe, FAMILIES[family].denoiser), pipe.text_encoder)
    found = analyze_text_encoding_results(baseline, embeddings, None, "a fox", None, 0.1)
    assert embeddings.shape[-1] > pipe.text_encoder.config.hidden_size
    assert found["validation"]["success"] is True
