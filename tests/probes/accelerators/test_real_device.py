"""The same interface against a device that is really there."""

import time

import pytest
import torch

from sigmascope.probes import Accelerator, detect_accelerator, memory_snapshot, tensor_facts

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def accelerator() -> Accelerator:
    found = detect_accelerator()
    if found.absence is not None:
        pytest.skip(found.absence)
    if not torch.accelerator.is_available():  # torch is built for CUDA, and this machine has no driver
        pytest.skip(f"torch can use no device of {found.kind}")
    torch.ones(1, device=found.kind)  # a process that uses its device
    return found


@pytest.fixture
def device(accelerator: Accelerator) -> str:
    current = accelerator.current_device()
    assert current is not None
    return current


def test_an_allocation_shows_in_current_use_and_peak(accelerator: Accelerator, device: str) -> None:
    accelerator.reset_peak(device)
    before = accelerator.allocated_and_peak(device)
    held = torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
    during = accelerator.allocated_and_peak(device)
    del held
    after = accelerator.allocated_and_peak(device)
    assert before.allocated is not None
    assert during.allocated is not None
    assert during.allocated - before.allocated >= 64 * MIB
    assert after.allocated == before.allocated
    if "peak_allocated" not in accelerator.unavailable(device):
        assert after.peak_allocated == during.allocated


def test_resetting_brings_the_peak_down_to_the_current_use(accelerator: Accelerator, device: str) -> None:
    reason = accelerator.reset_peak(device)
    if reason is not None:
        pytest.skip(reason)
    figures = accelerator.allocated_and_peak(device)
    assert figures.peak_allocated == figures.allocated


def test_memory_of_the_driver_covers_the_allocators(accelerator: Accelerator, device: str) -> None:
    memory = accelerator.memory(device)
    assert memory.total_bytes is not None
    if memory.driver_used_bytes is not None:
        assert memory.reserved_bytes is not None
        assert memory.reserved_bytes <= memory.driver_used_bytes <= memory.total_bytes


def test_events_measure_work_without_waiting(accelerator: Accelerator, device: str) -> None:
    if (untimed := getattr(accelerator, "untimed", None)) is not None:
        pytest.skip(untimed)
    start, end = accelerator.new_event(device), accelerator.new_event(device)
    assert start is not None
    assert end is not None
    matrix = torch.ones(2048, 2048, device=device)
    assert start.record()
    for _ in range(20):
        matrix = matrix @ matrix / 2048
    assert end.record()
    give_up = time.monotonic() + 30
    while not end.query() and time.monotonic() < give_up:
        time.sleep(0.001)
    seconds = start.elapsed_seconds(end)
    assert seconds is not None
    assert 0 < seconds < 30


def test_the_device_has_a_name_and_memory(accelerator: Accelerator, device: str) -> None:
    facts = accelerator.facts(device)
    assert facts.name or "name" in facts.unavailable
    assert facts.total_bytes


def test_a_snapshot_holds_every_device(accelerator: Accelerator, device: str) -> None:
    snapshot = memory_snapshot(accelerator)
    assert [memory.device for memory in snapshot.accelerators] == accelerator.devices()
    assert snapshot.current_device == device


def test_statistics_of_a_device_tensor_agree_with_those_on_the_cpu(device: str) -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    on_device = tensor_facts(values.to(device), statistics=True)
    on_cpu = tensor_facts(values)
    assert on_device.mean == pytest.approx(on_cpu.mean, abs=1e-6)
    assert on_device.std == pytest.approx(on_cpu.std, rel=1e-6)
    assert on_device.max == on_cpu.max


def test_a_device_tensor_is_not_waited_for_unless_asked(device: str) -> None:
    facts = tensor_facts(torch.ones(3, device=device))
    assert facts.mean is None
    assert "statistics=True" in facts.unavailable["mean"]
