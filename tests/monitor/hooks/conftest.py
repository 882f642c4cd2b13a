"""What hears the calls of modules, and wrappers around them."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmascope.monitor.guard import Guard
from sigmascope.monitor.hooks import After, HookSet


class OnTwoThreads(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` with threads of the CPU for devices: what belongs to devices is replaced, and no more."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)  # which finds no device, and is told of two
        self.device_ids = [0, 1]
        self.src_device_obj = torch.device("cpu")
        self.output_device = 0

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        parts = [part.chunk(len(device_ids)) for part in inputs]
        return tuple(zip(*parts, strict=True)), tuple(kwargs for _ in device_ids)

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        return [replica_of(module) for _ in device_ids]

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return called_in_threads(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return torch.cat(outputs)


def replica_of(module: nn.Module) -> nn.Module:
    """As `torch.nn.parallel.replicate` makes one, without moving its weights."""
    replica: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter)
    for name, inner in module._modules.items():
        replica._modules[name] = None if inner is None else replica_of(inner)
    return replica


def called_in_threads(replicas: Any, inputs: Any, kwargs: Any) -> list[Tensor]:
    """As `torch.nn.parallel.parallel_apply`: a new thread for each."""
    outputs: dict[int, Tensor] = {}

    def call(number: int) -> None:
        outputs[number] = replicas[number](*inputs[number], **kwargs[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [outputs[number] for number in sorted(outputs)]


class Heard(list[object]):
    """Modules whose calls were heard, in their order, and what hears them."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()
        self.hooks = HookSet(self.guard, "test")

    def hear(self, *modules: nn.Module) -> None:
        for module in modules:
            self.hooks.hook_calls(module, self._before)

    def _before(self, module: object, *_: object) -> After:
        self.append(module)
        return lambda _result, _error: None


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Hears nothing yet; afterwards nothing is left."""
    heard = Heard()
    yield heard
    heard.hooks.detach()
    assert "__call__" not in vars(nn.DataParallel)
