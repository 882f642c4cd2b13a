import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sigmascope.probes import Accelerator, NvmlFacts, Reading
from sigmascope.probes.accelerators import cuda
from sigmascope.probes.accelerators.accelerator import ELSEWHERE, consistent
from sigmascope.probes.accelerators.cuda import CudaAccelerator
from sigmascope.threads import hands_off

MIB = 2**20


def test_it_is_an_accelerator(gpu: Any) -> None:
    assert isinstance(CudaAccelerator(), Accelerator)


def test_devices_are_named_as_torch_names_them(gpu: Any) -> None:
    gpu.current = 1
    assert CudaAccelerator().devices() == ["cuda:0", "cuda:1"]
    assert CudaAccelerator().current_device() == "cuda:1"


def test_memory_is_the_allocators_and_the_drivers(gpu: Any) -> None:
    memory = CudaAccelerator().memory("cuda:0")
    assert (memory.allocated_bytes, memory.reserved_bytes) == (100 * MIB, 200 * MIB)
    assert (memory.total_bytes, memory.free_bytes) == (24_000 * MIB, 20_000 * MIB)
    assert memory.driver_used_bytes == 4_000 * MIB
    assert memory.unavailable == {}


def test_the_four_figures_come_from_one_read(gpu: Any) -> None:
    figures = CudaAccelerator().allocated_and_peak("cuda:0")
    assert figures == (100 * MIB, 200 * MIB, 150 * MIB, 300 * MIB)
    assert gpu.calls == ["statistics 0"]


def test_before_the_process_uses_cuda_nothing_is_allocated_and_cuda_stays_asleep(gpu: Any) -> None:
    gpu.initialized = False  # the fakes fail when anything would initialise CUDA
    accelerator = CudaAccelerator()
    memory = accelerator.memory("cuda:0")
    assert accelerator.devices() == ["cuda:0", "cuda:1"]
    assert accelerator.current_device() == "cuda:0"
    assert accelerator.allocated_and_peak("cuda:0") == (0, 0, 0, 0)
    assert (memory.allocated_bytes, memory.total_bytes) == (0, None)
    assert "not initialised" in memory.unavailable["total_bytes"]
    assert accelerator.new_event() is None
    assert accelerator.reset_peak("cuda:0") is None
    assert gpu.calls == []


def test_a_device_that_the_process_does_not_use_is_not_timed(gpu: Any) -> None:
    gpu.contexts.clear()
    gpu.contexts.add(1)  # the fake fails when recording would create a context on the other one
    accelerator = CudaAccelerator()
    assert accelerator.current_device() == "cuda:0"
    assert (accelerator.new_event(), accelerator.new_event("cuda:0")) == (None, None)
    event = accelerator.new_event("cuda:1")
    assert event is not None
    assert event.record()


