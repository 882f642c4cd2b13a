"""What the stages say of the text, the latents, the weights that were moved, and whose the peaks are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import generate, make_pipeline
from tests.families.pipelines import PROMPT
from tests.integrations.diffusers.marks import left_behind, marks
from torch import Tensor

import sigmascope
from sigmascope.integrations.diffusers.tokens import counts_seen, readings_of
from sigmascope.records.prompts import prompt_sha256

LONG = " ".join(["fox"] * 100)


def text_of(run: Any, side: str) -> dict[str, Any]:
    facts: dict[str, Any] = run.stage("text_encoding").facts["text_encoding"]["text_processing"][side]
    return facts


def test_tokens_are_counted_as_the_tokenizer_does(pipeline: Any) -> None:
    expected = len(pipeline.tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1)
    found = text_of(run, "positive")
    assert (found["token_count"], found["truncated_tokens"], found["token_limit"]) == (expected, 0, 75)
    assert "text.prompt_is_cut" not in {one.id for one in run.findings}
    assert found["text_sha256"] == prompt_sha256(PROMPT)


def test_a_prompt_that_is_cut_is_told_with_how_much(pipeline: Any) -> None:
    total = len(pipeline.tokenizer(LONG, add_special_tokens=False, verbose=False)["input_ids"])
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1, prompt=LONG)
    found = text_of(run, "positive")
    assert (found["token_count"], found["truncated_tokens"]) == (total, total - 75)
    assert found["unavailable"]["truncated_words"].startswith("the tokenizer was only watched")
    (finding,) = (one for one in run.findings if one.id == "text.prompt_is_cut")
    assert finding.evidence == {
        "prompt": "positive",
        "truncated_tokens": total - 75,
        "token_count": total,
        "token_limit": 75,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("family", "limit"), [("sd15", 75), ("sdxl", 75), ("sd3", 75), ("wan", 31)])
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_either_prompt_past_the_limit_is_a_finding(family: str, limit: int, side: str) -> None:
    pipe = make_pipeline(family)
    total = len(pipe.tokenizer(LONG, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])
    prompts: dict[str, Any] = {"prompt": LONG} if side == "positive" else {"negative_prompt": LONG}
    with sigmascope.watch(pipe) as run:
        generate(pipe, family, **prompts)
    (finding,) = (one for one in run.findings if one.id == "text.prompt_is_cut")
    assert finding.evidence == {
        "prompt": side,
        "truncated_tokens": total - limit,
        "token_count": total,
        "token_limit": limit,
    }


def test_the_tokenizer_is_asked_no_more_often_than_without_a_watch(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    kind = type(pipeline.tokenizer)
    encode = kind._encode_plus if hasattr(kind, "_encode_plus") else kind._batch_encode_plus

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(kind, encode.__name__, counted)
    generate(pipeline, "sd15", num_inference_steps=1)
    alone = len(calls)
    with sigmascope.watch(pipeline):
        generate(pipeline, "sd15", num_inference_steps=1)
    assert len(calls) == 2 * alone > 0


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_a_private_prompt_is_not_in_the_analysis(pipeline: Any, privacy: Any, tmp_path: Path) -> None:
    with sigmascope.watch(pipeline, prompts=privacy) as run:
        generate(pipeline, "sd15", num_inference_steps=1)
    run.save(tmp_path / "run.json")
    assert PROMPT not in (tmp_path / "run.json").read_text()
    assert text_of(run, "positive")["token_count"] > 0
    assert (text_of(run, "positive")["text_sha256"] is None) == (privacy == "none")


def test_a_full_sequence_that_was_never_seen_whole_is_not_called_uncut() -> None:
    class Tokenizer:
        model_max_length = 8

        def num_special_tokens_to_add(self) -> int:
            return 1

    asked = {"truncation": True, "padding": "max_length"}
    full = readings_of("t5", Tokenizer(), (["a b"],), asked, {"attention_mask": torch.ones(1, 8)})
    (count,), _ = counts_seen(full, ["a b"])
    assert count.truncated is None
    assert "reaches the tokenizer's limit" in count.unavailable["truncated_tokens"]
    short = readings_of("t5", Tokenizer(), ("a b",), asked, {"attention_mask": [1, 1, 1, 0, 0, 0, 0, 0]})
    (count,), _ = counts_seen(short, ["a b"])
    assert (count.tokens, count.truncated, count.limit) == (2, 0, 7)


def test_a_prompt_in_a_template_has_no_count_and_a_reason() -> None:
    assert counts_seen([], ["a fox"])[0] == []
    assert "template" in str(counts_seen([], ["a fox"])[1])


def test_each_encoder_has_a_stage_of_its_own_inside() -> None:
    pipeline = make_pipeline("flux")
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "flux")
    inner = [stage.name for stage in run.stage("text_encoding").children]
    assert inner == ["text_encoder", "text_encoder_2"]


def test_the_latent_s_compression_and_the_strategy_are_on_record(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1)
    analysis = run.stage("latent_decoding").facts["latent_decoding"]
    assert analysis["strategy_used"] == "Direct VAE Decoding"
    assert analysis["latent_analysis"]["spatial_compression"] == (32 * 32) / (16 * 16)
    assert analysis["success"] is True


def test_a_vae_that_works_in_tiles_says_so(pipeline: Any) -> None:
    pipeline.vae.enable_tiling()
    pipeline.vae.tile_latent_min_size, pipeline.vae.tile_sample_min_size = 8, 16
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1)
    assert run.stage("latent_decoding").facts["latent_decoding"]["strategy_used"] == "Tiled VAE Decoding"


def sequential(pipeline: Any) -> None:
    """Every weight on the CPU's own shelf, `meta` in the model, as `enable_sequential_cpu_offload` has it."""
    from accelerate import cpu_offload

    for name in ("unet", "vae", "text_encoder"):
        cpu_offload(getattr(pipeline, name), torch.device("cpu"), offload_buffers=True)


