"""The seed's own example, to the digit, on a machine whose memory is said to be the seed's."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from sigmascope.records.latents import EncodingEvent, EncodingRecord, SampleFacts, StrategyAttempt
from sigmascope.records.memory import AcceleratorMemory, AcceleratorPeak, MemorySnapshot, PeakMemory
from sigmascope.records.run import TensorFacts
from sigmascope.stages import latent_encoding

MIB, GIB = 2**20, 2**30
BEFORE = MemorySnapshot(
    ram_total_bytes=24 * GIB,
    ram_used_bytes=round(8.2 * GIB),
    ram_available_bytes=round(15.8 * GIB),
    process_rss_bytes=2 * GIB,
    accelerators=(AcceleratorMemory("cuda:0", 2048 * MIB, 3072 * MIB, 8192 * MIB, 5120 * MIB),),
)
AFTER = replace(
    BEFORE,
    accelerators=(AcceleratorMemory("cuda:0", 3072 * MIB, 3584 * MIB, 8192 * MIB, 4608 * MIB),),
)
PEAK = PeakMemory(
    rss_bytes=3 * GIB,
    rss_at_seconds=1.0,
    accelerators=(AcceleratorPeak("cuda:0", 4096 * MIB, 1.23, 3584 * MIB, 1.45),),
    ram_used_bytes=round(8.5 * GIB),
    ram_used_at_seconds=1.1,
)
START = """\
🔍 STARTING MONITORING FOR: LATENT_GENERATION_STEP5
   Baseline RAM: 8.2 GB used, 15.8 GB available
   Baseline GPU: 2048 MB allocated, 3072 MB reserved
   Video Dimensions: 16 frames, 512x512, 3 channels
"""
PROCESS = """
🔧 VAE ENCODING PROCESS:
   🎯 Strategy 1: Direct VAE encoding
   ✅ VAE encoding completed successfully
   📐 Generated latent shape: (1, 4, 4, 64, 64)
   ⏱️  Processing Time: 2.45 seconds
   💾 Peak GPU Memory: 4096 MB allocated
"""
SUMMARY = """\
🔍 LATENT GENERATION ANALYSIS SUMMARY
================================================================================
✅ VAE Encoding Success: YES
⏱️  Total Execution Time: 2.45 seconds
🎯 Strategy Used: Direct VAE Encoding (Strategy 1)

📐 LATENT OUTPUT ANALYSIS:
   ✅ Status: SUCCESS
   🎯 Latent Type: Video Latent
   📐 Shape: (1, 4, 4, 64, 64)
   🏷️  Data Type: torch.float32
   📱 Device: cuda:0
   💾 Size: 0.25 MB
   🔢 Elements: 65,536
   📏 Spatial Compression: 64.0x
   ⏱️  Temporal Compression: 4.0x

⚡ PERFORMANCE ANALYSIS:
   📊 Video Dimensions: 16 frames, 512x512
   📊 Total Pixels: 4,194,304
   📊 Total Data: 12.00 MB
   ⚡ Processing Speed: 6.5 frames/second
   ⚡ Data Throughput: 4.9 MB/second

💾 MEMORY IMPACT:
   🎮 GPU CHANGES:
      Allocated: +1024.0 MB (+50.0%)
      Reserved: +512.0 MB (+16.7%)
      Total VRAM: 8192.0 MB

📊 PEAK MEMORY DURING LATENT GENERATION:
   🖥️  RAM Peak: 8.5 GB
   🎮 GPU Allocated Peak: 4096.0 MB
   🎮 GPU Reserved Peak: 4096.0 MB
   ⏱️  Peak Timestamps:
      gpu_allocated: 4096.0 MB at 1.23s
      gpu_reserved: 4096.0 MB at 1.23s
"""
"""The seed's text, but for its reserved peak below the allocated one (SPEC section 2 calls it a slip)."""


@pytest.fixture
def baseline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sigmascope.stages.baseline.memory_snapshot", lambda _: BEFORE)
    video = np.zeros((16, 512, 512, 3), np.uint8)
    before = latent_encoding.capture_latent_generation_baseline(None, video)
    monkeypatch.setattr("sigmascope.stages.baseline.memory_snapshot", lambda _: AFTER)
    return before


