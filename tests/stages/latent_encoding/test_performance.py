"""Sizes and rates of an encoding."""

from typing import Any

import pytest
import torch

from sigmascope.stages.latent_encoding import (
    _analyze_vae_encoding_performance,
    analyze_latent_generation_results,
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
