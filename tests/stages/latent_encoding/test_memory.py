"""Memory before and after, from whatever a caller holds."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.stages.baseline import memory_now, snapshot_of
from sigmascope.stages.latent_encoding import (
    _calculate_latent_generation_memory_change,
    capture_latent_generation_baseline,
    gpu_changes,
    memory_change,
    memory_efficiency,
)
from sigmascope.stages.latent_validation import memory_findings

MIB = 2**20
DEVICE = AcceleratorMemory("cuda:0", 2048 * MIB, 3072 * MIB, 8192 * MIB, 5120 * MIB)
BEFORE = MemorySnapshot(24_000 * MIB, 8000 * MIB, 16_000 * MIB, 500 * MIB, (DEVICE,))
AFTER = AcceleratorMemory("cuda:0", 3072 * MIB, 3584 * MIB, 8192 * MIB, 4608 * MIB)
NOW = MemorySnapshot(24_000 * MIB, 8100 * MIB, 15_900 * MIB, 600 * MIB, (AFTER,))


@pytest.mark.parametrize(
    "gpu",
    [
        {"allocated_mb": 3072.0, "reserved_mb": 3584.0, "total_mb": 8192.0},
        {"allocated": 3072, "reserved": 3584, "total": 8192},
        {"allocated_gb": 3.0, "reserved_gb": 3.5},
        {"allocated_bytes": 3072 * MIB, "reserved_bytes": 3584 * MIB},
        AFTER,
        None,
    ],
)
def test_the_seeds_changes_in_every_form(gpu: Any) -> None:
    found = memory_change(BEFORE, None, gpu, NOW)["gpu"]
    assert (found["allocated_change_mb"], found["reserved_change_mb"]) == (1024.0, 512.0)
    assert found["allocated_change_pct"] == 50.0
    assert found["reserved_change_pct"] == pytest.approx(16.7, abs=0.05)
    assert found["current_total_mb"] == 8192.0


@pytest.mark.parametrize(
    "ram",
    [
        {"used_mb": 8100.0, "available_mb": 15_900.0, "total_mb": 24_000.0},
        {"used": 8100, "available": 15_900},
        SimpleNamespace(total=24_000 * MIB, used=8100 * MIB, available=15_900 * MIB),
        None,
    ],
)
def test_ram_in_every_form(ram: Any) -> None:
    found = memory_change(BEFORE, ram, None, NOW)["ram"]
    assert (found["used_change_mb"], found["available_change_mb"]) == (100.0, -100.0)
    assert found["current_total_mb"] == 24_000.0
    assert found["current_percent_used"] == pytest.approx(100 * 8100 / 24_000)


def test_psutils_own_figures_are_bytes() -> None:
    baseline = capture_latent_generation_baseline(None, None)
    memory = psutil.virtual_memory()
    found = _calculate_latent_generation_memory_change(baseline, memory, None)
    assert found["ram"]["current_used_mb"] == memory.used / MIB


@pytest.mark.parametrize("gpu", [{}, {"allocated": "much"}, 7])
def test_a_device_that_tells_nothing_is_unknown(gpu: Any) -> None:
    assert set(memory_change(BEFORE, None, gpu, NOW)["gpu"].values()) == {None}


def test_a_snapshot_comes_back_from_the_dict_of_a_baseline() -> None:
    assert snapshot_of(memory_now(BEFORE)) == BEFORE


def test_immediate_changes_are_the_callers() -> None:
    found = gpu_changes({"allocated_change": 10, "reserved_change_mb": 20.0}, None)
    assert (found["allocated_change_mb"], found["reserved_change_mb"]) == (10.0, 20.0)
    assert found["measured_by"] == "caller"


def test_immediate_changes_of_a_stage() -> None:
    found = gpu_changes(MemoryImpact(BEFORE, NOW), None)
    assert (found["allocated_change_mb"], found["measured_by"]) == (1024.0, "stage")


def test_immediate_changes_without_anything_have_a_reason() -> None:
    assert gpu_changes(None, None)["unavailable"]["allocated_change_mb"] == "there is no baseline"
    no_device = MemoryImpact(MemorySnapshot(), MemorySnapshot())
    assert gpu_changes(None, no_device)["unavailable"]["reserved_change_mb"] == "no accelerator was found"


def test_efficiency_of_the_allocator() -> None:
    peak = PeakMemory(accelerators=(AcceleratorPeak("cuda:0", 4096 * MIB, 1.0),))
    found = memory_efficiency(MemoryImpact(BEFORE, NOW), peak)
    assert found["allocated_reserved_ratio"] == pytest.approx(3072 / 3584)
    assert found["fragmentation"] == pytest.approx(512 / 3584)
    assert found["free_vram_change_mb"] == -512.0
    assert found["cleanup_effectiveness"] == 0.5
    assert found["unavailable"] == {}


def ids(fragmentation: float, cleanup: float, reserved_mb: float, growth_mb: float) -> list[str]:
    found: Any = {"fragmentation": fragmentation, "cleanup_effectiveness": cleanup}
    return [one.id for one in memory_findings(found, reserved_mb, growth_mb)]


def test_memory_that_is_held_and_unused_or_kept_is_told() -> None:
    assert ids(0.6, 0.1, 4096.0, 1024.0) == ["memory_fragmented", "memory_kept"]


def test_little_memory_is_not_worth_telling() -> None:
    assert ids(0.6, 0.1, 100.0, 10.0) == []
    assert ids(0.2, 0.9, 4096.0, 1024.0) == []
