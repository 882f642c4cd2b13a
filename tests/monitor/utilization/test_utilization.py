import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tests.monitor.conftest import FakeAccelerator

from sigmascope.monitor import Recorder
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.utilization import ONLY_NVIDIA, TOO_SHORT, UtilizationMeter
from sigmascope.probes import NullAccelerator, Reading, nvml
from sigmascope.probes.nvml import GPU_ACTIVITY, ActivityReading, GpuActivity
from sigmascope.records.performance import Gauge, utilization_of
from sigmascope.records.serialization import run_from_json, run_to_json


class FakeSource:
    """Gives one reading after another."""

    def __init__(self) -> None:
        self.number = 0
        self.activities: tuple[GpuActivity, ...] = ()
        self.reason: str | None = None

    def show(self, *activities: GpuActivity) -> None:
        self.number += 1
        self.activities = activities

    def read(self, devices: list[str]) -> Reading[ActivityReading]:
        if self.reason is not None:
            return Reading(None, self.reason)
        return Reading(ActivityReading(self.number, self.activities))


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def meter(source: FakeSource) -> UtilizationMeter:
    return UtilizationMeter(FakeAccelerator(2), is_sampled=True, read=source.read)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def sample(meter: UtilizationMeter, source: FakeSource, at: float, *busy: float | None) -> None:
    source.show(*(GpuActivity(f"cuda:{index}", one) for index, one in enumerate(busy)))
    meter.sample(ns(at))


def test_a_scope_has_mean_and_highest_of_each_device(meter: UtilizationMeter, source: FakeSource) -> None:
    scope = meter.open(0)
    sample(meter, source, 1.0, 50.0, 0.0)
    sample(meter, source, 2.0, 100.0, 10.0)
    found, reason = meter.freeze(scope, 0)
    assert reason is None
    assert found["cuda:0"].busy_percent == Gauge(75.0, 100.0, 2.0)
    assert found["cuda:1"].busy_percent == Gauge(5.0, 10.0, 2.0)
    assert (found["cuda:0"].at_seconds, found["cuda:0"].busy_series) == ((1.0, 2.0), (50.0, 100.0))


def test_nested_scopes_each_have_what_fell_into_them(meter: UtilizationMeter, source: FakeSource) -> None:
    outer = meter.open(0)
    sample(meter, source, 1.0, 10.0)
    inner = meter.open(ns(1.5))
    sample(meter, source, 2.0, 90.0)
    meter.close(inner)
    sample(meter, source, 3.0, 20.0)
    assert meter.freeze(inner, ns(1.5))[0]["cuda:0"].busy_percent == Gauge(90.0, 90.0, 0.5)
    assert meter.freeze(outer, 0)[0]["cuda:0"].busy_percent == Gauge(40.0, 90.0, 2.0)


def test_a_sample_of_the_time_before_a_scope_is_not_its_own(
    meter: UtilizationMeter, source: FakeSource
) -> None:
    scope = meter.open(ns(1.0))
    sample(meter, source, 1.1, 99.0)
    assert meter.freeze(scope, ns(1.0)) == ({}, TOO_SHORT)


def test_a_reading_counts_once_however_often_it_is_seen(meter: UtilizationMeter, source: FakeSource) -> None:
    scope = meter.open(0)
    sample(meter, source, 1.0, 50.0)
    meter.sample(ns(1.1))
    assert meter.freeze(scope, 0)[0]["cuda:0"].samples == 1


def test_a_figure_that_is_not_known_stays_none_and_the_others_count(
    meter: UtilizationMeter, source: FakeSource
) -> None:
    scope = meter.open(0)
    why = {"busy_percent": "NotSupported"}
    source.show(GpuActivity("cuda:0", None, None, 70.0, 250.0, True, False, why))
    meter.sample(ns(1.0))
    source.show(GpuActivity("cuda:0", None, None, 72.0, 350.0, False, False, why))
    meter.sample(ns(2.0))
    device = meter.freeze(scope, 0)[0]["cuda:0"]
    assert (device.busy_percent, device.busy_series, device.unavailable) == (None, (), why)
    assert device.temperature_celsius == Gauge(71.0, 72.0, 2.0)
    assert device.power_watts == Gauge(300.0, 350.0, 2.0)
    assert (device.heat_percent, device.power_cap_percent) == (50.0, 0.0)


