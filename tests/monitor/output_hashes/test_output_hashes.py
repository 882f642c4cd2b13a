"""Outputs are told apart by their bytes, held no longer than the call lasts, and nothing waits for an accelerator."""

import weakref

import numpy as np
import pytest
import torch
import xxhash
from tests.gpu.waits import sync_debug_mode
from torch import Tensor

from sigmascope.monitor import output_hashes
from sigmascope.monitor.output_hashes import Arrivals, HeldOutputs, output_hash
from sigmascope.monitor.recorder import LiveStage, Recorder
from sigmascope.probes.accelerators import CAPTURED
from sigmascope.probes.copies import HostCopy
from sigmascope.records.run import OUTPUT_HASHES


class OnDevice(Tensor):
    """A tensor that says it is on a device that is not here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override] # it is a read-only property of torch's too
        return torch.device("cuda:0")


def on_device(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnDevice)


class Courier:
    """Copies to the host, which are there when the test says so."""

    def __init__(self) -> None:
        self.there = False
        self.sent = 0

    def __call__(self, tensor: Tensor) -> HostCopy:
        self.sent += 1
        return HostCopy(tensor.as_subclass(Tensor).clone(), lambda: self.there)


@pytest.fixture
def stage() -> LiveStage:
    recorder = Recorder(sample_hz=None)
    with recorder.stage("denoising") as stage:
        pass
    return stage


def hashes(stage: LiveStage) -> object:
    return stage.record().facts.get(OUTPUT_HASHES)


def reason(stage: LiveStage, name: str = "latent") -> str:
    return stage.record().unavailable[f"{OUTPUT_HASHES}.{name}"]


def test_a_hash_is_xxh3_of_the_bytes_however_they_lie() -> None:
    values = torch.arange(24.0).reshape(2, 3, 4)
    piece = xxhash.xxh3_64_intdigest(values.numpy().tobytes())
    expected = xxhash.xxh3_64_hexdigest(piece.to_bytes(8, "little"))
    assert output_hash(values).value == expected
    assert output_hash(values.transpose(0, 2).contiguous().transpose(0, 2)).value == expected
    assert output_hash(values + 1).value != expected


def test_a_small_output_is_hashed_at_once_as_it_is_then(stage: LiveStage) -> None:
    held, values = HeldOutputs(in_call=True), torch.ones(4)
    expected = output_hash(values).value
    held.take(stage, "latent", values)
    values.add_(1)
    held.settle(Arrivals())
    assert hashes(stage) == {"latent": expected}


def test_a_larger_one_is_held_until_the_call_is_over_and_no_longer(
    stage: LiveStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_hashes, "AT_ONCE_BYTES", 0)
    array = np.ones(4)
    memory = weakref.ref(array)
    values = torch.from_numpy(array)
    expected = output_hash(values).value
    held = HeldOutputs(in_call=True)
    held.take(stage, "latent", values)
    del array, values
    assert memory() is not None
    assert hashes(stage) is None
    held.settle(Arrivals())
    assert hashes(stage) == {"latent": expected}
    assert memory() is None


def test_what_the_host_wrote_to_meanwhile_has_no_hash(
    stage: LiveStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_hashes, "AT_ONCE_BYTES", 0)
    held, values = HeldOutputs(in_call=True), torch.ones(4)
    held.take(stage, "latent", values)
    values[0] = 2
    held.settle(Arrivals())
    assert hashes(stage) == {"latent": None}
    assert reason(stage) == output_hashes.CHANGED


def test_what_is_too_large_is_not_held(stage: LiveStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_hashes, "HELD_BYTES_ON_DEVICE", 8)
    array = np.ones(4)
    memory = weakref.ref(array)
    HeldOutputs(in_call=True).take(stage, "latent", torch.from_numpy(array).as_subclass(OnDevice))
    del array
    assert memory() is None
    assert "too much to hold" in reason(stage)


def test_all_outputs_of_a_call_share_one_allowance(stage: LiveStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_hashes, "HELD_BYTES", 24)
    held = HeldOutputs(in_call=True)
    for name in ("first", "second"):
        held.take(stage, name, on_device(1.0, 2.0, 3.0, 4.0))
    courier = Courier()
    courier.there = True
    held.settle(Arrivals(courier))
    assert hashes(stage) == {"first": output_hash(torch.tensor([1.0, 2.0, 3.0, 4.0])).value, "second": None}


def test_an_accelerators_output_is_copied_after_the_call_and_hashed_when_it_is_there(
    stage: LiveStage,
) -> None:
    courier, held = Courier(), HeldOutputs(in_call=True)
    arrivals = Arrivals(courier)
    held.take(stage, "latent", on_device(1.0, 2.0))
    assert courier.sent == 0
    held.settle(arrivals)
    assert courier.sent == 1
    assert reason(stage) == output_hashes.ON_ITS_WAY
    courier.there = True
    arrivals.look()
    assert hashes(stage) == {"latent": output_hash(torch.tensor([1.0, 2.0])).value}
    assert stage.record().unavailable.get(f"{OUTPUT_HASHES}.latent") is None


def test_nobody_waits_long_for_a_copy_that_does_not_come(stage: LiveStage) -> None:
    held, arrivals = HeldOutputs(in_call=True), Arrivals(Courier())
    held.take(stage, "latent", on_device(1.0))
    held.settle(arrivals)
    arrivals.wait(seconds=0.0)
    assert reason(stage) == output_hashes.ON_ITS_WAY


def test_a_device_that_fails_leaves_a_reason(stage: LiveStage) -> None:
    def broken(_: Tensor) -> HostCopy:
        raise RuntimeError("device lost")

    held = HeldOutputs(in_call=True)
    held.take(stage, "latent", on_device(1.0))
    held.settle(Arrivals(broken))
    assert "device lost" in reason(stage)


def test_a_copy_that_fails_on_its_way_is_never_there(stage: LiveStage) -> None:
    def failing() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    held, arrivals = HeldOutputs(in_call=True), Arrivals(lambda tensor: HostCopy(tensor, failing))
    held.take(stage, "latent", on_device(1.0))
    held.settle(arrivals)
    arrivals.wait(seconds=0.0)
    assert hashes(stage) == {"latent": None}


def test_nothing_is_copied_while_a_graph_is_captured(
    stage: LiveStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    courier, held = Courier(), HeldOutputs(in_call=True)
    held.take(stage, "latent", on_device(1.0))
    held.settle(Arrivals(courier))
    assert (courier.sent, reason(stage)) == (0, CAPTURED)


def test_outside_of_a_call_an_accelerator_is_left_alone(stage: LiveStage) -> None:
    HeldOutputs(in_call=False).take(stage, "latent", on_device(1.0))
    assert reason(stage) == output_hashes.OUTSIDE


def test_a_failed_call_lets_go_without_a_look(stage: LiveStage) -> None:
    array = np.ones(4)
    memory = weakref.ref(array)
    held = HeldOutputs(in_call=True)
    held.take(stage, "latent", torch.from_numpy(array).as_subclass(OnDevice))
    del array
    held.drop()
    assert memory() is None
    assert reason(stage) == output_hashes.FAILED


def test_a_call_inside_another_hands_on_what_it_held(stage: LiveStage) -> None:
    inner, outer, courier = HeldOutputs(in_call=True), HeldOutputs(in_call=True), Courier()
    courier.there = True
    inner.take(stage, "latent", on_device(1.0))
    inner.hand_on(outer)
    inner.settle(Arrivals(courier))
    assert courier.sent == 0
    outer.settle(Arrivals(courier))
    assert hashes(stage) == {"latent": output_hash(torch.tensor([1.0])).value}


def test_an_inference_tensor_on_an_accelerator_has_a_reason(stage: LiveStage) -> None:
    with torch.inference_mode():
        values = on_device(1.0) + 1
    HeldOutputs(in_call=True).take(stage, "latent", values)
    assert reason(stage) == output_hashes.COUNTS_NOTHING


def test_a_meta_tensor_has_a_reason(stage: LiveStage) -> None:
    HeldOutputs(in_call=True).take(stage, "latent", torch.empty(2, device="meta"))
    assert reason(stage) == "a meta tensor has no values"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_cuda_tensors_hash_is_that_of_the_same_values_on_the_cpu(stage: LiveStage) -> None:
    values = torch.randn(3, 512, 512)
    held, arrivals = HeldOutputs(in_call=True), Arrivals()
    held.take(stage, "latent", values.cuda())
    with sync_debug_mode("error"):
        held.settle(arrivals)
    arrivals.wait()
    assert hashes(stage) == {"latent": output_hash(values).value}
