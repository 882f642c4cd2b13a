"""What `encode_latents` and `decode_latents` leave on a step, found by a `WorkflowMonitor`."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console

import sigmascope
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


def test_a_record_without_an_analysis_gives_findings_too(monitor: WorkflowMonitor, vae: Any) -> None:
    monitor.start_monitoring("latent_encoding")
    _, record = sigmascope.encode_latents(vae, PICTURES, strategies=("dummy",), dummy=True)
    monitor.end_monitoring("latent_encoding")
    assert record.dummy
    severities = [finding.severity for finding in monitor.run().findings]
    assert severities == ["critical"]


def test_dummy_latents_are_said_to_be_none_once(monitor: WorkflowMonitor, vae: Any) -> None:
    baseline = monitor.capture_latent_generation_baseline(vae, PICTURES)
    monitor.start_monitoring("latent_encoding")
    latent, _ = sigmascope.encode_latents(vae, PICTURES, strategies=("dummy",), dummy=True)
    monitor.end_monitoring("latent_encoding")
    found = monitor.analyze_latent_generation_results(baseline, latent)
    assert found["encoding_success"] is False
    assert [one.severity for one in monitor.run().findings].count("critical") == 1
    text = printed(monitor.print_latent_generation_analysis_summary, found)
    assert "NOT REAL: this is no encoding" in text


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
