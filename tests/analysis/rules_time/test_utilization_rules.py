from collections.abc import Callable
from typing import Any

import pytest
from tests.analysis.faulty_runs import stage, steps

from sigmascope.records.performance import DeviceUtilization, Gauge
from sigmascope.records.run import Finding, Stage
from sigmascope.records.serialization import to_plain

Found = Callable[..., dict[str, Finding]]


def denoising(samples: int = 50, **figures: Any) -> Stage:
    device = DeviceUtilization("cuda:0", samples, **figures)
    facts = {"utilization": {"cuda:0": to_plain(device)}}
    return stage("denoising", 10.0, steps=steps([0.5] * 20), facts=facts)


def busy(mean: float, samples: int = 50) -> Stage:
    return denoising(samples, busy_percent=Gauge(mean, 100.0, 1.0))


def test_a_device_that_waits_is_told_with_the_seconds_that_it_waited(found: Found) -> None:
    finding = found(busy(40.0))["utilization.device_idle"]
    assert finding.evidence["idle_seconds"] == pytest.approx(6.0)
    assert finding.message == "cuda:0 was busy for 40 % of denoising and waited for about 6.00 s of 10.00 s."
    assert finding.severity == "info"


@pytest.mark.parametrize(("mean", "severity"), [(34.0, "warning"), (36.0, "info")])
def test_one_that_waits_most_of_the_time_is_a_warning(found: Found, mean: float, severity: str) -> None:
    assert found(busy(mean))["utilization.device_idle"].severity == severity


@pytest.mark.parametrize("mean", [98.0, 70.0, 2.0])
def test_one_that_is_busy_or_not_in_use_is_no_finding(found: Found, mean: float) -> None:
    assert not found(busy(mean))


def test_a_few_samples_tell_nothing(found: Found) -> None:
    assert not found(busy(40.0, samples=4))


def test_heat_is_told_with_the_temperature(found: Found) -> None:
    hot = denoising(heat_percent=30.0, temperature_celsius=Gauge(80.0, 88.0, 5.0))
    finding = found(hot)["utilization.slowed_by_heat"]
    assert finding.message == "Heat lowered the clocks of cuda:0 for 30 % of denoising. It reached 88 °C."
    assert not found(denoising(heat_percent=0.0))


def test_a_limit_on_power_is_told_with_the_watts(found: Found) -> None:
    capped = denoising(power_cap_percent=90.0, power_watts=Gauge(448.0, 460.0, 5.0))
    finding = found(capped)["utilization.held_by_power_cap"]
    assert finding.message == "The power limit lowered the clocks of cuda:0 for 90 % of denoising, at 448 W."
    assert not found(denoising(power_cap_percent=10.0))