def test_before_the_process_uses_cuda_the_devices_are_counted_once(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.initialized = False
    accelerator = CudaAccelerator()
    for _ in range(100):
        assert accelerator.current_device() == "cuda:0"
    assert gpu.nvml_loads == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpu.nvml_count = 1
    assert accelerator.devices() == ["cuda:0"]


def test_a_warning_of_the_count_that_the_host_made_an_error_stays_inside(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.initialized = False
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: warnings.warn("no NVML", stacklevel=1))
    assert CudaAccelerator().devices() == []  # warnings are errors in these tests


def test_devices_that_only_cuda_could_count_are_not_counted(gpu: Any) -> None:
    gpu.initialized, gpu.nvml_count = False, -1
    assert CudaAccelerator().devices() == []
    assert CudaAccelerator().why_absent() is None


def test_a_device_that_the_process_does_not_use_gets_no_context(gpu: Any) -> None:
    memory = CudaAccelerator().memory("cuda:1")  # the fake fails when a context would be created
    assert memory.allocated_bytes == 0
    assert "this process does not use cuda:1" in memory.unavailable["free_bytes"]
    assert "NVML: " in memory.unavailable["free_bytes"]


def test_nvml_tells_the_memory_of_a_device_without_context(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "nvml_memory", lambda _device: Reading((50 * MIB, 80 * MIB)))
    memory = CudaAccelerator().memory("cuda:1")
    assert (memory.total_bytes, memory.driver_used_bytes) == (80 * MIB, 30 * MIB)


def test_a_statistic_that_cuda_malloc_async_does_not_keep_is_unknown_with_its_reason(gpu: Any) -> None:
    gpu.backend, gpu.peak_allocated, gpu.peak_reserved, gpu.reserved = "cudaMallocAsync", 0, 0, 0
    accelerator = CudaAccelerator()
    assert accelerator.allocated_and_peak("cuda:0") == (100 * MIB, None, None, None)
    reason = "the cudaMallocAsync allocator does not report it"
    assert accelerator.unavailable("cuda:0") == dict.fromkeys(
        ("reserved", "peak_allocated", "peak_reserved"), reason
    )
    assert accelerator.memory("cuda:0").unavailable == {"reserved_bytes": reason}


def test_without_caching_zeros_are_unknown(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.allocated = gpu.reserved = gpu.peak_allocated = gpu.peak_reserved = 0
    accelerator = CudaAccelerator()
    assert accelerator.allocated_and_peak("cuda:0") == (0, 0, 0, 0)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert accelerator.allocated_and_peak("cuda:0") == (None, None, None, None)
    assert set(accelerator.unavailable("cuda:0").values()) == {cuda.UNCACHED}
    assert accelerator.memory("cuda:0").unavailable["allocated_bytes"] == cuda.UNCACHED


def test_what_is_counted_is_believed_whatever_the_variable_says(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
    assert CudaAccelerator().allocated_and_peak("cuda:0").allocated == 100 * MIB


def test_zeros_of_an_empty_device_are_facts() -> None:
    assert consistent(0, 0, 0, 0) == (0, 0, 0, 0)


def test_a_reserved_peak_below_the_allocated_one_is_not_believed() -> None:
    assert consistent(1, 2, 9, 4) == (1, 2, 9, None)


def test_a_peak_is_reset_on_its_device(gpu: Any) -> None:
    assert CudaAccelerator().reset_peak("cuda:0") is None
    assert gpu.calls == ["reset 0"]


@pytest.mark.parametrize("error", [AssertionError("no CUDA"), RuntimeError("lost"), AttributeError("gone")])
def test_what_torch_raises_becomes_a_reason(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    for name in ("mem_get_info", "reset_peak_memory_stats", "get_device_properties", "Event", "device_count"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fail)
    accelerator = CudaAccelerator()
    reason = f"{type(error).__name__}: {error}"
    assert accelerator.devices() == []
    assert accelerator.allocated_and_peak("cuda:0") == (None, None, None, None)
    assert set(accelerator.unavailable("cuda:0").values()) == {reason}
    assert accelerator.memory("cuda:0").unavailable["allocated_bytes"] == reason
    assert accelerator.reset_peak("cuda:0") == reason
    assert accelerator.facts("cuda:0").unavailable["name"] == reason
    assert accelerator.new_event("cuda:0") is None


def test_events_give_device_seconds_once_the_device_passed_them(gpu: Any) -> None:
    gpu.contexts.add(1)
    accelerator = CudaAccelerator()
    start, end = accelerator.new_event("cuda:1"), accelerator.new_event("cuda:1")
    assert start is not None
    assert end is not None
    assert start.record()
    gpu.clock_ms = 250.0
    assert end.record()
    gpu.done_ms = 100.0
    assert start.query()
    assert not end.query()
    assert start.elapsed_seconds(end) is None
    gpu.done_ms = 300.0
    assert start.elapsed_seconds(end) == 0.25


def test_an_event_is_recorded_on_the_stream_of_its_device(gpu: Any) -> None:
    gpu.contexts.add(1)
    event: Any = CudaAccelerator().new_event("cuda:1")
    event.record()
    assert (event._event.stream.stream_id, event.stream) == (11, 11)


def test_an_event_that_was_never_recorded_is_not_passed(gpu: Any) -> None:
    event = CudaAccelerator().new_event()
    assert event is not None
    assert not event.query()
    assert event.elapsed_seconds(event) is None


def test_a_graph_capture_is_left_alone(gpu: Any) -> None:
    event: Any = CudaAccelerator().new_event("cuda:0")
    assert event.record()
    gpu.capturing = True
    assert not event.query()
    assert not event.record()
    assert event._event.at_ms == 0.0


def test_facts_come_from_torch_and_the_driver(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    monkeypatch.setattr(cuda, "_NVIDIA_VERSION_FILE", version)
    facts = CudaAccelerator().facts("cuda:0")
    assert (facts.name, facts.total_bytes) == ("NVIDIA H200", 24_000 * MIB)
    assert (facts.compute_capability, facts.driver_version) == ("9.0", "550.54.15")
    assert facts.unavailable == {}


def test_the_open_kernel_module_names_its_version_too(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    monkeypatch.setattr(cuda, "_NVIDIA_VERSION_FILE", version)
    assert CudaAccelerator().facts("cuda:0").driver_version == "570.86.15"


def test_an_amd_device_is_described_by_its_architecture(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text("6.10.5\n")
    monkeypatch.setattr(cuda, "_AMD_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(torch.version, "hip", "6.2")
    facts = CudaAccelerator().facts("cuda:0")
    assert (facts.compute_capability, facts.driver_version) == ("gfx942", "6.10.5")


def test_facts_before_the_process_uses_cuda_are_nvmls(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.initialized = False
    nvml = NvmlFacts("cuda:0", name="NVIDIA L4", driver_version="550.54", total_bytes=24 * MIB)
    monkeypatch.setattr(cuda, "read_nvml", lambda _device: nvml)
    facts = CudaAccelerator().facts("cuda:0")
    assert (facts.name, facts.total_bytes, facts.driver_version) == ("NVIDIA L4", 24 * MIB, "550.54")
    assert "compute_capability" in facts.unavailable


def test_without_nvml_and_driver_file_the_version_has_a_reason(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda, "_NVIDIA_VERSION_FILE", tmp_path / "missing")
    assert "FileNotFoundError" in CudaAccelerator().facts("cuda:0").unavailable["driver_version"]


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_a_thread_with_its_hands_off_reads_what_pytorch_counts_and_calls_no_driver(
    gpu: Any, backend: str
) -> None:
    accelerator = CudaAccelerator()
    accelerator.devices(), accelerator.memory("cuda:0")  # as the host's thread does when a stage opens
    start: Any = accelerator.new_event("cuda:0")
    start.record()
    accelerator.current_device()
    gpu.driver_calls.clear()
    gpu.backend, gpu.done_ms = backend, 1.0
    with hands_off():
        figures = accelerator.allocated_and_peak("cuda:0")
        memory = accelerator.memory("cuda:0")
        assert (accelerator.devices(), accelerator.current_device()) == (["cuda:0", "cuda:1"], "cuda:0")
        assert (accelerator.new_event("cuda:0"), start.query()) == (None, False)
        assert accelerator.facts("cuda:0").unavailable["compute_capability"] == ELSEWHERE
        assert accelerator.allocated_and_peak("cuda:1") == (
            None,
            None,
            None,
            None,
        )  # perhaps it is in use by now
    assert gpu.driver_calls == []
    if backend == "native":
        assert figures == (100 * MIB, 200 * MIB, 150 * MIB, 300 * MIB)
        assert memory.allocated_bytes == 100 * MIB
    else:  # that allocator asks the driver for each figure
        assert figures == (None, None, None, None)
        assert memory.unavailable["allocated_bytes"] == ELSEWHERE
    assert ELSEWHERE in memory.unavailable["free_bytes"]
    assert start.query()


def test_while_a_graph_is_captured_the_driver_is_not_asked_for_memory(gpu: Any) -> None:
    gpu.capturing = True
    memory = CudaAccelerator().memory("cuda:0")
    assert memory.allocated_bytes == 100 * MIB
    assert "captured" in memory.unavailable["free_bytes"]
    assert "memory" not in gpu.driver_calls
