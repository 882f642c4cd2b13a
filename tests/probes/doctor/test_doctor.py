import sys
from pathlib import Path

import pytest
from tests.probes.conftest import FakeGpu

from sigmascope.probes.accelerators import NullAccelerator
from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.probes.doctor import examine


def works(name: str, accelerator: object) -> tuple[bool, str]:
    report = examine(accelerator)  # type: ignore[arg-type]
    found = next(one for one in report.measurements if one.name == name)
    return found.works, found.reason


def test_without_a_device_its_figures_have_the_reason() -> None:
    accelerator = NullAccelerator("no accelerator: the card is in the other machine")
    for name in ("memory of devices", "time on the device", "utilisation of the device"):
        assert works(name, accelerator) == (False, "no accelerator: the card is in the other machine")
    assert works("memory of the process", accelerator)[0]
    assert examine(accelerator).memory == ()


def test_devices_are_listed_with_their_memory(gpu: FakeGpu) -> None:
    report = examine(CudaAccelerator())
    assert [memory.device for memory in report.memory] == ["cuda:0", "cuda:1"]
    assert works("memory of devices", CudaAccelerator())[0]


@pytest.mark.parametrize(
    ("variable", "value", "advice"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "cudaMallocAsync"),
        ("CUDA_LAUNCH_BLOCKING", "1", "every kernel launch wait"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "no peaks"),
    ],
)
def test_settings_that_spoil_figures_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, advice: str
) -> None:
    monkeypatch.setenv(variable, value)
    report = examine(NullAccelerator("none"))
    assert report.settings[variable] == value
    assert any(advice in line for line in report.advice)


def test_expandable_segments_are_advised_on_cuda_alone(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert any("expandable_segments" in line for line in examine(CudaAccelerator()).advice)
    assert not examine(NullAccelerator("none")).advice
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert not examine(CudaAccelerator()).advice


def test_no_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(Path.home() / "venv" / "bin" / "python"))
    assert examine(NullAccelerator("none")).python == "~/venv/bin/python"
    monkeypatch.setenv("SIGMASCOPE_STORE", "postgresql://user:secret@host/runs")
    assert "secret" not in str(examine(NullAccelerator("none")).as_dict())
