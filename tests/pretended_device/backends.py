"""What PyTorch answers in Python about a device, faked."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from tests.pretended_device.tensors import (
    OWN_DATA,
    PretendedDevice,
    PretendedTensor,
    set_data,
    to_device_of_other,
)
from torch import Tensor

_MIB: Final = 1 << 20


class Fakes:
    """What PyTorch answers in Python about a device."""

    def __init__(self, device: PretendedDevice, patch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._patch = patch

    def put_on(self) -> None:
        device, run = self._device, threading.Thread.run

        def run_with_device(thread: threading.Thread) -> None:
            with device.here():
                run(thread)

        self._patch.setattr(threading.Thread, "run", run_with_device)
        data = property(OWN_DATA.__get__, set_data)
        self._patch.setattr(torch.nn.Parameter, "data", data, raising=False)
        accelerator = {
            "is_available": lambda: True,
            "current_accelerator": lambda *_args, **_kwargs: torch.device(device.kind),
            "device_count": lambda: 1,
            "current_device_index": lambda: 0,
            "current_stream": lambda *_args: _Stream(self._device.device),
            "synchronize": device.asked(_nothing, waits="synchronize"),
        }
        for name, fake in accelerator.items():
            self._patch.setattr(torch.accelerator, name, fake)
        if device.backward:
            self._patch.setattr(Tensor, "to", to_device_of_other)
        if device.kind == "cuda":
            self._cuda()
        else:
            self._mps()

    def _cuda(self) -> None:
        asked = self._device.asked
        event = type("Event", (_Event,), {"pretended": self._device})  # a class: annotations name it
        figures = {
            f"{name}_bytes": {"all": {"current": current, "peak": current}}
            for name, current in (("allocated", 64 * _MIB), ("reserved", 128 * _MIB))
        }
        properties = SimpleNamespace(name="pretended", total_memory=8192 * _MIB, major=9, minor=0, uuid="00")
        answers: dict[str, Callable[..., Any]] = {
            "_lazy_init": _nothing,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": _nothing,
            "_exchange_device": lambda _index: 0,
            "_maybe_exchange_device": lambda _index: 0,
            "is_bf16_supported": lambda *_args, **_kwargs: True,
            "get_device_name": lambda *_args: "pretended",
            "get_device_capability": lambda *_args: (9, 0),
            "get_device_properties": lambda *_args: properties,
            "get_allocator_backend": lambda: "native",
            "get_rng_state": lambda *_args: torch.get_rng_state(),
            "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
            "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
            "empty_cache": _nothing,
            "ipc_collect": _nothing,
            "memory_stats_as_nested_dict": asked(lambda *_args: figures),
            "memory_allocated": asked(lambda *_args: 64 * _MIB),
            "memory_reserved": asked(lambda *_args: 128 * _MIB),
            "max_memory_allocated": asked(lambda *_args: 64 * _MIB),
            "max_memory_reserved": asked(lambda *_args: 128 * _MIB),
            "reset_peak_memory_stats": asked(_nothing),
            "mem_get_info": asked(lambda *_args: (8000 * _MIB, 8192 * _MIB)),
            "is_current_stream_capturing": lambda: False,
            "current_stream": lambda *_args: _Stream(self._device.device),
            "Stream": _Stream,
            "stream": lambda _stream: nullcontext(),
            "default_stream": lambda *_args: _Stream(self._device.device),
            "synchronize": asked(_nothing, waits="synchronize"),
            "Event": event,
            "_device_count_nvml": lambda: 1,
        }
        for name, answer in answers.items():
            self._patch.setattr(torch.cuda, name, answer, raising=False)
        self._patch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda _index: True, raising=False)

    def _mps(self) -> None:
        asked = self._device.asked
        attention = torch.nn.functional.scaled_dot_product_attention

        def plain_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._device.backward or not isinstance(query, PretendedTensor):
                return attention(query, key, value, *args, **kwargs)
            made: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, *args, **kwargs
            )[0]
            return made

        self._patch.setattr(torch.nn.functional, "scaled_dot_product_attention", plain_attention)
        self._patch.setattr(torch.backends.mps, "is_available", lambda: True)
        self._patch.setattr(torch.backends.mps, "is_built", lambda: True)
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_allocated_memory": asked(lambda: 64 * _MIB),
            "driver_allocated_memory": asked(lambda: 128 * _MIB),
            "recommended_max_memory": asked(lambda: 8192 * _MIB),
            "get_rng_state": lambda *_args: torch.get_rng_state(),
            "set_rng_state": lambda state, *_args: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
            "empty_cache": _nothing,
            "synchronize": asked(_nothing, waits="synchronize"),
        }
        for name, answer in answers.items():
            self._patch.setattr(torch.mps, name, answer, raising=False)


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


class _Stream:
    """The only one."""

    stream_id = device_index = device_type = cuda_stream = 0

    def __init__(self, device: torch.device | None = None, **_other: object) -> None:
        self.device = device

    def wait_stream(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


class _Event:
    """A mark that the device, whose work is done at once, has always passed."""

    pretended: PretendedDevice

    def __init__(self, enable_timing: bool = False, **_other: object) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self.pretended.asked_by.add(threading.current_thread().name)
        self._at = time.perf_counter()

    def query(self) -> bool:
        self.pretended.asked_by.add(threading.current_thread().name)
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None:
        self.pretended.wait("Event.synchronize")
