from typing import Any

import pytest

from sigmascope.records import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.memory import GpuImpact, MemoryImpactDict, ProcessImpact, RamImpact

MIB = 2**20


def device(
    name: str, allocated: int | None, reserved: int | None, total: int | None = None
) -> AcceleratorMemory:
    return AcceleratorMemory(name, allocated, reserved, total)


BEFORE = MemorySnapshot(
    ram_total_bytes=16384 * MIB,
    ram_used_bytes=4096 * MIB,
    ram_available_bytes=12288 * MIB,
    process_rss_bytes=500 * MIB,
    accelerators=(device("cuda:0", 1024 * MIB, 2048 * MIB, 24576 * MIB), device("cuda:1", 0, 0, 8192 * MIB)),
    current_device="cuda:0",
)
AFTER = MemorySnapshot(
    ram_total_bytes=16384 * MIB,
    ram_used_bytes=5120 * MIB,
    ram_available_bytes=8192 * MIB,
    process_rss_bytes=750 * MIB,
    accelerators=(
        device("cuda:0", 1536 * MIB, 2048 * MIB, 24576 * MIB),
        device("cuda:1", 256 * MIB, 512 * MIB, 8192 * MIB),
    ),
    current_device="cuda:0",
)
IMPACT = MemoryImpact(BEFORE, AFTER)


def test_ram_is_in_mib_and_percent() -> None:
    assert IMPACT.as_dict()["ram"] == {
        "baseline_used_mb": 4096.0,
        "baseline_available_mb": 12288.0,
        "baseline_percent_used": 25.0,
        "current_used_mb": 5120.0,
        "current_available_mb": 8192.0,
        "current_total_mb": 16384.0,
        "current_percent_used": 50.0,
        "used_change_mb": 1024.0,
        "available_change_mb": -4096.0,
    }


def test_the_process_is_its_resident_set() -> None:
    assert IMPACT.as_dict()["process"] == {
        "baseline_rss_mb": 500.0,
        "current_rss_mb": 750.0,
        "rss_change_mb": 250.0,
        "rss_change_pct": 50.0,
    }


def test_gpu_is_the_device_in_use() -> None:
    assert IMPACT.as_dict()["gpu"] == {
        "baseline_allocated_mb": 1024.0,
        "baseline_reserved_mb": 2048.0,
        "baseline_total_mb": 24576.0,
        "current_allocated_mb": 1536.0,
        "current_reserved_mb": 2048.0,
        "current_total_mb": 24576.0,
        "allocated_change_mb": 512.0,
        "reserved_change_mb": 0.0,
        "allocated_change_pct": 50.0,
        "reserved_change_pct": 0.0,
    }


def test_gpus_hold_every_device() -> None:
    gpus = IMPACT.as_dict()["gpus"]
    assert list(gpus) == ["cuda:0", "cuda:1"]
    assert gpus["cuda:1"]["allocated_change_mb"] == 256.0


def test_growth_from_nothing_has_no_percentage() -> None:
    assert IMPACT.as_dict()["gpus"]["cuda:1"]["allocated_change_pct"] is None


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [value]


def test_what_is_unknown_is_none_and_never_zero() -> None:
    impact = MemoryImpact(MemorySnapshot(), MemorySnapshot()).as_dict()
    assert impact["gpus"] == {}
    assert leaves(impact) == [None] * 23


def test_a_device_that_appeared_during_the_stage_has_an_unknown_baseline() -> None:
    gpu = MemoryImpact(MemorySnapshot(), AFTER).as_dict()["gpus"]["cuda:1"]
    assert gpu["current_allocated_mb"] == 256.0
    assert gpu["baseline_allocated_mb"] is None
    assert gpu["allocated_change_mb"] is None


@pytest.mark.parametrize(
    ("typed", "part"), [(RamImpact, "ram"), (ProcessImpact, "process"), (GpuImpact, "gpu")]
)
def test_the_structures_have_exactly_their_declared_keys(typed: Any, part: str) -> None:
    impact: Any = IMPACT.as_dict()
    assert list(impact[part]) == list(typed.__annotations__)
    assert list(impact) == list(MemoryImpactDict.__annotations__)


