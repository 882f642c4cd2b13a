"""The same analysis the other way round, on real VAEs of small size."""

import io
import json
from typing import Any

import pytest
import torch
from rich.console import Console

from sigmascope.stages.latent_encoding import (
    analyze_latent_decoding_results,
    capture_latent_decoding_baseline,
    print_latent_decoding_analysis_summary,
)


def decode(vae: Any, latent: torch.Tensor) -> Any:
    with torch.no_grad():
        return vae.decode(latent)


def test_a_picture(make_vae: Any) -> None:
    vae, latent = make_vae("kl"), torch.randn(1, 4, 16, 24)
    baseline = capture_latent_decoding_baseline(vae, latent)
    found = analyze_latent_decoding_results(baseline, decode(vae, latent), 0.5, "direct")
    assert (found["encoding_success"], found["strategy_used"]) == (True, "Direct VAE Decoding")
    assert (found["pictures"]["height"], found["pictures"]["width"]) == (32, 48)
    assert found["latent_analysis"]["spatial_compression"] == 4.0
    assert found["performance_analysis"]["frames_per_second"] == 2.0
    assert found["findings"] == []
    assert json.dumps(found)


def test_a_video_of_wan(make_vae: Any) -> None:
    vae, latent = make_vae("wan"), torch.randn(1, 16, 3, 2, 2)
    baseline = capture_latent_decoding_baseline(vae, {"samples": latent})
    found = analyze_latent_decoding_results(baseline, decode(vae, latent), 0.5, "direct")
    assert found["pictures"]["length"] == 9
    assert found["latent_analysis"]["temporal_compression"] == 3.0
    assert found["latent_analysis"]["nominal_temporal_compression"] == 4.0
    assert found["latent_analysis"]["expected_shape"] == [16, 3, 2, 2]


def test_a_packed_latent_is_read_with_the_pictures_size(make_vae: Any) -> None:
    vae = make_vae("kl")
    packed = torch.randn(1, 8 * 12, 16)
    baseline = capture_latent_decoding_baseline(vae, packed, video_height=32, video_width=48)
    assert baseline["latent"] is not None
    assert baseline["latent"]["unpacked_shape"] == [1, 4, 16, 24]


def test_nan_pictures_are_a_failed_decoding(make_vae: Any) -> None:
    vae, latent = make_vae("kl"), torch.full((1, 4, 16, 24), float("nan"))
    baseline = capture_latent_decoding_baseline(vae, latent)
    found = analyze_latent_decoding_results(baseline, decode(vae, latent), 0.5, 1)
    assert found["encoding_success"] is False
    assert found["validation"]["input"]["passed"] is False
    assert [one["id"] for one in found["findings"]] == ["latent_not_finite", "pictures_not_finite"]


def test_no_pictures_are_a_failed_decoding(make_vae: Any) -> None:
    baseline = capture_latent_decoding_baseline(make_vae("kl"), torch.randn(1, 4, 16, 24))
    found = analyze_latent_decoding_results(baseline, None, 0.5, 1)
    assert found["error"] == "There are no pictures: no pictures were given."


@pytest.mark.parametrize("baseline", [None, {}, {"latent": None}])
def test_without_a_baseline_nothing_raises(baseline: Any) -> None:
    found = analyze_latent_decoding_results(baseline, torch.zeros(1, 3, 32, 48), 0.5, 1)
    assert found["pictures"]["height"] == 32
    assert found["latent_analysis"]["status"] == "missing"


def test_the_summary_says_that_it_is_a_decoding(make_vae: Any) -> None:
    vae, latent = make_vae("kl"), torch.randn(1, 4, 16, 24)
    baseline = capture_latent_decoding_baseline(vae, latent)
    found = analyze_latent_decoding_results(baseline, decode(vae, latent), 0.5, 1)
    file = io.StringIO()
    print_latent_decoding_analysis_summary(found, Console(file=file, width=100))
    text = file.getvalue()
    for words in ("LATENT DECODING ANALYSIS SUMMARY", "VAE Decoding Success: YES", "LATENT INPUT ANALYSIS"):
        assert words in text
