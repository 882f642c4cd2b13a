"""What is on its way from a device: it keeps nothing alive, breaks no capture, and is not waited for in vain."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.probes.conftest import FakeGpu
from torch import Tensor, nn

from sigmascope.probes import fingerprints as module
from sigmascope.probes.accelerators import CAPTURED
from sigmascope.probes.copies import HostCopy, Pending, copy_to_host
from sigmascope.probes.fingerprints import begin_fingerprints, begin_samples, fingerprints, samples
from sigmascope.probes.model_fingerprints import model_fingerprint

LOST = "CUDA error: device-side assert triggered"


def never() -> bool:
    return False


def lost() -> bool:
    raise RuntimeError(LOST)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Treat the CPU as a device whose copies arrive when the test says so."""

    def arrive(has_arrived: Callable[[], bool]) -> None:
        monkeypatch.setattr(module, "_on_cpu", lambda _tensor: False)
        monkeypatch.setattr(module, "copy_to_host", lambda tensor: HostCopy(tensor.clone(), has_arrived))

    return arrive


@pytest.mark.parametrize("begin", [begin_samples, begin_fingerprints])
def test_weights_are_freed_while_what_was_read_of_them_is_on_its_way(
    begin: Callable[[dict[str, Tensor]], Pending[object]], copies: Callable[[Callable[[], bool]], None]
) -> None:
    copies(never)
    weight = torch.randn(300, 300)
    is_there = weakref.ref(weight)
    pending = begin({"weight": weight})
    del weight
    gc.collect()
    assert is_there() is None
    assert not pending.has_arrived()


def never_sleeps(_seconds: float) -> None:
    raise RuntimeError("this would wait for ever")


def test_a_device_that_fails_meanwhile_is_not_waited_for(
    copies: Callable[[Callable[[], bool]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sigmascope.probes.copies.time.sleep", never_sleeps)
    copies(lost)
    weight = torch.randn(3, 3)
    reading = fingerprints({"weight": weight})["weight"]
    assert reading.value is None
    assert LOST in str(reading.reason)
    assert samples({"weight": weight}) == {}
    model = model_fingerprint(nn.Linear(2, 2))
    assert model.value is None
    assert LOST in str(model.reason)


def test_one_tensor_that_cannot_be_read_leaves_the_others_theirs(
    copies: Callable[[Callable[[], bool]], None],
) -> None:
    packed = (
        torch.zeros(90, 90, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).t()
    )  # PyTorch copies none so large
    weight = torch.randn(300, 300)
    expected = fingerprints({"weight": weight})["weight"]
    copies(lambda: True)
    read = fingerprints({"packed": packed, "weight": weight})
    assert read["weight"] == expected
    assert "NotImplementedError" in str(read["packed"].reason)
    assert "NotImplementedError" in str(fingerprints({"packed": packed})["packed"].reason)


class OnGpu(Tensor):
    """A tensor that says it lies on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    def record_stream(self, stream: object) -> None:
        pass


def test_no_copy_is_asked_for_while_a_graph_is_captured(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    event: Any = torch.cuda.Event
    monkeypatch.setattr(torch.cuda, "Event", lambda: event(enable_timing=True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: gpu.stream(0))
    copy = copy_to_host(torch.ones(3).as_subclass(OnGpu))
    gpu.capturing = True
    gpu.driver_calls.clear()
    assert not copy.has_arrived()
    with pytest.raises(LookupError, match=CAPTURED):
        Pending(lambda: 0, [copy]).result()
    assert gpu.driver_calls == []
    gpu.capturing = False
    assert copy.has_arrived()
