"""What cannot run here for want of a device: kernels and device memory, as torch's profiler gives them."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from sigmascope.monitor.profile import ProfileSums


class Event(SimpleNamespace):
    """A `FunctionEvent`, as far as the sums look at one."""


def event(name: str, cpu: float, self_cpu: float, kernels: dict[str, float], *children: Event) -> Event:
    return Event(
        name=name, device_type=DeviceType.CPU, cpu_time_total=cpu, self_cpu_time_total=self_cpu,
        kernels=[SimpleNamespace(name=kernel, device=1, duration=us) for kernel, us in kernels.items()],
        cpu_children=list(children),
    )  # fmt: skip


class Raw:
    """A raw event of Kineto."""

    def __init__(self, name: str, start: int, size: int = 0, device: DeviceType = DeviceType.CUDA) -> None:
        self._name, self._start, self._size, self._device = name, start, size, device

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return 100

    def nbytes(self) -> int:
        return self._size

    def device_type(self) -> DeviceType:
        return self._device


def mark(name: str, start: int) -> Raw:
    return Raw(f"sigmascope::{name}", start, device=DeviceType.CPU)


def profiler(events: list[Event], raw: list[Raw]) -> Any:
    results = SimpleNamespace(events=lambda: raw)
    return SimpleNamespace(events=lambda: events, profiler=SimpleNamespace(kineto_results=results))


def step() -> Any:
    """A denoiser of one block, in which a linear layer and a kernel of Triton's run."""
    addmm = event("aten::addmm", 30.0, 20.0, {"gemm": 400.0})
    linear = event("aten::linear", 40.0, 10.0, {}, addmm)
    block = event(
        "sigmascope::blocks.0", 100.0, 60.0, {"triton_fused": 50.0, "sigmascope::blocks.0": 450.0}, linear
    )
    whole = event("sigmascope::", 150.0, 50.0, {}, block)
    kernel = Event(name="gemm", device_type=DeviceType.CUDA)
    raw = [
        mark("", 0), mark("blocks.0", 0),
        Raw("[memory]", 10, 1000), Raw("[memory]", 20, 500), Raw("[memory]", 30, -1000),
        Raw("[memory]", 40, 700), Raw("[memory]", 50, 9999, DeviceType.CPU), Raw("[memory]", 500, 4444),
    ]  # fmt: skip
    return profiler([whole, block, linear, addmm, kernel], raw)


@pytest.fixture
def sums() -> ProfileSums:
    found = ProfileSums(has_device=True)
    found.add(step())
    found.add(step())
    return found


def test_a_block_has_the_kernels_of_all_that_it_called_and_not_its_own_shadow(sums: ProfileSums) -> None:
    (block,) = sums.all_blocks({"blocks.0": "Block"})
    assert block.device_seconds == pytest.approx(2 * 450e-6)
    assert block.calls == 2
    assert block.cpu_seconds == pytest.approx(200e-6)
    assert block.self_cpu_seconds == pytest.approx(120e-6)


def test_the_device_is_that_of_the_kernels(sums: ProfileSums) -> None:
    assert sums.device() == "cuda:1"
    assert ProfileSums(has_device=True).device() is None


def test_the_whole_has_the_kernels_of_its_blocks(sums: ProfileSums) -> None:
    whole = sums.whole("Flux")
    assert whole is not None
    assert whole.device_seconds == pytest.approx(2 * 450e-6)


def test_operators_have_their_own_kernels_and_the_dearest_is_first(sums: ProfileSums) -> None:
    first, second = sums.top_operators()
    assert (first.name, first.calls) == ("aten::addmm", 2)
    assert first.self_device_seconds == pytest.approx(800e-6)
    assert (second.name, second.self_device_seconds) == ("aten::linear", 0.0)


def test_memory_is_the_devices_and_of_the_time_of_the_block(sums: ProfileSums) -> None:
    (block,) = sums.all_blocks({"blocks.0": "Block"})
    assert block.allocated_bytes == 2 * (1000 + 500 + 700)
    assert block.peak_growth_bytes == 1500
