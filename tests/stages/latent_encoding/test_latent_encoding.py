"""The public functions of the stage on real VAEs of small size."""

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

import sigmascope
from sigmascope.records.latents import EncodingRecord, StrategyAttempt
from sigmascope.records.memory import PeakMemory
from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
    print_latent_generation_analysis_summary,
)

SEED_KEYS = {
    "encoding_success",
    "elapsed_time",
    "strategy_used",
    "latent_analysis",
    "performance_analysis",
    "memory_impact",
    "immediate_gpu_changes",
    "peak_memory",
    "baseline",
    "current_memory",
}
PICTURES = torch.linspace(-1, 1, 2 * 3 * 32 * 48).reshape(2, 3, 32, 48)


@pytest.fixture
def vae(make_vae: Any) -> Any:
    return make_vae("kl")


@pytest.fixture
def analysis(vae: Any, encode_pixels: Any) -> dict[str, Any]:
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    latent = encode_pixels(vae, PICTURES)
    return dict(analyze_latent_generation_results(baseline, latent, 0.5, "Direct VAE Encoding"))


def printed(analysis: Any) -> str:
    file = io.StringIO()
    print_latent_generation_analysis_summary(analysis, Console(file=file, width=100))
    return file.getvalue()


def test_every_key_of_the_specification_is_there(analysis: dict[str, Any]) -> None:
    assert set(analysis) >= SEED_KEYS
    assert analysis["encoding_success"] is True


def test_sizes_of_the_pictures_are_those_the_baseline_saw(analysis: dict[str, Any]) -> None:
    dimensions = analysis["performance_analysis"]["video_dimensions"]
    assert dimensions == {"length": 2, "height": 32, "width": 48}
    assert analysis["performance_analysis"]["input_mb"] == 2 * 3 * 32 * 48 * 4 / 2**20
    assert analysis["performance_analysis"]["total_mb"] == 2 * 3 * 32 * 48 / 2**20


def test_sizes_that_the_caller_names_come_first(vae: Any) -> None:
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    found = analyze_latent_generation_results(baseline, torch.zeros(1, 4, 8, 8), 1.0, 1, None, 1, 16, 16)
    assert found["performance_analysis"]["video_dimensions"] == {"length": 1, "height": 16, "width": 16}
    assert found["encoding_success"]


def test_the_vae_is_described_and_unchanged(analysis: dict[str, Any]) -> None:
    assert (analysis["vae"]["class_name"], analysis["vae"]["latent_channels"]) == ("AutoencoderKL", 4)
    assert analysis["model_state"]["vae"]["changed"] == []
    assert analysis["validation"]["vae"]["passed"] is True


def test_an_analysis_is_plain_json(analysis: dict[str, Any]) -> None:
    assert json.loads(json.dumps(analysis))["latent_analysis"]["shape"] == [2, 4, 16, 24]


def test_the_public_names_are_the_stages() -> None:
    assert sigmascope.capture_latent_generation_baseline is capture_latent_generation_baseline
    assert sigmascope._analyze_latent_output is not None


def test_an_analysis_without_a_baseline_says_so() -> None:
    found = analyze_latent_generation_results(
        None, torch.zeros(1, 4, 64, 64), 2.0, "direct", None, 1, 512, 512
    )
    assert found["encoding_success"]
    assert found["memory_impact"] is None
    assert found["unavailable"]["memory_impact"] == "there is no baseline"
    assert found["strategy_used"] == "Direct VAE Encoding"


def test_a_baseline_from_a_file_does_nearly_as_well(vae: Any, encode_pixels: Any) -> None:
    baseline: dict[str, Any] = dict(capture_latent_generation_baseline(vae, PICTURES))
    del baseline["references"]
    read = json.loads(json.dumps(baseline))
    found = analyze_latent_generation_results(read, encode_pixels(vae, PICTURES), 0.5, 1)
    assert found["latent_analysis"]["spatial_compression"] == 4.0
    assert found["memory_impact"] is not None
    assert found["memory_impact"]["ram"]["baseline_used_mb"] == pytest.approx(
        baseline["memory"]["ram"]["used_mb"]
    )


