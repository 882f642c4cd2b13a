from dataclasses import replace

import pytest

from sigmascope.pipeline.peak_prediction import Experience, Kind, learn
from sigmascope.records.latents import (
    RECORD_FACT,
    EncodingRecord,
    SampleFacts,
    StrategyAttempt,
    TileFacts,
    VaeFacts,
)
from sigmascope.records.run import Run, Stage, TensorFacts

MIB = 1024 * 1024
DIRECT = Kind("AutoencoderKL", "encoding", "direct", "cuda")
ATTEMPT = StrategyAttempt(
    "direct",
    "succeeded",
    seconds=1.0,
    device="cuda:0",
    predicted_peak_bytes=100 * MIB,
    prediction_basis="config",
    measured_peak_bytes=150 * MIB,
)


def record(*attempts: StrategyAttempt, direction: str = "encoding") -> EncodingRecord:
    tensor = TensorFacts((2, 3, 100, 200), "float32", "cpu", nbytes=480_000, num_elements=120_000)
    given = SampleFacts(tensor, "BCHW", batch=2, channels=3, height=100, width=200)
    facts = VaeFacts("AutoencoderKL", spatial_factor=8)
    return EncodingRecord(direction, True, "direct", attempts, vae=facts, input=given)  # type: ignore[arg-type]


def test_the_ratio_of_measured_to_predicted_is_learned() -> None:
    assert learn([record(ATTEMPT)]).ratios == {DIRECT: (1.5,)}


def test_the_median_counts() -> None:
    attempts = [replace(ATTEMPT, measured_peak_bytes=size * MIB) for size in (110, 120, 900)]
    assert learn([record(*attempts)]).peak(DIRECT, 1, 1000) == 1200


def test_nothing_is_known_of_another_kind() -> None:
    past = learn([record(ATTEMPT)])
    for other in (replace(DIRECT, strategy="tiled"), replace(DIRECT, device_type="cpu")):
        assert past.peak(other, 1, 1000) is None


@pytest.mark.parametrize(
    "attempt",
    [
        replace(ATTEMPT, outcome="failed"),
        replace(ATTEMPT, measured_peak_bytes=None),
        replace(ATTEMPT, measured_peak_bytes=63 * MIB),
        replace(ATTEMPT, name="dummy"),
        replace(ATTEMPT, device=None),
    ],
)
def test_what_says_nothing_is_not_learned_from(attempt: StrategyAttempt) -> None:
    assert learn([record(attempt)]) == Experience()


def test_a_prediction_that_was_learned_gives_no_ratio() -> None:
    past = learn([record(replace(ATTEMPT, prediction_basis="learned"))])
    assert past.ratios == {}
    assert past.peak(DIRECT, 2 * 3 * 100 * 200, None) == 150 * MIB


def test_the_rate_of_tiles_is_by_what_a_tile_holds() -> None:
    tiled = replace(ATTEMPT, name="tiled", tile=TileFacts(64, 128, 16, 16))
    past = learn([record(tiled)])
    assert past.peak(replace(DIRECT, strategy="tiled"), 3 * 64 * 128, None) == 150 * MIB


def test_tiles_of_latents_are_counted_in_latent_elements() -> None:
    tiled = replace(ATTEMPT, name="tiled", tile=TileFacts(64, 128, 16, 16))
    past = learn([record(tiled, direction="decoding")])
    kind = Kind("AutoencoderKL", "decoding", "tiled", "cuda")
    assert past.peak(kind, 3 * 8 * 16, None) == 150 * MIB


def test_records_are_found_in_runs() -> None:
    inner = Stage("latent_encoding", 0.0, 1.0, facts={RECORD_FACT: record(ATTEMPT).as_dict()})
    run = Run(
        "id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(Stage("outer", 0.0, 1.0, children=(inner,)),)
    )
    assert learn([run]).ratios == {DIRECT: (1.5,)}


def test_a_damaged_record_is_passed_over() -> None:
    damaged = Stage("latent_encoding", 0.0, 1.0, facts={RECORD_FACT: {"attempts": 3}})
    run = Run("id", "run", "2026-01-01T00:00:00+00:00", 1.0, stages=(damaged,))
    assert learn([run]) == Experience()