def test_a_library_that_fails_is_asked_no_more(meter: UtilizationMeter, source: FakeSource) -> None:
    scope = meter.open(0)
    source.reason = "no driver"
    meter.sample(ns(1.0))
    source.reason = None
    sample(meter, source, 2.0, 50.0)
    assert meter.freeze(scope, 0) == ({}, "no driver")


@pytest.mark.parametrize(
    ("accelerator", "is_sampled", "reason"),
    [
        (NullAccelerator("no accelerator here"), True, "no accelerator here"),
        (FakeAccelerator(), False, "sampling is switched off (sample_hz)"),
    ],
)
def test_where_nothing_is_read_there_is_a_reason(
    accelerator: FakeAccelerator | NullAccelerator, is_sampled: bool, reason: str
) -> None:
    meter = UtilizationMeter(accelerator, is_sampled=is_sampled)
    assert meter.open(0) is None
    assert meter.freeze(None, 0) == ({}, reason)


def test_other_makers_have_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    monkeypatch.setattr(accelerator, "kind", "xpu")
    meter = UtilizationMeter(accelerator, is_sampled=True)
    assert (meter.reason, meter.now()) == (ONLY_NVIDIA, {})


class BusyNvml(ModuleType):
    """One device at 97 per cent that counts how often it is asked."""

    NVMLError = OSError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.asked_at: list[float] = []
        self.was_asked_thrice = threading.Event()

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA L4"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self.asked_at.append(time.monotonic())
        if len(self.asked_at) >= 3:
            self.was_asked_thrice.set()
        return SimpleNamespace(gpu=97, memory=55)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[BusyNvml]:
    fake = BusyNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_sessions", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    GPU_ACTIVITY.forget()
    yield fake
    GPU_ACTIVITY.forget()


def test_the_samplers_thread_reads_it_into_the_record_of_a_stage(busy: BusyNvml) -> None:
    recorder = Recorder(accelerator=FakeAccelerator())
    with recorder.stage("denoising"):
        assert busy.was_asked_thrice.wait(20)
        assert recorder.gpu_busy_percent() == {"cuda:0": 97.0}
    run = run_from_json(run_to_json(recorder.run()))
    device = utilization_of(run.stage("denoising"))["cuda:0"]
    assert device.samples >= 2
    assert device.busy_percent is not None
    assert (device.busy_percent.mean, device.busy_percent.highest) == (97.0, 97.0)
    assert "nvmlDeviceGetPowerUsage" in device.unavailable["power_watts"]


def test_many_recorders_do_not_ask_more_often_than_one(busy: BusyNvml) -> None:
    with ExitStack() as stages:
        for _ in range(8):
            stages.enter_context(Recorder(accelerator=FakeAccelerator()).stage("denoising"))
        assert busy.was_asked_thrice.wait(20)
    gaps = [b - a for a, b in itertools.pairwise(busy.asked_at)]
    assert min(gaps) >= 0.19


def test_a_monitor_tells_how_busy_the_device_is_while_a_generation_runs(busy: BusyNvml) -> None:
    monitor = PerformanceMonitor(accelerator=FakeAccelerator())
    with monitor.monitor_generation():
        assert monitor.gpu_busy_percent() == {"cuda:0": 97.0}
    assert monitor.gpu_busy_percent() == {}


def test_without_an_accelerator_a_stage_says_why_it_has_none() -> None:
    recorder = Recorder(accelerator=NullAccelerator("no accelerator"), sample_hz=None)
    with recorder.stage("denoising"):
        pass
    stage = recorder.run().stages[0]
    assert utilization_of(stage) == {}
    assert stage.unavailable["utilization"] == "no accelerator"
