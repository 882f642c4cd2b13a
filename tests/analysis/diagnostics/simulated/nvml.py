"""The driver's library, with a simulated GPU behind it: how busy, how warm, and whether its clocks are lowered."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sigmascope.monitor import scope
from sigmascope.monitor.utilization import SamplerClient
from sigmascope.probes import nvml
from sigmascope.probes.nvml import GPU_ACTIVITY

from .gpu import SimulatedGpu

SAMPLE_NS = 200_000_000
HEAT, POWER_CAP = 0x20, 0x04


class Nvml(ModuleType):
    """`pynvml`, of one device.

    Args:
        gpu: What it tells of.
        celsius: How warm it is after so many nanoseconds.
        watts: What it draws.
        limit_watts: What it may draw.
    """

    NVMLError = OSError
    NVML_TEMPERATURE_GPU = 0

    def __init__(
        self,
        gpu: SimulatedGpu,
        celsius: Callable[[int], float] = lambda _: 60.0,
        watts: float = 300.0,
        limit_watts: float = 700.0,
    ) -> None:
        super().__init__("pynvml")
        self._gpu, self._celsius, self._watts, self._limit = gpu, celsius, watts, limit_watts
        self._asked_ns = 0

    def nvmlInit(self) -> None:
        """Nothing to do."""

    def nvmlDeviceGetCount(self) -> int:
        """One."""
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        """The number itself."""
        return number

    def nvmlDeviceGetName(self, handle: int) -> str:
        """Any name."""
        return "Simulated"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        """The share of the time since it was asked last in which a kernel ran."""
        since, now = self._asked_ns, self._gpu.now_ns
        self._asked_ns = now
        ran = sum(max(0, min(end, now) - max(start, since)) for start, end in self._gpu.kernels)
        return SimpleNamespace(gpu=round(100 * ran / max(1, now - since)), memory=0)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> float:
        """As it was said."""
        return self._celsius(self._gpu.now_ns)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> float:
        """In milliwatts, never above the limit."""
        return 1e3 * min(self._watts, self._limit)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        """Heat from 87 °C; the limit on power where more would be drawn."""
        hot, capped = self._celsius(self._gpu.now_ns) >= 87, self._watts > self._limit
        return HEAT * hot | POWER_CAP * capped


class Sampler:
    """Samples by the simulated clock, where the real one has a thread."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._clients: list[SamplerClient] = []
        self._next_ns = SAMPLE_NS
        gpu.ticks.append(self._tick)

    def open(self, client: SamplerClient, _scope: object) -> None:
        """Count one more."""
        self._clients.append(client)

    def close(self, client: SamplerClient, _scope: object) -> None:
        """Count one less."""
        self._clients.remove(client)

    def _tick(self, now_ns: int) -> None:
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + SAMPLE_NS
            for client in set(self._clients):
                client.sample()


@contextmanager
def asked_through(library: Nvml, gpu: SimulatedGpu) -> Iterator[None]:
    """Let the device be asked through this library, five times a second of its own clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", library)
        patch.setattr(nvml, "_sessions", {})
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(GPU_ACTIVITY, "_clock", lambda: gpu.now_ns / 1e9)
        patch.setattr(scope, "SAMPLER", Sampler(gpu))
        GPU_ACTIVITY.forget()
        yield
    GPU_ACTIVITY.forget()
