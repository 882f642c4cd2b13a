import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.monitor.guard import whole_number
from sigmascope.monitor.performance import (
    PerformanceMonitor,
    planned_metrics,
    seconds_above_zero,
)
from sigmascope.records.performance import PerformanceMetrics

USUAL: dict[str, Any] = {
    "model_name": "FLUX",
    "architecture_type": "MMDiT",
    "num_steps": 20,
    "resolution": (1024, 1024),
    "batch_size": 1,
    "torch_dtype": None,
}


def planned(**arguments: Any) -> PerformanceMetrics:
    return planned_metrics(**(USUAL | arguments), facts=None)


@pytest.mark.parametrize("target", [None, 0, -1.0, math.nan, math.inf, "5", 10**400, 5j, [5.0]])
def test_a_target_that_is_no_time_is_refused(target: object) -> None:
    with pytest.raises(ConfigError, match="target_time is"):
        seconds_above_zero("target_time", target)


def test_a_target_may_be_any_kind_of_number() -> None:
    assert [seconds_above_zero("t", one) for one in (2, np.float32(2), torch.tensor(2.0))] == [2.0] * 3


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_a_monitor_refuses_such_a_target_at_first_and_later(target: float) -> None:
    with pytest.raises(ConfigError, match="target_generation_time"):
        PerformanceMonitor(target)
    monitor = PerformanceMonitor(5.0)
    with pytest.raises(ConfigError, match="target_generation_time"):
        monitor.target_generation_time = target
    assert monitor.target_generation_time == 5.0


def test_a_target_may_be_changed(tmp_path: Path) -> None:
    monitor = PerformanceMonitor()
    monitor.target_generation_time = 2.0
    with monitor.monitor_generation():
        pass
    assert monitor.get_performance_summary()["target_configuration"]["target_time"] == 2.0


@pytest.mark.parametrize("value", [None, 0, -3, 1.5, "10", math.nan, math.inf, [1]])
def test_a_history_that_is_no_number_of_entries_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="history is"):
        whole_number("history", value, least=1)


def test_a_monitor_refuses_to_remember_nothing() -> None:
    with pytest.raises(ConfigError, match="history is 0"):
        PerformanceMonitor(history=0)
    with pytest.raises(ConfigError, match="step_history is 0"):
        PerformanceMonitor(step_history=0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_steps", "20"), ("num_steps", -1), ("num_steps", 2.5), ("num_steps", math.nan),
        ("resolution", 512), ("resolution", (512, 512, 3)), ("resolution", "512x512"), ("resolution", (512, "x")),
        ("batch_size", -1), ("batch_size", 0),
    ],
)  # fmt: skip
def test_an_argument_that_is_none_of_its_kind_is_refused(argument: str, value: object) -> None:
    with pytest.raises(ConfigError, match=argument):
        planned(**{argument: value})


def test_that_is_before_the_work_and_not_at_its_first_step() -> None:
    with pytest.raises(ConfigError, match="num_steps is -1"):
        PerformanceMonitor(sample_hz=None).monitor_generation(num_steps=-1)


def test_what_is_not_known_may_be_none() -> None:
    monitor = PerformanceMonitor(sample_hz=None)
    with monitor.monitor_generation(num_steps=None, resolution=None):
        monitor.start_step_timing()
        assert monitor.end_step_timing() is not None
    assert monitor.current_metrics.num_inference_steps == 0
    assert monitor.get_performance_summary()["current_generation"]["resolution"] == "0x0"
    unknown = planned(model_name=None, architecture_type=None, batch_size=None)
    assert (unknown.model_name, unknown.architecture_type, unknown.batch_size) == ("", "", 1)


def test_numbers_dtypes_and_paths_of_others_become_plain_values() -> None:
    metrics = planned(
        model_name=Path("models/flux"),
        num_steps=np.int64(3),
        resolution=np.array([640, 512]),
        torch_dtype=torch.bfloat16,
    )
    exported = json.loads(json.dumps(metrics.as_dict()))
    assert (exported["model_name"], exported["torch_dtype"]) == ("models/flux", "bfloat16")
    assert (exported["num_inference_steps"], exported["image_resolution"]) == (3, [640, 512])


@pytest.mark.parametrize(
    ("given", "kept"), [("mmdit", "MMDiT"), ("UNET", "UNet"), ("dit", "DiT"), ("Mamba", "Mamba")]
)
def test_architectures_are_called_as_the_contract_does(given: str, kept: str) -> None:
    assert planned(architecture_type=given).architecture_type == kept
