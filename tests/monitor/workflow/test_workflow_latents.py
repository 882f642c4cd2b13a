"""Encoding and decoding on a `WorkflowMonitor`, with real VAEs at small size."""

import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import sigmascope
from sigmascope.monitor import workflow
from sigmascope.monitor.workflow import WorkflowMonitor


@pytest.fixture
def monitor() -> WorkflowMonitor:
    return WorkflowMonitor("video", sample_hz=None)


PICTURES = torch.zeros(2, 3, 32, 48)


def encode(vae: Any, pictures: torch.Tensor = PICTURES) -> torch.Tensor:
    with torch.no_grad():
        latent: torch.Tensor = vae.encode(pictures).latent_dist.mean
    return latent


def watch(monitor: WorkflowMonitor, vae: Any) -> dict[str, Any]:
    baseline = monitor.capture_latent_generation_baseline(vae, PICTURES)
    monitor.start_monitoring("LATENT_GENERATION_STEP5")
    with pytest.raises(RuntimeError), monitor.trying("direct"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with monitor.trying("tiled"):
        latent = encode(vae)
    monitor.end_monitoring("LATENT_GENERATION_STEP5", vae, "VAE")
    return monitor.analyze_latent_generation_results(baseline, latent)


def printed(monitor: WorkflowMonitor, show: Any, *arguments: Any) -> str:
    file = io.StringIO()
    show(*arguments, console=Console(file=file, width=100))
    return file.getvalue()


def test_time_and_peaks_are_those_of_the_step(monitor: WorkflowMonitor, vae: Any) -> None:
    found = watch(monitor, vae)
    stage = monitor.run().stage("latent_encoding")
    assert found["elapsed_time"] == stage.seconds
    assert stage.peak is not None
    assert found["peak_memory"] == stage.peak.as_dict()
    assert found["immediate_gpu_changes"]["measured_by"] == "stage"


def test_strategies_are_those_that_were_tried(monitor: WorkflowMonitor, vae: Any) -> None:
    found = watch(monitor, vae)
    direct, tiled = found["strategies"]
    assert (direct["name"], direct["outcome"], direct["error_type"]) == (
        "Direct VAE Encoding",
        "failed",
        "RuntimeError",
    )
    assert "Tried to allocate 2.00 GiB" in direct["reason"]
    assert (tiled["name"], tiled["outcome"]) == ("Tiled VAE Encoding", "succeeded")
    assert tiled["measured_peak_mb"] is not None


def test_the_strategy_that_succeeded_is_the_one_that_was_used(monitor: WorkflowMonitor, vae: Any) -> None:
    found = watch(monitor, vae)
    assert (found["strategy_used"], found["strategy_number"]) == ("Tiled VAE Encoding", 2)


def test_a_fallback_is_a_finding_of_the_run(monitor: WorkflowMonitor, vae: Any) -> None:
    watch(monitor, vae)
    (finding,) = [one for one in monitor.run().findings if one.id == "vae_fallback"]
    assert (finding.severity, finding.stage) == ("warning", "latent_encoding")
    assert "Direct VAE Encoding ran out of memory" in finding.message


def test_the_step_keeps_the_analysis_and_the_facts_of_the_latent(monitor: WorkflowMonitor, vae: Any) -> None:
    watch(monitor, vae)
    stage = monitor.run().stage("latent_encoding")
    assert stage.facts["latent_encoding"]["latent_analysis"]["spatial_compression"] == 4.0
    assert stage.tensors["latent"].shape == (2, 4, 16, 24)


def test_a_run_survives_saving(monitor: WorkflowMonitor, vae: Any, tmp_path: Path) -> None:
    watch(monitor, vae)
    run = monitor.run()
    run.save(tmp_path / "run.json")
    assert sigmascope.load_run(tmp_path / "run.json") == run


def test_the_comprehensive_summary_has_both(monitor: WorkflowMonitor, vae: Any) -> None:
    watch(monitor, vae)
    latent = encode(vae)
    monitor.start_monitoring("latent_decoding")
    with torch.no_grad():
        frames = vae.decode(latent)
    monitor.end_monitoring("latent_decoding")
    monitor.analyze_latent_decoding_results(None, frames, None, "Direct VAE Decoding")
    text = printed(monitor, monitor.print_comprehensive_summary)
    assert "LATENT GENERATION ANALYSIS SUMMARY" in text
    assert "LATENT DECODING ANALYSIS SUMMARY" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_error_of_the_step_is_that_of_the_analysis(monitor: WorkflowMonitor, vae: Any) -> None:
    monitor.start_monitoring("latent_encoding")
    monitor.end_monitoring("latent_encoding", error=ValueError("no pictures"))
    found = monitor.analyze_latent_generation_results(None, None)
    assert (found["encoding_success"], found["error"]) == (False, "ValueError: no pictures")


def test_the_underscored_functions_are_methods(monitor: WorkflowMonitor) -> None:
    latent = monitor._analyze_latent_output(torch.zeros(1, 4, 4, 64, 64), 16, 512, 512)
    assert (latent["spatial_compression"], latent["temporal_compression"]) == (64.0, 4.0)
    speed = monitor._analyze_vae_encoding_performance(2.45, "Direct VAE Encoding", 16, 512, 512)
    assert speed["total_mb"] == 12.0
    impact = monitor._calculate_latent_generation_memory_change(
        {"memory": {"ram": {"used_mb": 100.0}}}, {"used_mb": 150.0}, None
    )
    assert impact["ram"]["used_change_mb"] == 50.0


def test_nothing_of_the_host_stays_alive(monitor: WorkflowMonitor) -> None:
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny(
        encoder_block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        num_encoder_blocks=(1,),
        num_decoder_blocks=(1,),
    )
    pictures = torch.zeros(1, 3, 32, 32)
    latent = vae.encode(pictures).latents
    baseline = monitor.capture_latent_generation_baseline(vae, pictures)
    found = monitor.analyze_latent_generation_results(baseline, latent, 1.0, 1)
    alive = [weakref.ref(thing) for thing in (vae, pictures, latent)]
    del vae, pictures, latent
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]
    assert json.dumps(found)


def test_the_vae_and_its_latent_are_untouched(monitor: WorkflowMonitor, vae: Any) -> None:
    before, plain = vars(vae).keys(), encode(vae)
    found = watch(monitor, vae)
    assert vars(vae).keys() == before
    assert torch.equal(encode(vae), plain)
    assert found["model_state"]["vae"]["changed"] == []


def test_a_failure_of_ours_while_the_latent_is_noted_does_not_reach_the_host(
    monitor: WorkflowMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_analysis: object) -> dict[str, Any]:
        raise MemoryError("planted")

    baseline = monitor.capture_latent_generation_baseline(None, torch.zeros(1, 3, 32, 32))
    monitor.start_monitoring("latent_encoding")
    monitor.end_monitoring("latent_encoding")
    monkeypatch.setattr(workflow, "beside_the_stage", fails)
    analysis = monitor.analyze_latent_generation_results(baseline, torch.zeros(1, 4, 4, 4))
    assert analysis["encoding_success"] is True
    assert "latent" in monitor.run().stages[-1].tensors