@pytest.mark.parametrize(
    ("told", "name", "number"),
    [
        ("Direct VAE Encoding", "Direct VAE Encoding", 1),
        ("Direct VAE Encoding (Strategy 1)", "Direct VAE Encoding (Strategy 1)", 1),
        ("tiled", "Tiled VAE Encoding", 2),
        (3, "CPU Fallback Encoding", 3),
        ("CPU fallback", "CPU fallback", 3),
        ("Emergency Dummy Latents", "Emergency Dummy Latents", 4),
        ("my own way", "my own way", None),
        (None, None, None),
        (0, None, None),
        (True, None, None),
    ],
)
def test_strategies_by_name_number_and_word(told: Any, name: str | None, number: int | None) -> None:
    found = analyze_latent_generation_results(None, torch.zeros(1, 4, 8, 8), 1.0, told)
    assert (found["strategy_used"], found["strategy_number"]) == (name, number)


def test_the_record_of_an_encoding_fills_what_is_not_given() -> None:
    peak = PeakMemory(rss_bytes=2**20, rss_at_seconds=0.5)
    attempts = (
        StrategyAttempt("direct", "failed", 1.0, "CUDA out of memory", "OutOfMemoryError", "cuda:0", peak),
        StrategyAttempt("tiled", "succeeded", 2.0, device="cuda:0", peak=PeakMemory(2**21, 0.5)),
    )
    record = EncodingRecord(success=True, strategy="tiled", attempts=attempts, seconds=3.0)
    found = analyze_latent_generation_results(None, torch.zeros(1, 4, 8, 8), None, None, record=record)
    assert (found["elapsed_time"], found["strategy_used"]) == (3.0, "Tiled VAE Encoding")
    assert [one["name"] for one in found["strategies"]] == ["Direct VAE Encoding", "Tiled VAE Encoding"]
    assert found["peak_memory"] is not None
    assert found["peak_memory"]["process"] == {"peak_rss_mb": 2.0, "peak_rss_at_seconds": 1.5}


def test_dummy_latents_are_no_success_and_a_critical_finding(vae: Any) -> None:
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    found = analyze_latent_generation_results(
        baseline, torch.zeros(2, 4, 16, 24), 1.0, "Emergency Dummy Latents"
    )
    assert (found["encoding_success"], found["dummy"], found["latent_analysis"]["status"]) == (
        False,
        True,
        "dummy",
    )
    assert found["findings"][0]["severity"] == "critical"
    assert "not an encoding" in found["findings"][0]["message"]
    text = printed(found)
    assert "NOT REAL: this is a placeholder" in text
    assert "Status: DUMMY" in text


def test_what_the_vae_raised_is_on_record() -> None:
    try:
        raise RuntimeError("expected 3 channels, got 4")
    except RuntimeError as error:
        found = analyze_latent_generation_results(None, None, 0.1, 1, error=error)
    assert found["error"] == "RuntimeError: expected 3 channels, got 4"
    assert found["exception_details"] is not None
    assert "raise RuntimeError" in found["exception_details"]["traceback"]
    assert "expected 3 channels" in printed(found)


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_vae_that_offloading_moves_has_not_changed(offloaded: bool) -> None:
    from accelerate.hooks import CpuOffload, add_hook_to_module
    from diffusers import AutoencoderTiny

    sizes = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    vae = AutoencoderTiny(**sizes, num_encoder_blocks=(1,), num_decoder_blocks=(1,))
    if offloaded:
        add_hook_to_module(vae, CpuOffload(execution_device="meta"))
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    vae.to("meta")
    found = analyze_latent_generation_results(baseline, torch.zeros(2, 4, 32, 48), 1.0, 1)
    assert ("vae_changed" in {one["id"] for one in found["findings"]}) is not offloaded


def test_a_vae_that_was_moved_or_cast_is_found_out(make_vae: Any) -> None:
    from diffusers import AutoencoderTiny

    sizes = {"encoder_block_out_channels": (8,), "decoder_block_out_channels": (8,)}
    vae = AutoencoderTiny(**sizes, num_encoder_blocks=(1,), num_decoder_blocks=(1,))
    baseline = capture_latent_generation_baseline(vae, PICTURES)
    vae.half()
    found = analyze_latent_generation_results(baseline, torch.zeros(2, 4, 32, 48), 1.0, 1)
    (finding,) = [one for one in found["findings"] if one["id"] == "vae_changed"]
    assert finding["evidence"] == {"dtype": "float32 → float16"}