def test_work_on_another_device_than_the_current_one_is_found() -> None:
    idle_current = MemorySnapshot(
        accelerators=(device("cuda:0", 0, 0), device("cuda:1", 5, 5)), current_device="cuda:0"
    )
    assert idle_current.device_in_use() == "cuda:1"


def test_the_current_device_is_in_use_while_nothing_is_allocated() -> None:
    nothing = MemorySnapshot(
        accelerators=(device("cuda:0", 0, 0), device("cuda:1", 0, 0)), current_device="cuda:1"
    )
    assert nothing.device_in_use() == "cuda:1"


def test_fragmentation_is_the_reserved_share_that_is_not_allocated() -> None:
    memory = device("cuda:0", 768, 1024)
    assert memory.fragmentation() == 0.25
    assert memory.allocated_ratio() == 0.75


@pytest.mark.parametrize(("allocated", "reserved"), [(None, 4), (4, None), (0, 0)])
def test_fragmentation_is_unknown_without_both_figures(allocated: int | None, reserved: int | None) -> None:
    assert device("cuda:0", allocated, reserved).fragmentation() is None


def test_used_percent_is_the_drivers() -> None:
    memory = AcceleratorMemory("cuda:0", total_bytes=1000, driver_used_bytes=250)
    assert memory.used_percent() == 25.0


def peak_of(allocated: int | None) -> PeakMemory:
    return PeakMemory(rss_bytes=900 * MIB, accelerators=(AcceleratorPeak("cuda:0", allocated, 0.5),))


@pytest.mark.parametrize(
    ("peak_mib", "effectiveness"),
    [
        (2048, 0.5),  # grew by 1024 to its peak, ended 512 above the start
        (1536, 0.0),  # ended at its peak
        (1024, None),  # never grew
        (None, None),
    ],
)
def test_cleanup_effectiveness_is_the_share_of_the_growth_given_back(
    peak_mib: int | None, effectiveness: float | None
) -> None:
    peak = peak_of(None if peak_mib is None else peak_mib * MIB)
    assert peak.cleanup_effectiveness(IMPACT, "cuda:0") == effectiveness


def test_giving_back_more_than_was_taken_counts_as_all() -> None:
    freed = MemoryImpact(AFTER, BEFORE)
    assert peak_of(2048 * MIB).cleanup_effectiveness(freed, "cuda:0") == 1.0


def test_the_resident_set_has_its_cleanup_effectiveness() -> None:
    assert peak_of(None).rss_cleanup_effectiveness(IMPACT) == pytest.approx(150 / 400)


def test_a_reserved_peak_is_never_below_the_allocated_one() -> None:
    peak = AcceleratorPeak("cuda:0", 4096 * MIB, 1.5, 3584 * MIB, 0.5)
    assert (peak.reserved_bytes, peak.reserved_at_seconds) == (4096 * MIB, 1.5)


def test_an_unknown_reserved_peak_stays_unknown() -> None:
    assert AcceleratorPeak("cuda:0", 4096 * MIB, 1.5).reserved_bytes is None


def test_peak_memory_as_a_structure() -> None:
    peak = PeakMemory(
        rss_bytes=512 * MIB,
        rss_at_seconds=1.0,
        accelerators=(
            AcceleratorPeak("cuda:0", 1 * MIB, 0.1, 2 * MIB, 0.2),
            AcceleratorPeak("cuda:1", 3 * MIB, 0.3, 4 * MIB, 0.4),
        ),
        ram_used_bytes=1024 * MIB,
        ram_used_at_seconds=2.0,
    ).as_dict()
    assert peak["ram"] == {"peak_used_mb": 1024.0, "peak_used_at_seconds": 2.0}
    assert peak["process"] == {"peak_rss_mb": 512.0, "peak_rss_at_seconds": 1.0}
    assert peak["gpu"] == peak["gpus"]["cuda:1"]
    assert peak["gpus"]["cuda:0"] == {
        "peak_allocated_mb": 1.0,
        "peak_allocated_at_seconds": 0.1,
        "peak_reserved_mb": 2.0,
        "peak_reserved_at_seconds": 0.2,
    }
