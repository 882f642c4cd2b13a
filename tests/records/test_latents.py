"""What became of an encoding, as values that survive JSON."""

import json

import pytest

from sigmascope.records.latents import (
    EncodingRecord,
    SampleFacts,
    StrategyAttempt,
    TileFacts,
    VaeFacts,
    encoding_record,
    strategy_label,
    strategy_number,
)
from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import Finding, TensorFacts

PEAK = PeakMemory(
    rss_bytes=8_912_896_123,
    rss_at_seconds=0.5,
    accelerators=(AcceleratorPeak("cuda:0", 4_294_967_297, 1.23, 5_368_709_121, 1.45),),
    unavailable={"ram_used_bytes": "nothing sampled it"},
)
RECORD = EncodingRecord(
    success=True,
    strategy="tiled",
    attempts=(
        StrategyAttempt(
            "direct",
            "failed",
            0.25,
            "CUDA out of memory. Tried to allocate 2.00 GiB",
            "OutOfMemoryError",
            "cuda:0",
            PEAK,
            3_221_225_473,
            "config",
            1_234_567,
            unavailable={"tile": "not cut"},
        ),
        StrategyAttempt("tiled", "succeeded", 2.0, peak=PEAK, tile=TileFacts(512, 512, 64, 64, 9)),
    ),
    seconds=2.45,
    vae=VaeFacts("AutoencoderKL", 4, 3, 8, 1, dtype="float32", nbytes=334_643_273, source="config"),
    input=SampleFacts(TensorFacts((16, 3, 512, 512), "uint8", "cpu", 12_582_912, 12_582_912), "BCHW", 16),
    output=SampleFacts(
        TensorFacts((16, 4, 64, 64), "float32", "cuda:0", 1_048_576, 262_144, min=float("-inf")), "BCHW", 16
    ),
    findings=(Finding("vae_fallback", "warning", "tiled", {"seconds_mb": 2.0, "nbytes": 3}),),
    unavailable={"some_bytes": "was not read"},
)


def test_a_record_comes_back_from_plain_values_as_it_was() -> None:
    assert encoding_record(RECORD.as_dict()) == RECORD


def test_a_record_comes_back_from_json_text() -> None:
    assert encoding_record(json.loads(json.dumps(RECORD.as_dict()))) == RECORD


def test_sizes_are_in_mib_at_the_border() -> None:
    plain = RECORD.as_dict()
    assert plain["input"]["tensor"]["size_mb"] == 12.0
    assert plain["attempts"][0]["measured_peak_mb"] == 1_234_567 / 2**20


def test_what_describes_no_record_is_refused_with_the_place() -> None:
    with pytest.raises(ValueError, match="strategy"):
        encoding_record({**RECORD.as_dict(), "strategy": "magic"})


@pytest.mark.parametrize(
    ("strategy", "number", "label"),
    [
        ("direct", 1, "Direct VAE Encoding"),
        ("tiled", 2, "Tiled VAE Encoding"),
        ("cpu", 3, "CPU Fallback Encoding"),
        ("dummy", 4, "Emergency Dummy Latents"),
    ],
)
def test_strategies_have_the_names_and_numbers_of_the_specification(
    strategy: str, number: int, label: str
) -> None:
    assert (strategy_number(strategy), strategy_label(strategy)) == (number, label)  # type: ignore[arg-type]


@pytest.mark.parametrize(("frames", "latent"), [(81, 21), (1, 1), (5, 2), (4, 1)])
def test_a_causal_video_vae_keeps_the_first_frame_apart(frames: int, latent: int) -> None:
    wan = VaeFacts("AutoencoderKLWan", 16, 3, 8, 4, first_frame_apart=True)
    assert wan.latent_frames(frames) == latent


def test_the_frames_of_other_vaes_are_divided() -> None:
    assert VaeFacts("AutoencoderKL", temporal_factor=1).latent_frames(16) == 16
    assert VaeFacts("seed", temporal_factor=4).latent_frames(16) == 4
