"""What is said about bad pictures, bad latents and strategies that gave way."""

from typing import Any

import numpy as np
import pytest
import torch

from sigmascope.records.latents import (
    EncodingRecord,
    StrategyAttempt,
    TileFacts,
    VaeFacts,
    findings_of_record,
)
from sigmascope.records.run import Finding
from sigmascope.stages.latent_encoding import (
    analyze_latent_generation_results,
    capture_latent_generation_baseline,
)

WAN = {"class_name": "AutoencoderKLWan", "latent_channels": 16, "image_channels": 3, "spatial_factor": 8}
WAN |= {"temporal_factor": 4, "first_frame_apart": True, "is_video": True, "source": "config"}


def findings(pictures: Any, latent: Any, vae: Any = None) -> dict[str, dict[str, Any]]:
    baseline = dict(capture_latent_generation_baseline(vae, pictures))
    found = analyze_latent_generation_results(baseline, latent, 1.0, 1)
    return {one["id"]: one for one in found["findings"]}


def findings_for_wan(pictures: Any, latent: Any) -> dict[str, dict[str, Any]]:
    baseline = {**capture_latent_generation_baseline(None, pictures), "vae": WAN}
    found = analyze_latent_generation_results(baseline, latent, 1.0, 1)
    return {one["id"]: one for one in found["findings"]}


def test_good_pictures_and_latents_have_none(make_vae: Any, encode_pixels: Any) -> None:
    pictures = torch.rand(1, 3, 32, 32)
    assert findings(pictures, encode_pixels(make_vae("kl"), pictures), make_vae("kl")) == {}


@pytest.mark.parametrize("pictures", [[], torch.zeros(0, 3, 64, 64)])
def test_zero_frames(pictures: Any) -> None:
    assert findings(pictures, torch.rand(1, 4, 8, 8))["pictures_empty"]["severity"] == "error"


def test_nan_frames() -> None:
    pictures = torch.zeros(2, 3, 8, 8)
    pictures[1, 0] = float("nan")
    finding = findings(pictures, torch.rand(2, 4, 1, 1))["pictures_not_finite"]
    assert (finding["severity"], finding["evidence"]) == ("error", {"NaN": 64})


def test_mixed_sizes() -> None:
    frames = [np.zeros((64, 48, 3), np.uint8), np.zeros((32, 32, 3), np.uint8)]
    finding = findings(frames, torch.rand(1, 4, 8, 6))["pictures_of_mixed_sizes"]
    assert "48x64, 32x32" in finding["message"]


def test_bytes_as_floats_are_out_of_range_and_recognised() -> None:
    finding = findings(torch.full((1, 3, 8, 8), 200.0), torch.rand(1, 4, 1, 1))["pictures_out_of_range"]
    assert "divide by 255" in finding["advice"]


@pytest.mark.parametrize("values", [(-1.0, 1.0), (0.0, 1.0), (-1.02, 1.02)])
def test_usual_ranges_are_no_finding(values: tuple[float, float]) -> None:
    pictures = torch.tensor(values).repeat(96).reshape(1, 3, 8, 8)
    assert "pictures_out_of_range" not in findings(pictures, torch.rand(1, 4, 1, 1))


def test_odd_sizes_are_a_note() -> None:
    finding = findings_for_wan(torch.zeros(5, 3, 66, 64), torch.rand(1, 16, 2, 8, 8))["pictures_cut"]
    assert (finding["severity"], finding["evidence"]) == ("info", {"factor": 8, "height": 2, "width": 0})


def test_frames_beyond_a_causal_vaes_are_a_note() -> None:
    found = findings_for_wan(torch.zeros(3, 16, 64, 64), torch.rand(1, 16, 4, 8, 8))
    assert found["frames_cut"]["evidence"] == {"frames": 16, "over": 3, "factor": 4}
    assert "frames_cut" not in findings_for_wan(torch.zeros(3, 17, 64, 64), torch.rand(1, 16, 5, 8, 8))


def test_nan_latents_in_float16_point_to_the_type() -> None:
    latent = torch.rand(1, 4, 8, 8).half()
    latent[0, 0, 0, 0] = float("nan")
    finding = findings(None, latent)["latent_not_finite"]
    assert (finding["severity"], finding["evidence"]) == ("error", {"NaN": 1, "elements": 256})
    assert "float32 or bfloat16" in finding["advice"]


@pytest.mark.parametrize("shape", [(1, 4, 9, 9), (1, 5, 16, 16), (2, 4, 16, 16, 3), (1, 4, 8, 16)])
def test_garbage_shapes(make_vae: Any, shape: tuple[int, ...]) -> None:
    finding = findings(torch.zeros(1, 3, 32, 32), torch.rand(shape), make_vae("kl"))
    assert finding["latent_shape_unexpected"]["evidence"]["expected"] == "4x16x16"


@pytest.mark.parametrize(("frames", "latent_frames", "wrong"), [(8, 2, False), (8, 3, False), (9, 4, True)])
def test_a_latent_frame_of_a_chunk_that_is_not_full_is_no_garbage(
    frames: int, latent_frames: int, wrong: bool
) -> None:
    found = findings_for_wan(torch.zeros(frames, 3, 32, 32), torch.rand(1, 16, latent_frames, 4, 4))
    assert ("latent_shape_unexpected" in found) == wrong


@pytest.mark.parametrize("shape", [(1, 4, 16, 17), (1, 16, 8, 8), (1, 4, 1, 16, 16)])
def test_rounding_up_patches_and_a_frame_of_one_are_no_garbage(make_vae: Any, shape: tuple[int, ...]) -> None:
    assert "latent_shape_unexpected" not in findings(
        torch.zeros(1, 3, 32, 32), torch.rand(shape), make_vae("kl")
    )