@pytest.fixture
def analysis(baseline: Any) -> dict[str, Any]:
    latent = torch.zeros(1, 4, 4, 64, 64)
    found = latent_encoding.analyze_latent_generation_results(
        baseline, latent, 2.45, "Direct VAE Encoding", None, 16, 512, 512, peak_memory=PEAK
    )
    found["latent_analysis"]["device"] = "cuda:0"  # where the seed's latent is
    return dict(found)


def printed(show: Any, *arguments: Any) -> str:
    file = io.StringIO()
    show(*arguments, console=Console(file=file, width=100))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def test_the_summary_is_the_seeds(analysis: dict[str, Any]) -> None:
    text = printed(latent_encoding.print_latent_generation_analysis_summary, analysis)
    assert text.startswith(SUMMARY)
    assert text.splitlines()[-1] == "=" * 80


def test_the_lines_at_the_start_are_the_seeds(baseline: Any) -> None:
    assert printed(latent_encoding.print_latent_generation_start, baseline) == START


def test_the_lines_of_the_process_are_the_seeds() -> None:
    attempt = StrategyAttempt("direct", "succeeded", 2.45, peak=PEAK)
    tensor = TensorFacts((1, 4, 4, 64, 64), "float32", "cuda:0", 262_144, 65_536)
    record = EncodingRecord(
        success=True, strategy="direct", attempts=(attempt,), seconds=2.45, output=SampleFacts(tensor)
    )
    events = (
        EncodingEvent("began"),
        EncodingEvent("attempt_began", strategy="direct"),
        EncodingEvent("attempt_ended", attempt=attempt),
        EncodingEvent("ended", record=record),
    )
    file = io.StringIO()
    for event in events:
        latent_encoding.print_encoding_event(event, Console(file=file, width=100))
    assert "\n".join(line.rstrip() for line in file.getvalue().split("\n")) == PROCESS


def test_sizes_and_compression(analysis: dict[str, Any]) -> None:
    latent = analysis["latent_analysis"]
    assert (latent["num_elements"], latent["size_mb"]) == (65_536, 0.25)
    assert (latent["spatial_compression"], latent["temporal_compression"]) == (64.0, 4.0)
    assert latent["dtype"] == "float32"


def test_performance(analysis: dict[str, Any]) -> None:
    found = analysis["performance_analysis"]
    assert (found["total_pixels"], found["total_mb"]) == (4_194_304, 12.0)
    assert found["frames_per_second"] == pytest.approx(16 / 2.45)
    assert found["mb_per_second"] == pytest.approx(12 / 2.45)
    assert found["pixels_per_second"] == pytest.approx(4_194_304 / 2.45)
    assert found["video_dimensions"] == {"length": 16, "height": 512, "width": 512}


def test_memory(analysis: dict[str, Any]) -> None:
    gpu = analysis["memory_impact"]["gpu"]
    assert (gpu["allocated_change_mb"], gpu["reserved_change_mb"]) == (1024.0, 512.0)
    assert analysis["immediate_gpu_changes"]["allocated_change_mb"] == 1024.0
    efficiency = analysis["efficiency"]
    assert efficiency["allocated_reserved_ratio"] == pytest.approx(3072 / 3584)
    assert efficiency["fragmentation"] == pytest.approx(512 / 3584)
    assert efficiency["free_vram_change_mb"] == -512.0
    assert efficiency["cleanup_effectiveness"] == pytest.approx((4096 - 3072) / (4096 - 2048))


def test_a_reserved_peak_in_a_dict_is_raised_to_the_allocated_one(baseline: Any) -> None:
    plain = PEAK.as_dict()
    plain["gpu"]["peak_reserved_mb"], plain["gpu"]["peak_reserved_at_seconds"] = 3584.0, 1.45
    found = latent_encoding.analyze_latent_generation_results(
        baseline, torch.zeros(1, 4, 4, 64, 64), 2.45, 1, peak_memory=plain
    )
    assert found["peak_memory"] is not None
    gpu = found["peak_memory"]["gpu"]
    assert (gpu["peak_reserved_mb"], gpu["peak_reserved_at_seconds"]) == (4096.0, 1.23)
