import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sigmascope.probes import nvml
from sigmascope.probes.nvml import GpuActivity, GpuActivitySource


class FakeError(Exception):
    pass


class NotSupportedError(FakeError):
    pass


class FakeNvml(ModuleType):
    """Two devices, whose handles are their numbers; `broken` raises what it is told to."""

    NVMLError = FakeError
    NVMLError_NotSupported = NotSupportedError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.clock_reasons = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise self.broken[name]

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._call("rates")
        return SimpleNamespace(gpu=90 + handle, memory=40)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._call("temperature")
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._call("power")
        return 71_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self.clock_reasons


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_sessions", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def read(library: FakeNvml, seconds: Seconds) -> Callable[[], GpuActivity]:
    source = GpuActivitySource(seconds)

    def read_anew() -> GpuActivity:
        seconds.now += 1.0
        reading = source.read(["cuda:0"]).value
        assert reading is not None
        return reading.activities[0]

    return read_anew


def test_every_figure_is_read_of_every_device(library: FakeNvml, seconds: Seconds) -> None:
    reading = GpuActivitySource(seconds).read(["cuda:0", "cuda:1"]).value
    assert reading is not None
    assert reading.activities == (
        GpuActivity("cuda:0", 90.0, 40.0, 61.0, 71.5, False, False),
        GpuActivity("cuda:1", 91.0, 40.0, 61.0, 71.5, False, False),
    )


@pytest.mark.parametrize(
    ("bits", "heat", "cap"),
    [(0x20, True, False), (0x40, True, False), (0x04, False, True), (0x01, False, False)],
)
def test_what_lowers_the_clocks_is_told(
    library: FakeNvml, read: Callable[[], GpuActivity], bits: int, heat: bool, cap: bool
) -> None:
    library.clock_reasons = bits  # nvml.h: software thermal, hardware thermal, software power cap, idle
    activity = read()
    assert (activity.slowed_by_heat, activity.held_by_power_cap) == (heat, cap)


def test_nobody_makes_it_ask_more_than_five_times_a_second(library: FakeNvml, seconds: Seconds) -> None:
    source = GpuActivitySource(seconds)
    for _ in range(100):  # one second in steps of 10 ms
        source.read(["cuda:0"])
        seconds.now += 0.01
    assert library.calls.count("rates") == 5


def test_readings_are_numbered_so_that_none_counts_twice(library: FakeNvml, seconds: Seconds) -> None:
    source = GpuActivitySource(seconds)
    numbers = []
    for wait in (0.0, 0.1, 0.2):
        seconds.now += wait
        reading = source.read(["cuda:0"]).value
        assert reading is not None
        numbers.append(reading.number)
    assert numbers == [1, 1, 2]


def test_what_a_device_does_not_support_has_a_reason(
    library: FakeNvml, read: Callable[[], GpuActivity]
) -> None:
    library.broken["power"] = NotSupportedError("Not Supported")
    assert read().power_watts is None
    assert read().unavailable == {"power_watts": "NotSupportedError: Not Supported"}
    assert read().busy_percent == 90.0


def test_what_fails_for_a_moment_is_asked_for_again(
    library: FakeNvml, read: Callable[[], GpuActivity]
) -> None:
    library.broken["rates"] = FakeError("Timeout")
    assert read().unavailable == {
        "busy_percent": "FakeError: Timeout",
        "memory_busy_percent": "FakeError: Timeout",
    }
    library.broken.clear()
    assert read().busy_percent == 90.0


def test_without_the_library_there_is_a_reason(library: FakeNvml, seconds: Seconds) -> None:
    library.broken["init"] = FakeError("Driver Not Loaded")
    reading = GpuActivitySource(seconds).read(["cuda:0"])
    assert (reading.value, reading.reason) == (None, "FakeError: Driver Not Loaded")


def test_a_device_that_cannot_be_told_apart_yet_has_a_reason(
    library: FakeNvml, read: Callable[[], GpuActivity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    activity = read()
    assert activity.busy_percent is None
    assert "shows no device 0" in activity.unavailable["busy_percent"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert read().busy_percent == 90.0
