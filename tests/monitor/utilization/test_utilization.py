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
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peaks import HostMemory
from sigmascope.monitor.performance import PerformanceMonitor
from sigmascope.monitor.utilization import TOO_SHORT, SampledFacts, ScopeSamples
from sigmascope.probes import NullAccelerator, Reading, nvml
from sigmascope.probes.accelerators.accelerator import ONLY_NVIDIA
from sigmascope.probes.nvml import GPU_ACTIVITY, ActivityReading, GpuActivity
from sigmascope.records.performance import DeviceUtilization, Gauge, utilization_of
from sigmascope.records.run import Stage
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
def sampled(source: FakeSource) -> SampledFacts:
    return SampledFacts(FakeAccelerator(2), Guard(), is_sampled=True, read=source.read)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def look(sampled: SampledFacts, at: float) -> None:
    sampled.sample(ns(at), HostMemory(), {})


def sample(sampled: SampledFacts, source: FakeSource, at: float, *busy: float | None) -> None:
    source.show(*(GpuActivity(f"cuda:{index}", percent) for index, percent in enumerate(busy)))
    look(sampled, at)


def devices_of(
    sampled: SampledFacts, samples: ScopeSamples | None, start: float = 0.0
) -> tuple[dict[str, DeviceUtilization], str | None]:
    """What is known of a scope by device, and why nothing is."""
    facts, unavailable = sampled.freeze(samples, ns(start), is_outermost=False)
    stage = Stage("denoising", 0.0, 1.0, facts=facts)
    return utilization_of(stage), unavailable.get("utilization")


def test_a_scope_has_mean_and_highest_of_each_device(sampled: SampledFacts, source: FakeSource) -> None:
    scope = sampled.open(0, is_outermost=False)
    sample(sampled, source, 1.0, 50.0, 0.0)
    sample(sampled, source, 2.0, 100.0, 10.0)
    found, reason = devices_of(sampled, scope)
    assert reason is None
    assert found["cuda:0"].busy_percent == Gauge(75.0, 100.0, 2.0)
    assert found["cuda:1"].busy_percent == Gauge(5.0, 10.0, 2.0)
    assert (found["cuda:0"].at_seconds, found["cuda:0"].busy_series) == ((1.0, 2.0), (50.0, 100.0))


def test_nested_scopes_each_have_what_fell_into_them(sampled: SampledFacts, source: FakeSource) -> None:
    outer = sampled.open(0, is_outermost=False)
    sample(sampled, source, 1.0, 10.0)
    inner = sampled.open(ns(1.5), is_outermost=False)
    sample(sampled, source, 2.0, 90.0)
    sampled.close(inner)
    sample(sampled, source, 3.0, 20.0)
    assert devices_of(sampled, inner, 1.5)[0]["cuda:0"].busy_percent == Gauge(90.0, 90.0, 0.5)
    assert devices_of(sampled, outer)[0]["cuda:0"].busy_percent == Gauge(40.0, 90.0, 2.0)


def test_a_sample_of_the_time_before_a_scope_is_not_its_own(
    sampled: SampledFacts, source: FakeSource
) -> None:
    scope = sampled.open(ns(1.0), is_outermost=False)
    sample(sampled, source, 1.1, 99.0)
    assert devices_of(sampled, scope, 1.0) == ({}, TOO_SHORT)


def test_a_reading_counts_once_however_often_it_is_seen(sampled: SampledFacts, source: FakeSource) -> None:
    scope = sampled.open(0, is_outermost=False)
    sample(sampled, source, 1.0, 50.0)
    look(sampled, 1.1)
    assert devices_of(sampled, scope)[0]["cuda:0"].samples == 1


def test_a_figure_that_is_not_known_stays_none_and_the_others_count(
    sampled: SampledFacts, source: FakeSource
) -> None:
    scope = sampled.open(0, is_outermost=False)
    why = {"busy_percent": "NotSupported"}
    source.show(GpuActivity("cuda:0", None, None, 70.0, 250.0, True, False, why))
    look(sampled, 1.0)
    source.show(GpuActivity("cuda:0", None, None, 72.0, 350.0, False, False, why))
    look(sampled, 2.0)
    device = devices_of(sampled, scope)[0]["cuda:0"]
    assert (device.busy_percent, device.busy_series, device.unavailable) == (None, (), why)
    assert device.temperature_celsius == Gauge(71.0, 72.0, 2.0)
    assert device.power_watts == Gauge(300.0, 350.0, 2.0)
    assert (device.heat_percent, device.power_cap_percent) == (50.0, 0.0)


def test_a_library_that_fails_is_asked_no_more(sampled: SampledFacts, source: FakeSource) -> None:
    scope = sampled.open(0, is_outermost=False)
    source.reason = "no driver"
    look(sampled, 1.0)
    source.reason = None
    sample(sampled, source, 2.0, 50.0)
    assert devices_of(sampled, scope) == ({}, "no driver")


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
    sampled = SampledFacts(accelerator, Guard(), is_sampled=is_sampled)
    look(sampled, 1.0)
    assert devices_of(sampled, sampled.open(0, is_outermost=False)) == ({}, reason)
    assert devices_of(sampled, None) == ({}, reason)


def test_other_makers_have_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()
    monkeypatch.setattr(accelerator, "no_utilization", ONLY_NVIDIA)
    sampled = SampledFacts(accelerator, Guard(), is_sampled=True)
    assert (sampled.reason, sampled.busy_percent()) == (ONLY_NVIDIA, {})


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
