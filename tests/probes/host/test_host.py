import platform
import socket
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sigmascope.probes import NullAccelerator, host, host_facts
from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.probes.host import place_in_group

NO_ACCELERATOR = NullAccelerator("no accelerator: none here")


def test_the_machine_and_its_python() -> None:
    facts = host_facts(NO_ACCELERATOR)
    assert facts.ram_total_bytes == psutil.virtual_memory().total
    assert facts.cpu_count_logical == psutil.cpu_count()
    assert facts.python_version == platform.python_version()
    assert facts.os
    assert facts.cpu_model or "cpu_model" in facts.unavailable


def test_versions_of_installed_libraries_only() -> None:
    libraries = host_facts(NO_ACCELERATOR).libraries
    assert libraries["torch"] == metadata.version("torch")
    assert "" not in libraries.values()
    assert set(libraries) <= {*host.LIBRARIES, "comfyui"}


def test_no_library_is_imported_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    host_facts(NO_ACCELERATOR)
    imported = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not imported & {"diffusers", "transformers", "peft", "accelerate"}


def test_comfyui_is_recognised_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__="0.3.64"))
    assert host_facts(NO_ACCELERATOR).libraries["comfyui"] == "0.3.64"


def test_without_accelerator_the_reason_is_told() -> None:
    facts = host_facts(NO_ACCELERATOR)
    assert facts.accelerators == ()
    assert facts.unavailable["accelerators"] == "no accelerator: none here"


def test_every_device_is_described(gpu: Any) -> None:
    accelerators = host_facts(CudaAccelerator()).accelerators
    assert [facts.device for facts in accelerators] == ["cuda:0", "cuda:1"]
    assert accelerators[0].name == "NVIDIA H200"


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD EPYC 9554\n\nprocessor\t: 1\nmodel name\t: other\n",
            "AMD EPYC 9554",
        ),
        (
            "processor\t: 0\nBogoMIPS\t: 108.00\n\nModel\t\t: Raspberry Pi 5 Model B\n",
            "Raspberry Pi 5 Model B",
        ),
        ("model name\t:\nHardware\t: Qualcomm SM8550\n", "Qualcomm SM8550"),
    ],
)
def test_the_processor_is_named_as_its_maker_does(cpuinfo: str, model: str) -> None:
    assert host._cpu_model_of_linux(cpuinfo) == model


def test_a_processor_without_a_name_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Plan 9")
    monkeypatch.setattr(platform, "processor", lambda: "")
    facts = host_facts(NO_ACCELERATOR)
    assert facts.cpu_model is None
    assert "does not name its processor" in facts.unavailable["cpu_model"]


def test_a_count_that_the_system_does_not_know_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    facts = host_facts(NO_ACCELERATOR)
    assert facts.cpu_count_physical is None
    assert facts.unavailable["cpu_count_physical"] == "the system does not report it"


@pytest.mark.parametrize(
    ("rank", "size", "place"),
    [
        ("1", "2", (1, 2)),
        ("0", "1", None),
        ("2", "2", None),
        ("x", "2", None),
        ("1", None, None),
        (None, None, None),
    ],
)
def test_a_launcher_s_variables_say_which_of_several_processes_this_one_is(
    rank: str | None, size: str | None, place: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    told = place_in_group()
    assert (None if told is None else (told["rank"], told["world_size"])) == place
    assert told is None or told["machine"] == socket.gethostname()


def test_torch_says_it_where_no_variable_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    told = place_in_group()
    assert told is not None
    assert (told["rank"], told["world_size"]) == (5, 8)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1 / 0)
    assert place_in_group() is None
