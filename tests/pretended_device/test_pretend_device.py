"""The pretended device answers as a real one would, and leaves nothing behind."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import Pretend
from tests.pretend_device import Kind, PretendedDevice, same, why_none
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sigmascope.monitor.scope import accelerator_of_this_process


def test_a_module_moves_there_and_back(pretended_cuda: PretendedDevice) -> None:
    layer = nn.Linear(4, 3)
    weight, values = layer.weight, layer.weight.detach().clone()
    layer.to("cuda")
    assert layer.weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.device == torch.device("cuda:0")
    assert weight.requires_grad
    layer.half().to("cpu", torch.float32)
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, values.half().float())


def test_values_are_the_cpus(pretended_cuda: PretendedDevice) -> None:
    layer, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU()), torch.randn(1, 3, 8, 8)
    expected = layer(x)
    there = copy.deepcopy(layer).to("cuda")
    assert torch.equal(there(x.to("cuda")).cpu(), expected)
    assert torch.equal(layer.cuda()(x.cuda()).cpu(), expected)


def test_what_is_made_there_lies_there(pretended_cuda: PretendedDevice) -> None:
    made = [torch.zeros(2, device="cuda"), torch.arange(3, device="cuda:0"), torch.randn(2).to("cuda")]
    made += [made[0].new_ones(3), torch.empty_like(made[2]), made[2].view(1, 2)[0]]
    assert {str(tensor.device) for tensor in made} == {"cuda:0"}


def test_inference_mode_is_carried(pretended_cuda: PretendedDevice) -> None:
    """Operations arrive whole in it, such as `linear` and `to`."""
    layer, x = nn.Linear(3, 2).to("cuda"), torch.randn(2, 3)
    with torch.inference_mode():
        made = layer(x.to(device="cuda", dtype=torch.float32)) * torch.tensor([1.0, 2.0], device="cuda")
        assert made.device.type == "cuda"
        with pytest.raises(RuntimeError, match="same device"):
            layer(x)


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_training_gives_the_cpus_weights(pretend: Pretend, kind: Kind) -> None:
    def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [weight.detach().cpu() for weight in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 4))
    x = torch.randn(2, 3, 8, 8)
    expected = trained(copy.deepcopy(model), x)
    with pretend(kind, backward=True) as device:
        model.to(kind)
        # Rounding alone differs: PyTorch's optimizers take other paths for other kinds of tensors.
        assert same(trained(model, x.to(kind)), expected, within=1e-5)
        gradient = next(model.parameters()).grad
        assert gradient is not None
        assert gradient.device == device.device
        with pytest.raises(RuntimeError, match="same device"):
            model(x)


def test_a_view_writes_through(pretended_cuda: PretendedDevice) -> None:
    whole = torch.zeros(2, 3, device="cuda")
    whole[0].add_(1.0)
    whole[1, 1] = 5.0
    assert whole.tolist() == [[1, 1, 1], [0, 5, 0]]


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.where(here > 0, here, there),
        lambda here, there: nn.functional.linear(there, here),
        lambda here, there: here[there.long()],
        lambda here, there: there.add_(here),
        lambda here, there: torch.stack([here.sum(), there.sum()]),
    ],
)
def test_two_devices_are_refused(
    pretended_cuda: PretendedDevice, mix: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cpu and cuda:0"):
        mix(torch.zeros(2, 2), torch.zeros(2, 2, device="cuda"))


def test_what_cuda_takes_from_the_cpu_is_taken(pretended_cuda: PretendedDevice) -> None:
    there = torch.arange(4.0, device="cuda")
    assert (there * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert there[torch.tensor([1, 3])].tolist() == [1, 3]
    there.copy_(torch.ones(4))
    assert there.sum().item() == 4


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: float(x[0]), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: x.cpu(), "copy to the CPU"),
        (lambda x: x.tolist(), "copy to the CPU"),
        (lambda x: torch.empty(3).copy_(x), "copy to the CPU"),
        (lambda x: torch.empty(3).copy_(x, non_blocking=True), "copy to the CPU"),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x), "copy to the CPU"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: torch.accelerator.synchronize(x.device), "synchronize"),
    ],
)
def test_what_waits_is_noted_with_its_line(
    pretended_cuda: PretendedDevice, read: Callable[[torch.Tensor], object], operation: str
) -> None:
    x = torch.ones(3, device="cuda")
    pretended_cuda.waits.clear()
    read(x)
    assert [wait.operation for wait in pretended_cuda.waits] == [operation]
    assert "test_pretend_device.py" in pretended_cuda.waits[0].place
    assert pretended_cuda.our_waits == []


def test_what_does_not_wait_is_not(pretended_cuda: PretendedDevice) -> None:
    x = torch.ones(3, device="cuda")
    pinned = torch.empty(6, pin_memory=True)
    assert pinned.is_pinned()
    assert not torch.empty(3).is_pinned()
    pinned[3:].copy_(x, non_blocking=True)
    assert x.to("cpu", non_blocking=True).is_pinned()
    x.add_(1).mul_(torch.where(x > 0, x, 0.0)).sum()
    assert pretended_cuda.waits == []


def test_what_waits_on_our_behalf_is_ours(pretended_cuda: PretendedDevice) -> None:
    from sigmascope.lora.linalg import frobenius_norm

    assert frobenius_norm(torch.ones(4, device="cuda")) == 2.0
    (wait,) = pretended_cuda.our_waits
    assert wait.place.startswith("lora/linalg.py:")
    assert wait.place.endswith(" frobenius_norm")


@pytest.mark.parametrize(
    "widen",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.float64),
        lambda x: x.sum(dtype=torch.float64),
        lambda x: x.to("cpu", torch.float64),
        lambda x: torch.zeros(2, dtype=torch.float64).copy_(x),
        lambda _x: torch.zeros(2, dtype=torch.float64, device="mps"),
        lambda _x: torch.zeros(2, dtype=torch.float64).to("mps"),
    ],
)
def test_metal_has_no_float64(
    pretended_mps: PretendedDevice, widen: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
        widen(torch.ones(2, device="mps"))


def test_threads_take_part(pretended_cuda: PretendedDevice) -> None:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(2, device="cuda")), name="other")
    thread.start()
    thread.join()
    assert made[0].sum().item() == 0
    torch.cuda.mem_get_info()
    assert pretended_cuda.asked_by == {"MainThread"}


def test_attention_and_autocast_run(pretended_cuda: PretendedDevice) -> None:
    q = torch.randn(1, 2, 8, 4, device="cuda")
    assert scaled_dot_product_attention(q, q, q).device.type == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert nn.Linear(4, 4).to("cuda")(q).dtype == torch.bfloat16


def state_of_the_process() -> dict[str, object]:
    modules = (torch.cuda, torch.mps, torch.accelerator, torch.backends.mps)
    state = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}
    state |= {"run": threading.Thread.run, "data": vars(nn.Parameter).get("data")}
    return state


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_nothing_of_it_is_left(pretend: Pretend, kind: str) -> None:
    def refusals() -> list[str]:
        said = []
        makers: list[Callable[[], torch.Tensor]] = [
            lambda: torch.zeros(1, device=kind),
            lambda: torch.zeros(1).to(kind),
        ]
        for make in makers:
            with pytest.raises((RuntimeError, AssertionError)) as refused:
                make()
            said.append(f"{refused.type} {str(refused.value).splitlines()[0]}")
        return said

    before, said = state_of_the_process(), refusals()
    assert torch.accelerator.current_accelerator() is None
    with pretend(kind) as device:  # type: ignore[arg-type]
        assert torch.zeros(1, device=kind).device == device.device
        assert torch.accelerator.current_accelerator() == torch.device(kind)
        assert accelerator_of_this_process().kind == kind
    after = state_of_the_process()
    assert {name for name in before if before[name] is not after.get(name)} == set()
    assert torch.accelerator.current_accelerator() is None
    assert not torch.cuda.is_available()
    assert accelerator_of_this_process().kind == "cpu"
    assert refusals() == said
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()  # the engine knows of no device
    assert layer.weight.grad is not None


def test_a_failure_in_it_leaves_nothing_either(pretend: Pretend) -> None:
    before = state_of_the_process()
    with pytest.raises(ZeroDivisionError), pretend("cuda"):
        _ = 1 / 0
    assert state_of_the_process().keys() == before.keys()
    assert not torch.cuda.is_available()


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_none() == "no C++ compiler (g++, c++ or clang++), with which the pretended device is built"


def test_one_device_at_a_time(pretend: Pretend, pretended_cuda: PretendedDevice) -> None:
    with pytest.raises(RuntimeError, match="or one is pretended already"), pretend("cuda"):
        pass
