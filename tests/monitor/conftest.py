import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from sigmascope.monitor import Recorder, scope
from sigmascope.probes import AcceleratorEvent, AllocatorBytes
from sigmascope.records.memory import AcceleratorMemory, MemorySnapshot
from sigmascope.records.run import AcceleratorFacts

MIB = 2**20


class FakeClock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def pass_seconds(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


class FakeEvent:
    """A mark in the fake accelerator's queue of work."""

    def __init__(self, accelerator: "FakeAccelerator") -> None:
        self._accelerator = accelerator
        self.at_seconds: float | None = None
        self.stream: int | None = None

    def record(self) -> bool:
        self.stream = self._accelerator.stream
        self.at_seconds = self._accelerator.queued_on[self.stream]
        return True

    def query(self) -> bool:
        self._accelerator.queries.append(threading.get_ident())
        return self.at_seconds is not None and self.at_seconds <= self._accelerator.done_seconds

    def elapsed_seconds(self, end: "FakeEvent") -> float | None:
        if self.at_seconds is None or end.at_seconds is None:
            return None
        return end.at_seconds - self.at_seconds


class FakeAccelerator:
    """An allocator with running peaks, and a queue of work that is done when the test says so."""

    kind = "cuda"
    untimed: str | None = None
    no_utilization: str | None = None
    absence: str | None = None

    def __init__(self, devices: int = 1) -> None:
        self._names = [f"cuda:{index}" for index in range(devices)]
        self.allocated = dict.fromkeys(self._names, 0)
        self.peaks = dict.fromkeys(self._names, 0)
        self.stream = 0
        self.queued_on = {0: 0.0, 7: 0.0}
        self.queries: list[int] = []
        self.resets = 0
        self.done_seconds = 0.0
        self.events_made = 0
        self.fails: str | None = None
        self.no_reset: str | None = None

    @property
    def queued_seconds(self) -> float:
        """When the stream that work goes to now has done all that it was given."""
        return self.queued_on[self.stream]

    @queued_seconds.setter
    def queued_seconds(self, seconds: float) -> None:
        self.queued_on[self.stream] = seconds

    def allocate(self, nbytes: int, device: str = "cuda:0") -> None:
        self.allocated[device] += nbytes
        self.peaks[device] = max(self.peaks[device], self.allocated[device])

    def free(self, nbytes: int, device: str = "cuda:0") -> None:
        self.allocated[device] -= nbytes

    def _may_fail(self, method: str) -> None:
        if self.fails == method:
            raise OSError(f"{method} is broken")

    def device_count(self) -> int:
        return len(self._names)

    def devices(self) -> list[str]:
        self._may_fail("devices")
        return list(self._names)

    def current_device(self) -> str | None:
        self._may_fail("current_device")
        return self._names[0]

    def memory(self, device: str) -> AcceleratorMemory:
        self._may_fail("memory")
        return AcceleratorMemory(device, self.allocated[device], 2 * self.allocated[device])

    def allocated_and_peak(self, device: str) -> AllocatorBytes:
        self._may_fail("allocated_and_peak")
        allocated, peak = self.allocated[device], self.peaks[device]
        return AllocatorBytes(allocated, 2 * allocated, peak, 2 * peak)

    def unavailable(self, device: str) -> Mapping[str, str]:
        self._may_fail("unavailable")
        return {}

    def reset_peak(self, device: str) -> str | None:
        self._may_fail("reset_peak")
        self.resets += 1
        if self.no_reset is not None:
            return self.no_reset
        self.peaks[device] = self.allocated[device]
        return None

    def new_event(self, device: str | None = None) -> AcceleratorEvent | None:
        self._may_fail("new_event")
        self.events_made += 1
        return FakeEvent(self)

    def facts(self, device: str) -> AcceleratorFacts:
        self._may_fail("facts")
        return AcceleratorFacts(device, name="Fake")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def accelerator() -> FakeAccelerator:
    return FakeAccelerator()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder("test", sample_hz=None)


class FakeHost:
    """What the machine's memory is said to be."""

    rss = 100 * MIB
    largest_rss: int | None = None
    ram_used = 1000 * MIB

    def __init__(self) -> None:
        self.was_read = threading.Event()

    def snapshot(self, accelerator: object = None) -> MemorySnapshot:
        self.was_read.set()
        return MemorySnapshot(4000 * MIB, self.ram_used, 3000 * MIB, self.rss)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    fake = FakeHost()
    monkeypatch.setattr(scope, "process_rss_bytes", lambda: fake.rss)
    monkeypatch.setattr(scope, "process_peak_rss_bytes", lambda: fake.largest_rss)
    monkeypatch.setattr(scope, "system_memory", fake.snapshot)
    monkeypatch.setattr(scope, "memory_snapshot", fake.snapshot)
    return fake


@pytest.fixture
def make_accelerator() -> type[FakeAccelerator]:
    return FakeAccelerator


@pytest.fixture(scope="module")
def vae() -> Any:
    """A real AutoencoderKL of factor 2."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()
