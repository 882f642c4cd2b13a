"""What `encode_latents` and `decode_latents` leave on a step, found by a `WorkflowMonitor`."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console

import sigmascope
from sigmascope.analysis.processor_waits import WAITED
from sigmascope.monitor.workflow import WorkflowMonitor
from sigmascope.records.latents import EncodingRecord, StrategyAttempt
from sigmascope.records.run import Run


@pytest.fixture
def monitor() -> WorkflowMonitor:
    return WorkflowMonitor("video", sample_hz=None)


PICTURES = torch.zeros(2, 3, 32, 48)


def printed(show: Any, *arguments: Any) -> str:
    file = io.StringIO()
    show(*arguments, console=Console(file=file, width=100))
    return file.getvalue()


def test_the_record_of_encode_latents_is_found_on_the_step(monitor: WorkflowMonitor, vae: Any) -> None:
    baseline = monitor.capture_latent_generation_baseline(vae, PICTURES)
    monitor.start_monitoring("latent_encoding")
    latent, record = sigmascope.encode_latents(vae, PICTURES, strategies=("tiled",), tile=32)
    monitor.end_monitoring("latent_encoding")
    found = monitor.analyze_latent_generation_results(baseline, latent)
    assert found["strategy_used"] == record.strategy_label == "Tiled VAE Encoding"
    assert found["strategies"][0]["tile"]["width"] == 32


def test_what_encode_latents_did_is_told_without_a_helper(
    vae: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = WorkflowMonitor(sample_hz=None)
    monitor.start_monitoring("latent_encoding")
    latent, _ = sigmascope.encode_latents(vae, PICTURES, strategies=("tiled",), tile=32)
    capsys.readouterr()
    monitor.end_monitoring("latent_encoding", vae, "VAE")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "🔧 VAE ENCODING PROCESS:",
        "   🎯 Strategy 2: Tiled VAE encoding, tiles of 32×32",
        "   ✅ VAE encoding completed successfully",
        f"   📐 Generated latent shape: {tuple(latent.shape)}",
    ]
    assert lines[5].startswith("   ⏱️  Processing Time: ")


def test_strategies_watched_apart_are_told_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = WorkflowMonitor(sample_hz=None)
    monitor.start_monitoring("latent_decoding")
    with pytest.raises(RuntimeError), monitor.trying("direct", "decoding"):
        raise RuntimeError("no room")
    with monitor.trying("tiled", "decoding"):
        pass
    capsys.readouterr()
    monitor.end_monitoring("latent_decoding", output=PICTURES)
    lines = [line.partition(" after ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[1:7] == [
        "🔧 VAE DECODING PROCESS:",
        "   🎯 Strategy 1: Direct VAE decoding",
        "   ❌ Direct VAE decoding failed",
        "   🎯 Strategy 2: Tiled VAE decoding",
        "   ✅ VAE decoding completed successfully",
        "   📐 Generated picture shape: (2, 3, 32, 48)",
    ]


def test_a_record_without_an_analysis_gives_findings_too(monitor: WorkflowMonitor, vae: Any) -> None:
    monitor.start_monitoring("latent_encoding")
    _, record = sigmascope.encode_latents(vae, PICTURES, strategies=("dummy",), dummy=True)
    monitor.end_monitoring("latent_encoding")
    assert record.dummy
    findings = [finding for finding in monitor.run().findings if finding.id != WAITED]
    assert [finding.severity for finding in findings] == ["critical"]


def test_dummy_latents_are_said_to_be_none_once(monitor: WorkflowMonitor, vae: Any) -> None:
    baseline = monitor.capture_latent_generation_baseline(vae, PICTURES)
    monitor.start_monitoring("latent_encoding")
    latent, _ = sigmascope.encode_latents(vae, PICTURES, strategies=("dummy",), dummy=True)
    monitor.end_monitoring("latent_encoding")
    found = monitor.analyze_latent_generation_results(baseline, latent)
    assert found["encoding_success"] is False
    assert [one.severity for one in monitor.run().findings].count("critical") == 1
    text = printed(monitor.print_latent_generation_analysis_summary, found)
    assert "NOT REAL: this is a placeholder" in text


def test_a_record_that_is_none_raises_nothing_into_the_host(monitor: WorkflowMonitor) -> None:
    monitor.start_monitoring("latent_encoding")
    monitor.last_stage("latent_encoding").fact("vae_record", {"nonsense": 1})  # type: ignore[union-attr]
    monitor.end_monitoring("latent_encoding")
    found = monitor.analyze_latent_generation_results(None, torch.zeros(1, 4, 8, 8), 1.0, 1)
    assert "nonsense" in found["unavailable"]["encoding_success"]
    assert isinstance(monitor.run(), Run)


def test_a_failure_of_every_strategy_is_an_error(monitor: WorkflowMonitor) -> None:
    attempts = tuple(StrategyAttempt(name, "failed", 1.0, "out of memory") for name in ("direct", "tiled"))
    found = monitor.analyze_latent_generation_results(None, None, record=EncodingRecord(attempts=attempts))
    assert "vae_failed" in {one["id"] for one in found["findings"]}


def test_decoding_has_the_same_analysis(monitor: WorkflowMonitor, vae: Any) -> None:
    with torch.no_grad():
        latent = vae.encode(PICTURES).latent_dist.mean
    baseline = monitor.capture_latent_decoding_baseline(vae, latent)
    monitor.start_monitoring("latent_decoding")
    frames, _ = sigmascope.decode_latents(vae, latent)
    monitor.end_monitoring("latent_decoding")
    found = monitor.analyze_latent_decoding_results(baseline, frames)
    assert found["strategy_used"] == "Direct VAE Decoding"
    assert (found["pictures"]["height"], found["pictures"]["width"]) == (32, 48)
    assert found["latent_analysis"]["spatial_compression"] == 4.0
    assert monitor.run().stage("latent_decoding").facts["latent_decoding"]["direction"] == "decoding"
