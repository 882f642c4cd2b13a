import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sigmascope.probes import nvml, read_nvml
from sigmascope.probes.nvml import nvml_memory

UUIDS = ["GPU-0000aaaa", "GPU-1111bbbb", "GPU-2222cccc"]


class FakeError(Exception):
    pass


class FakeNvml(ModuleType):
    """Three devices in PCI order; the handle of each is its number."""

    NVMLError = FakeError
    PART = "MIG-99990000"
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.names = ["NVIDIA L4"] * 3
        self.starts = 0
        self.parted: set[int] = set()

    def nvmlInit(self) -> None:
        self.starts += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        known = [*UUIDS, self.PART]
        if uuid.decode() not in known:
            raise FakeError("Not Found")
        return known.index(uuid.decode())

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if not self.parted:
            raise FakeError("Not Supported")
        return [int(handle in self.parted)] * 2

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return [*UUIDS, self.PART][handle]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return [*self.names, "NVIDIA L4 MIG 1g"][handle].encode()

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=100, used=40, free=60)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_sessions", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return fake


def test_every_fact_is_read(library: FakeNvml) -> None:
    facts = read_nvml("cuda:1")
    assert (facts.name, facts.uuid, facts.driver_version) == ("NVIDIA L4", UUIDS[1], "550.54.15")
    assert (facts.total_bytes, facts.used_bytes, facts.free_bytes) == (100, 40, 60)
    assert (facts.utilization_percent, facts.temperature_celsius) == (37.0, 61.0)
    assert facts.unavailable == {}


def test_memory_alone_is_read_without_the_slower_facts(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_arguments: object) -> None:
        raise AssertionError("a snapshot of memory would wait for this")

    for name in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlSystemGetDriverVersion"):
        monkeypatch.setattr(library, name, slow)
    assert nvml_memory("cuda:1").value == (60, 100)


def test_memory_that_nvml_does_not_tell_has_its_reason(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        library, "nvmlDeviceGetMemoryInfo", lambda _handle: (_ for _ in ()).throw(FakeError("lost"))
    )
    assert nvml_memory("cuda:0").reason == "FakeError: lost"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_sessions", {})
    assert "not installed" in str(nvml_memory("cuda:0").reason)


def test_a_fact_that_fails_has_its_reason_and_the_others_stay(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise FakeError("Not Supported")

    monkeypatch.setattr(library, "nvmlDeviceGetTemperature", fail)
    monkeypatch.setattr(library, "nvmlDeviceGetMemoryInfo", fail)
    facts = read_nvml()
    assert facts.unavailable["temperature_celsius"] == "FakeError: Not Supported"
    assert set(facts.unavailable) == {"temperature_celsius", "total_bytes", "used_bytes", "free_bytes"}
    assert facts.utilization_percent == 37.0


@pytest.mark.parametrize(
    ("visible", "device", "uuid"),
    [
        ("2,0", "cuda:0", UUIDS[2]),
        ("2,0", "cuda:1", UUIDS[0]),
        ("GPU-1111", "cuda:0", UUIDS[1]),
        ("GPU-2222cccc,GPU-0000aaaa", "cuda:1", UUIDS[0]),
    ],
)
def test_visible_devices_are_mapped(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, device: str, uuid: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read_nvml(device).uuid == uuid


@pytest.mark.parametrize(("visible", "device"), [("2,0", "cuda:2"), ("", "cuda:0"), ("GPU-ffff", "cuda:0")])
def test_a_device_that_is_not_visible_is_not_guessed(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, device: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = read_nvml(device)
    assert facts.uuid is None
    assert "LookupError" in facts.unavailable["uuid"]


def test_devices_of_several_models_are_not_matched_by_number(library: FakeNvml) -> None:
    library.names = ["NVIDIA L4", "NVIDIA H200", "NVIDIA L4"]
    assert "CUDA's device order is unknown" in read_nvml("cuda:0").unavailable["uuid"]


def test_pci_order_makes_numbers_safe(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    library.names = ["NVIDIA L4", "NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert read_nvml("cuda:1").name == "NVIDIA H200"


def test_once_cuda_is_initialised_its_uuid_decides(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.names = ["NVIDIA L4", "NVIDIA H200", "NVIDIA L4"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="1111bbbb"))
    assert read_nvml("cuda:0").name == "NVIDIA H200"


def test_a_part_of_a_device_is_found_by_its_uuid(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", library.PART)
    assert read_nvml("cuda:0").uuid == library.PART


def test_once_cuda_is_initialised_the_uuid_may_be_that_of_a_part(
    library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace(uuid="99990000"))
    assert read_nvml("cuda:0").uuid == library.PART


def test_the_number_of_a_device_in_parts_says_nothing(library: FakeNvml) -> None:
    library.parted = {0}
    facts = read_nvml("cuda:0")
    assert facts.total_bytes is None
    assert "MIG" in facts.unavailable["total_bytes"]
    assert read_nvml("cuda:1").total_bytes == 100


def test_the_library_is_started_once_per_process(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    read_nvml()
    read_nvml()
    assert library.starts == 1
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as a forked child would see it
    read_nvml()
    assert library.starts == 2


def test_a_missing_package_is_the_reason(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = read_nvml()
    assert set(facts.unavailable.values()) == {"the package nvidia-ml-py is not installed"}


def test_a_missing_driver_is_the_reason(library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise FakeError("Driver Not Loaded")

    monkeypatch.setattr(library, "nvmlInit", fail)
    assert read_nvml().unavailable["name"] == "FakeError: Driver Not Loaded"


def test_amd_devices_are_not_nvmls(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "NVIDIA" in read_nvml().unavailable["name"]
