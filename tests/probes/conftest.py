"""A CUDA that exists only in these fakes: what torch answers, without a device."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.probes.comfyui_checkout import load_file, make_patcher

from sigmascope.probes import nvml

__all__ = ["load_file", "make_patcher"]  # fixtures

MIB = 2**20


@dataclass
class FakeEvent:
    """A timing event whose moment is the fake device's clock when it was recorded."""

    gpu: "FakeGpu"
    stream: object = None
    at_ms: float | None = None

    def record(self, stream: object = None) -> None:
        self.stream, self.at_ms = stream, self.gpu.clock_ms

    def query(self) -> bool:
        self.gpu.asked("event")
        return self.at_ms is not None and self.gpu.done_ms >= self.at_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@dataclass
class FakeGpu:
    """The state behind the faked functions of `torch.cuda`."""

    initialized: bool = True
    count: int = 2
    nvml_count: int = 2
    nvml_loads: int = 0
    current: int = 0
    contexts: set[int] = field(default_factory=lambda: {0})
    capturing: bool = False
    backend: str = "native"
    allocated: int = 100 * MIB
    reserved: int = 200 * MIB
    peak_allocated: int = 150 * MIB
    peak_reserved: int = 300 * MIB
    free_and_total: tuple[int, int] = (20_000 * MIB, 24_000 * MIB)
    clock_ms: float = 0.0
    done_ms: float = 0.0
    calls: list[str] = field(default_factory=list)
    driver_calls: list[str] = field(default_factory=list)

    def statistics(self, device: int) -> dict[str, Any]:
        self.calls.append(f"statistics {device}")
        return {
            "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak_allocated}},
            "reserved_bytes": {"all": {"current": self.reserved, "peak": self.peak_reserved}},
        }

    def asked(self, what: str) -> None:
        """Note a call that the driver would answer."""
        self.driver_calls.append(what)

    def has_context(self, device: int) -> bool:
        self.asked("context")
        return device in self.contexts

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.asked("memory")
        assert device in self.contexts, "this would create a context"
        return self.free_and_total

    def stream(self, device: int) -> SimpleNamespace:
        assert device in self.contexts, "recording there would create a context"
        return SimpleNamespace(stream_id=10 + device)

    def count_by_nvml(self) -> int:
        self.nvml_loads += 1
        return self.nvml_count

    def needs_initialized(self, answer: Any, what: str = "device") -> Any:
        self.asked(what)
        assert self.initialized, "this would initialise CUDA"
        return answer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A process that uses the first of two devices."""
    fake = FakeGpu()
    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=24_000 * MIB, major=9, minor=0, uuid="aa-00", gcnArchName="gfx942"
    )
    cuda = {
        "is_initialized": lambda: fake.initialized,
        "device_count": lambda: fake.needs_initialized(fake.count),
        "current_device": lambda: fake.needs_initialized(fake.current),
        "mem_get_info": fake.mem_get_info,
        "reset_peak_memory_stats": lambda device: fake.calls.append(f"reset {device}"),
        "get_device_properties": lambda _device: fake.needs_initialized(properties),
        "is_current_stream_capturing": lambda: fake.capturing,
        "get_allocator_backend": lambda: fake.backend,
        "current_stream": lambda device: fake.needs_initialized(fake.stream(device)),
        "Event": lambda enable_timing: FakeEvent(fake) if enable_timing else None,
        "_device_count_nvml": fake.count_by_nvml,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fake.statistics)
    monkeypatch.setattr(nvml, "_UUIDS", {})
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", fake.has_context, raising=False)
    return fake
