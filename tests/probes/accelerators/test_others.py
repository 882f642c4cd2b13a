from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sigmascope.probes import Accelerator, NullAccelerator, detect_accelerator
from sigmascope.probes.accelerators import has_float64, has_streams
from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.probes.accelerators.mps import MpsAccelerator
from sigmascope.probes.accelerators.xpu import XpuAccelerator

MIB = 2**20


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3 * MIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * MIB)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 100 * MIB)
    monkeypatch.delattr(torch.mps, "Event")


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    state = SimpleNamespace(initialized=True, reset=[])
    figures = {"current": 3 * MIB, "peak": 4 * MIB}
    statistics = {"allocated_bytes": {"all": figures}, "reserved_bytes": {"all": figures}}
    properties = SimpleNamespace(name="Intel Arc B580", total_memory=12 * MIB, driver_version="1.6.3")
    monkeypatch.setattr(torch.xpu, "memory_stats_as_nested_dict", lambda _device: statistics)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: state.initialized)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _device: (8 * MIB, 12 * MIB))
    monkeypatch.setattr(torch.xpu, "reset_peak_memory_stats", state.reset.append)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _device: properties)
    return state


def build(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)


@pytest.mark.parametrize("accelerator", [MpsAccelerator(), XpuAccelerator(), NullAccelerator()])
def test_each_is_an_accelerator(accelerator: object) -> None:
    assert isinstance(accelerator, Accelerator)


def test_mps_reports_use_and_has_no_peak(metal: None) -> None:
    accelerator = MpsAccelerator()
    assert accelerator.allocated_and_peak("mps:0") == (3 * MIB, 5 * MIB, None, None)
    reasons = accelerator.unavailable("mps:0")
    assert set(reasons) == {"peak_allocated", "peak_reserved"}
    assert "no peak" in reasons["peak_allocated"]
    assert "no peak" in (accelerator.reset_peak("mps:0") or "")


def test_mps_memory_gives_a_reason_for_what_unified_memory_lacks(metal: None) -> None:
    memory = MpsAccelerator().memory("mps:0")
    assert (memory.allocated_bytes, memory.reserved_bytes, memory.total_bytes) == (
        3 * MIB,
        5 * MIB,
        100 * MIB,
    )
    assert (memory.free_bytes, memory.driver_used_bytes) == (None, None)
    assert set(memory.unavailable) == {"free_bytes", "driver_used_bytes"}


def test_mps_has_no_events_as_their_times_are_waited_for(metal: None) -> None:
    assert MpsAccelerator().new_event("mps:0") is None
    assert "waits" in MpsAccelerator().untimed


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has Metal")
def test_mps_on_another_machine_gives_reasons() -> None:
    accelerator = MpsAccelerator()
    assert accelerator.allocated_and_peak("mps:0") == (None, None, None, None)
    assert "MPS" in accelerator.unavailable("mps:0")["allocated"]
    assert accelerator.new_event() is None
    assert "name" in accelerator.facts("mps:0").unavailable


def test_xpu_mirrors_cuda(xpu: SimpleNamespace) -> None:
    accelerator = XpuAccelerator()
    assert accelerator.current_device() == "xpu:0"
    assert accelerator.allocated_and_peak("xpu:0") == (3 * MIB, 3 * MIB, 4 * MIB, 4 * MIB)
    assert accelerator.memory("xpu:0").driver_used_bytes == 4 * MIB
    assert accelerator.reset_peak("xpu:0") is None
    assert xpu.reset == [0]


def test_a_graph_capture_on_xpu_is_left_alone(xpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[object] = []
    event = SimpleNamespace(record=recorded.append, query=lambda: True)
    monkeypatch.setattr(torch.xpu, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.xpu, "current_stream", lambda _device: "stream")
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True, raising=False)
    mark = XpuAccelerator().new_event()
    assert mark is not None
    assert not mark.record()
    assert recorded == []


def test_xpu_facts(xpu: SimpleNamespace) -> None:
    facts = XpuAccelerator().facts("xpu:0")
    assert (facts.name, facts.total_bytes, facts.driver_version) == ("Intel Arc B580", 12 * MIB, "1.6.3")


def test_xpu_that_the_process_does_not_use_gives_reasons(xpu: SimpleNamespace) -> None:
    xpu.initialized = False
    accelerator = XpuAccelerator()
    assert accelerator.allocated_and_peak("xpu:0") == (0, 0, 0, 0)
    assert accelerator.memory("xpu:0").unavailable["free_bytes"] == "xpu is not initialised in this process"
    assert set(accelerator.facts("xpu:0").unavailable) >= {"name", "total_bytes", "driver_version"}


def test_without_an_accelerator_every_fact_is_none_for_that_reason() -> None:
    accelerator = NullAccelerator("no accelerator: none here")
    assert accelerator.devices() == []
    assert accelerator.current_device() is None
    assert accelerator.allocated_and_peak("cuda:0") == (None, None, None, None)
    assert accelerator.memory("cuda:0").allocated_bytes is None
    given = [
        *accelerator.memory("cuda:0").unavailable.values(),
        *accelerator.facts("cuda:0").unavailable.values(),
        *accelerator.unavailable("cuda:0").values(),
        accelerator.reset_peak("cuda:0"),
    ]
    assert set(given) == {"no accelerator: none here"}
    assert accelerator.new_event() is None


def test_a_build_for_the_cpu_alone_has_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, None)
    assert "CPU-only" in (detect_accelerator().absence or "")


def test_a_cuda_build_with_devices_is_cuda_even_before_the_process_uses_it(
    monkeypatch: pytest.MonkeyPatch, gpu: Any
) -> None:
    build(monkeypatch, "cuda")
    gpu.initialized = False
    assert isinstance(detect_accelerator(), CudaAccelerator)


def test_a_cuda_build_without_devices_has_no_accelerator(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    build(monkeypatch, "cuda")
    gpu.initialized, gpu.nvml_count = False, 0
    assert detect_accelerator().absence == "no accelerator: CUDA sees no device"


def test_a_mac_build_is_mps_where_metal_works(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert detect_accelerator().kind == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert detect_accelerator().kind == "cpu"


def test_an_xpu_build_is_xpu(monkeypatch: pytest.MonkeyPatch, xpu: SimpleNamespace) -> None:
    build(monkeypatch, "xpu")
    assert detect_accelerator().kind == "xpu"


def test_an_accelerator_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, "mtia")
    assert "mtia" in (detect_accelerator().absence or "")


@pytest.mark.parametrize(("kind", "float64", "streams"), [
    ("cuda", True, True), ("xpu", True, True), ("mps", False, False), ("cpu", True, False), ("hpu", True, False),
])  # fmt: skip
def test_a_device_type_says_what_it_can_do(kind: str, float64: bool, streams: bool) -> None:
    assert (has_float64(torch.device(kind)), has_streams(kind)) == (float64, streams)


def test_nvml_knows_nvidias_devices_alone() -> None:
    assert CudaAccelerator().no_utilization is None
    for other in (XpuAccelerator(), MpsAccelerator()):
        assert "supports only NVIDIA devices" in str(other.no_utilization)
