"""Sizes and rates of an encoding."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from sigmascope.stages.latent_encoding import (
    _analyze_vae_encoding_performance,
    analyze_latent_decoding_results,
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
    print_latent_generation_analysis_summary,
    print_latent_generation_start,
)


def test_the_seeds_figures() -> None:
    found = _analyze_vae_encoding_performance(2.45, "Direct VAE Encoding", 16, 512, 512)
    assert (found["total_pixels"], found["total_mb"]) == (4_194_304, 12.0)
    assert found["frames_per_second"] == pytest.approx(6.53, abs=0.005)
    assert found["mb_per_second"] == pytest.approx(4.898, abs=0.0005)


def test_what_is_unknown_of_the_video_is_named() -> None:
    found = _analyze_vae_encoding_performance(2.0, None, 16, None, 512)
    assert found["unavailable"]["total_mb"] == "unknown of the video: height"
    assert found["frames_per_second"] == 8.0
    assert found["pixels_per_second"] is None


# Four pictures of 96x168 are 64,512 pixels; two videos of 9 frames of 32x48 are 27,648. Both took 2 s.
@pytest.mark.parametrize("named", [(None, None, None), (1, 96, 168), (4, 96, 168)])
def test_pictures_of_a_batch_all_count(named: Any) -> None:
    baseline = capture_latent_generation_baseline(None, torch.zeros(4, 3, 96, 168))
    found = analyze_latent_generation_results(baseline, torch.zeros(4, 4, 12, 21), 2.0, 1, None, *named)
    speed = found["performance_analysis"]
    assert (speed["total_pixels"], speed["frames_per_second"]) == (64_512, 2.0)
    assert speed["total_mb"] == 4 * 96 * 168 * 3 / 2**20


def test_pictures_of_a_batch_count_without_a_baseline() -> None:
    found = analyze_latent_generation_results(None, torch.zeros(4, 4, 12, 21), 2.0, 1, None, 1, 96, 168)
    assert found["performance_analysis"]["total_pixels"] == 64_512


@pytest.mark.parametrize("named", [(None, None, None), (9, 32, 48)])
def test_videos_of_a_batch_all_count(named: Any) -> None:
    baseline = capture_latent_generation_baseline(None, torch.zeros(2, 3, 9, 32, 48))
    found = analyze_latent_generation_results(baseline, torch.zeros(2, 16, 3, 4, 6), 2.0, 1, None, *named)
    speed = found["performance_analysis"]
    assert (speed["total_pixels"], speed["frames_per_second"]) == (27_648, 9.0)
    assert speed["video_dimensions"] == {"length": 9, "height": 32, "width": 48}


def test_decoded_videos_of_a_batch_all_count() -> None:
    found = analyze_latent_decoding_results(None, torch.zeros(2, 3, 9, 32, 48), 2.0, 1)
    assert found["performance_analysis"]["frames_per_second"] == 9.0


def test_frames_that_a_caller_names_count_where_the_pictures_are_others() -> None:
    baseline = capture_latent_generation_baseline(None, torch.zeros(1, 3, 84, 16, 16))
    found = analyze_latent_generation_results(baseline, torch.zeros(1, 16, 21, 2, 2), 9.0, 1, None, 81)
    assert found["performance_analysis"]["frames_per_second"] == 9.0


@pytest.mark.parametrize(
    ("shape", "length", "words"),
    [((4, 3, 96, 168), 1, "4 frames, 168x96"), ((2, 3, 9, 32, 48), 9, "18 frames, 48x32")],
)
def test_the_line_at_the_start_and_the_summary_agree(shape: Any, length: int, words: str) -> None:
    baseline = capture_latent_generation_baseline(None, torch.zeros(shape))
    found = analyze_latent_generation_results(baseline, torch.zeros(shape[0], 4, 4, 4), 2.0, 1, None, length)
    before, after = io.StringIO(), io.StringIO()
    print_latent_generation_start(baseline, console=Console(file=before, width=100))
    print_latent_generation_analysis_summary(found, Console(file=after, width=100))
    assert f"Video Dimensions: {words}" in before.getvalue()
    assert f"Video Dimensions: {words}" in after.getvalue()


@pytest.mark.parametrize("seconds", [None, "2", -1.0, float("nan"), True])
def test_times_that_are_none_give_no_rates(seconds: Any) -> None:
    found = analyze_latent_generation_results(None, torch.zeros(1, 4, 8, 8), seconds, 1, None, 1, 64, 64)
    assert found["elapsed_time"] is None
    assert found["performance_analysis"]["frames_per_second"] is None
    assert found["performance_analysis"]["unavailable"]["frames_per_second"]


def test_no_measurable_time_gives_no_rates() -> None:
    found = analyze_latent_generation_results(None, torch.zeros(1, 4, 8, 8), 0, 1, None, 1, 64, 64)
    assert found["elapsed_time"] == 0.0
    assert found["performance_analysis"]["pixels_per_second"] is None
