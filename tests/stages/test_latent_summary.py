"""The lines in real time."""

import pytest

from sigmascope.records.latents import EncodingEvent, EncodingRecord, SampleFacts, StrategyAttempt, TileFacts
from sigmascope.records.memory import PeakMemory
from sigmascope.records.run import TensorFacts
from sigmascope.stages.latent_summary import detail_sections, event_lines, start_lines


def lines(event: EncodingEvent) -> list[str]:
    return [text for text, _ in event_lines(event)]


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        ("direct", "   🎯 Strategy 1: Direct VAE encoding"),
        ("tiled", "   🎯 Strategy 2: Tiled VAE encoding"),
        ("cpu", "   🎯 Strategy 3: CPU Fallback encoding"),
        ("dummy", "   🎯 Strategy 4: Emergency Dummy latents"),
    ],
)
def test_a_strategy_begins(strategy: str, line: str) -> None:
    assert lines(EncodingEvent("attempt_began", strategy=strategy)) == [line]  # type: ignore[arg-type]


def test_a_strategy_that_failed_says_why() -> None:
    attempt = StrategyAttempt("direct", "failed", 1.5, "CUDA out of memory")
    (line,) = lines(EncodingEvent("attempt_ended", attempt=attempt))
    assert line == "   ❌ Direct VAE encoding failed after 1.50 seconds: CUDA out of memory"


def test_attempts_of_one_strategy_are_told_apart_by_their_tiles() -> None:
    tile = TileFacts(height=256, width=384, overlap_height=64, overlap_width=64)
    assert lines(EncodingEvent("attempt_began", strategy="tiled", tile=tile)) == [
        "   🎯 Strategy 2: Tiled VAE encoding, tiles of 384×256"
    ]
    failed = StrategyAttempt("tiled", "failed", 1.5, "CUDA out of memory", tile=tile)
    assert lines(EncodingEvent("attempt_ended", attempt=failed)) == [
        "   ❌ Tiled VAE encoding, tiles of 384×256 failed after 1.50 seconds: CUDA out of memory"
    ]
    skipped = StrategyAttempt("tiled", "skipped", reason="it would not fit", tile=tile)
    assert lines(EncodingEvent("attempt_ended", attempt=skipped)) == [
        "   ⏭️  Strategy 2: Tiled VAE encoding, tiles of 384×256 skipped: it would not fit"
    ]


def test_a_strategy_that_was_skipped_says_why() -> None:
    attempt = StrategyAttempt("cpu", "skipped", reason="needs 9000 MB, free are 4000 MB")
    (line,) = lines(EncodingEvent("attempt_ended", attempt=attempt))
    assert line == "   ⏭️  Strategy 3: CPU Fallback encoding skipped: needs 9000 MB, free are 4000 MB"


def test_a_strategy_that_succeeded_waits_for_the_end() -> None:
    assert lines(EncodingEvent("attempt_ended", attempt=StrategyAttempt("direct", "succeeded", 1.0))) == []


def test_stand_ins_are_never_a_success() -> None:
    record = EncodingRecord(success=True, strategy="dummy", dummy=True)
    assert lines(EncodingEvent("ended", record=record)) == [
        "   🚨 NOT REAL: this is a placeholder, not the result of encoding"
    ]


def test_an_encoding_that_failed() -> None:
    assert lines(EncodingEvent("ended", record=EncodingRecord())) == ["   ❌ VAE encoding failed"]


def test_without_an_accelerator_the_process_has_the_peak() -> None:
    attempt = StrategyAttempt("direct", "succeeded", 1.0, peak=PeakMemory(512 * 2**20, 0.5))
    record = EncodingRecord(success=True, strategy="direct", attempts=(attempt,))
    assert "   💾 Peak Memory: 512 MB in this process" in lines(EncodingEvent("ended", record=record))


def test_a_decoding_has_its_own_words() -> None:
    facts = SampleFacts(TensorFacts((1, 3, 64, 64), "float32", "cpu", 49_152, 12_288))
    record = EncodingRecord("decoding", success=True, strategy="tiled", output=facts)
    assert lines(EncodingEvent("began", "decoding")) == ["", "🔧 VAE DECODING PROCESS:"]
    assert lines(EncodingEvent("attempt_began", "decoding", strategy="tiled")) == [
        "   🎯 Strategy 2: Tiled VAE decoding"
    ]
    assert lines(EncodingEvent("ended", "decoding", record=record)) == [
        "   ✅ VAE decoding completed successfully",
        "   📐 Generated picture shape: (1, 3, 64, 64)",
    ]


def test_the_summary_says_what_norms_saw_and_what_tiles_cost() -> None:
    tile = {"width": 512, "height": 512, "overlap_width": 128, "overlap_height": 128, "count": 9}
    cost = {"norm_statistics": "per_tile", "norm_reason": "it is compiled", "overlap_difference": 0.125}
    attempt = {"name": "tiled", "number": 2, "outcome": "succeeded", "tile": tile | cost}
    (strategies,) = [one for one in detail_sections({"strategies": [attempt]}) if one.title == "STRATEGIES"]
    rows = {row.label.strip(): row.value for row in strategies.rows}
    assert rows["Norms"] == "saw each tile separately: it is compiled"
    assert rows["Tiles"].startswith("Tiles disagree by 12 %.")


def test_a_baseline_that_knows_nothing_still_begins() -> None:
    first, *_ = [text for text, _ in start_lines({}, "step5")]
    assert first == "🔍 STARTING MONITORING FOR: STEP5"