@pytest.mark.slow
def test_sequential_offload_is_watched_and_its_moves_are_timed(unwatched: Tensor) -> None:
    pipeline = make_pipeline("sd15")
    sequential(pipeline)
    assert torch.equal(generate(pipeline, "sd15"), unwatched)
    before = marks(pipeline)
    with sigmascope.watch(pipeline) as run:
        image = generate(pipeline, "sd15")
    assert torch.equal(image, unwatched)
    assert marks(pipeline) == before
    assert left_behind() == []
    denoising = run.stage("denoising")
    assert len(denoising.steps) == 2
    assert run.stage("generation").facts["pipeline"]["components"]["unet"]["offload"] == "sequential"
    moved = denoising.facts["weights_moved_in_steps"]
    assert len(moved) == 2
    assert all(0 < one < took for one, took in zip(moved, denoising.steps.seconds, strict=True))
    assert sum(moved) == pytest.approx(denoising.facts["weights_moved"]["seconds"])


def test_whole_models_that_are_moved_are_timed_where_they_are_used(unwatched: Tensor) -> None:
    pipeline = make_pipeline("sd15")
    pipeline.enable_model_cpu_offload(device="cpu")
    generate(pipeline, "sd15")
    with sigmascope.watch(pipeline) as run:
        assert torch.equal(generate(pipeline, "sd15"), unwatched)
    assert run.stage("denoising").facts["weights_moved"]["times"] > 0
    assert run.stage("latent_decoding").facts["weights_moved"]["times"] > 0


def test_without_offload_nothing_is_moved(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15", num_inference_steps=1)
    assert not [stage.name for stage in run.walk() if "weights_moved" in stage.facts]


def test_peaks_have_an_owner_in_every_stage(pipeline: Any) -> None:
    with sigmascope.watch(pipeline) as run:
        generate(pipeline, "sd15")
    assert run.facts["peak_owner"]["process"]["bytes"] == run.peak().rss_bytes
    owner = run.stage("denoising").facts["peak_owner"]["process"]
    assert (owner["stage"], owner["component"]) == ("generation/denoising", "unet")
    assert owner["component_bytes"] == sum(p.nbytes for p in pipeline.unet.parameters())