def test_latents_of_zeros_are_a_warning_that_knows_wan_vace() -> None:
    finding = findings(None, torch.zeros(1, 16, 21, 60, 104))["latent_constant"]
    assert finding["severity"] == "warning"
    assert "WanVaceToVideo" in finding["advice"]


@pytest.mark.parametrize(
    ("latent", "id_"), [(None, "latent_missing"), (torch.zeros(0, 4, 8, 8), "latent_empty")]
)
def test_no_latent_is_an_error(latent: Any, id_: str) -> None:
    assert findings(None, latent)[id_]["severity"] == "error"


def record_findings(*attempts: StrategyAttempt, **fields: Any) -> dict[str, Finding]:
    return {one.id: one for one in findings_of_record(EncodingRecord(attempts=attempts, **fields))}


FAILED = StrategyAttempt("direct", "failed", 1.5, "CUDA out of memory", "OutOfMemoryError")


def test_a_strategy_that_gave_way_is_told() -> None:
    tiled = StrategyAttempt("tiled", "succeeded", 2.0)
    finding = record_findings(FAILED, tiled, strategy="tiled")["vae_fallback"]
    assert (
        finding.message == "Direct VAE Encoding ran out of memory: the output comes from Tiled VAE Encoding."
    )
    assert finding.evidence["seconds_lost"] == 1.5


def test_a_first_strategy_that_succeeds_is_nothing_to_tell() -> None:
    assert record_findings(StrategyAttempt("direct", "succeeded", 2.0), strategy="direct") == {}


def test_a_skipped_strategy_is_said_to_be_skipped() -> None:
    skipped = StrategyAttempt("direct", "skipped", reason="needs 9000 MB, free are 4000 MB")
    finding = record_findings(skipped, StrategyAttempt("tiled", "succeeded"), strategy="tiled")[
        "vae_fallback"
    ]
    assert "Direct VAE Encoding was skipped" in finding.message
    assert finding.evidence["direct_reason"] == "needs 9000 MB, free are 4000 MB"


def test_no_strategy_that_got_through_is_an_error() -> None:
    finding = record_findings(FAILED)["vae_failed"]
    assert (finding.severity, finding.stage) == ("error", "latent_encoding")
    assert "CUDA out of memory" in finding.message


def test_stand_ins_are_the_most_severe_finding() -> None:
    found = record_findings(FAILED, StrategyAttempt("dummy", "succeeded"), strategy="dummy", dummy=True)
    assert [one.severity for one in found.values()] == ["critical"]


def test_a_stand_in_that_the_engine_found_itself_is_not_told_twice() -> None:
    own = Finding("dummy-latents", "critical", "zeros")
    other = Finding("something_else", "info", "x")
    found = record_findings(strategy="dummy", dummy=True, findings=(own, other))
    assert list(found) == ["dummy_latents", "something_else"]


@pytest.mark.parametrize(
    ("predicted_mb", "measured_mb", "told"),
    [(1000, 2500, True), (2500, 1000, True), (2000, 3000, False), (100, 500, False)],
)
def test_predictions_that_were_far_off_are_told(predicted_mb: int, measured_mb: int, told: bool) -> None:
    attempt = StrategyAttempt(
        "direct",
        "succeeded",
        1.0,
        predicted_peak_bytes=predicted_mb * 2**20,
        measured_peak_bytes=measured_mb * 2**20,
    )
    assert ("vae_peak_mispredicted" in record_findings(attempt, strategy="direct")) is told


@pytest.mark.parametrize(
    ("difference", "severity"), [(None, None), (2e-6, None), (0.05, "info"), (0.56, "warning")]
)
def test_what_tiles_cost_is_told(difference: float | None, severity: str | None) -> None:
    reason = "it is compiled"
    tile = TileFacts(
        512, 512, 128, 128, 9, norm_statistics="per_tile", norm_reason=reason, overlap_difference=difference
    )
    tiled = StrategyAttempt("tiled", "succeeded", 2.0, tile=tile)
    found = record_findings(tiled, strategy="tiled").get("vae_tiles_differ")
    assert (found and found.severity) == severity
    if difference == 0.56:
        assert found is not None
        assert found.message == (
            "Tiles disagree by 56 %. This only hints at the error against the untiled result, which may be larger or smaller. "
            "Group norms saw each tile separately (it is compiled)."
        )
        assert found.evidence["overlap_difference"] == 0.56


def test_tiles_that_the_vae_cut_have_no_figure_and_the_finding_says_so() -> None:
    reason = "the VAE cut its own tiles"
    tile = TileFacts(512, 512, 128, 128, by="vae", norm_statistics="per_tile", norm_reason=reason)
    tiled = StrategyAttempt("tiled", "succeeded", 2.0, tile=tile)
    found = record_findings(tiled, strategy="tiled")["vae_tiles_differ"]
    assert (found.severity, found.evidence["overlap_difference"]) == ("info", None)
    assert "their error was not measured" in found.message


def test_a_decoding_has_its_own_words() -> None:
    found = record_findings(strategy="dummy", dummy=True, direction="decoding")
    assert found["dummy_latents"].stage == "latent_decoding"
    assert "not a decoding" in found["dummy_latents"].message


def test_the_facts_of_wan_here_are_those_of_the_vae(make_vae: Any) -> None:
    from sigmascope.stages.latent_facts import vae_facts

    real = vae_facts(make_vae("wan"))
    assert all(getattr(real, name) == value for name, value in WAN.items())
    assert isinstance(real, VaeFacts)
