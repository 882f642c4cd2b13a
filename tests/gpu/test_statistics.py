"""Statistics of a model on the GPU are those of the CPU, in both modes, and under the host's autocast."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from sigmascope.lora.statistics import ModelStatistics, Moments
from sigmascope.lora.statistics_collection import collect_statistics

pytestmark = pytest.mark.gpu

Autocast = Callable[[], AbstractContextManager[object]]


class Net(nn.Module):
    """Layers of each kind; what it is given may be cast, so that it runs in half precision under autocast alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)
        self.wide = nn.Linear(16, 300)
        self.out = nn.Linear(300, 4)
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.dtype is not None:
            x = x.to(self.dtype)
        x = torch.tanh(self.deep(torch.tanh(self.conv(x)))).movedim(1, -1)
        made: Tensor = self.out(torch.tanh(self.wide(x))).movedim(-1, 1)
        return made


def found(
    device: torch.device, mode: str, autocast: Autocast = nullcontext, dtype: torch.dtype | None = None
) -> ModelStatistics:
    """Statistics of two inputs: of each call alone, or through two steps."""
    model = Net().to(device)
    model.dtype = dtype
    given = [torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in (1, 2)]

    def calls() -> None:
        with torch.no_grad(), autocast():
            for x in given:
                model(x)

    def sampling() -> Iterator[Tensor]:
        for x in given:
            with autocast():
                for _ in range(2):
                    x = x - 0.5 * model(x).to(x.dtype)
            yield x

    return collect_statistics(model, calls if mode == "calls" else sampling, full_up_to=64, rank=8)


def as_matrix(moments: Moments) -> Tensor:
    if moments.full is not None:
        return moments.full.cpu().double()
    assert moments.low_rank is not None
    low_rank = moments.low_rank.cpu().double()
    return torch.diag(moments.diagonal.cpu().double()) + low_rank @ low_rank.mT


def far(one: ModelStatistics, other: ModelStatistics) -> dict[str, float]:
    """How far the moments of each layer lie apart, as a share of their norm; those that are kept whole, and traces."""
    assert set(one) == set(other) == {"conv", "deep", "wide", "out"}
    apart: dict[str, float] = {}
    for name in one:
        for side in ("inputs", "outputs"):
            ours, theirs = getattr(one[name], side), getattr(other[name], side)
            apart[f"{name}.{side}.trace"] = abs(ours.trace - theirs.trace) / theirs.trace
            if theirs.full is not None:
                expected = as_matrix(theirs)
                apart[f"{name}.{side}"] = float((as_matrix(ours) - expected).norm() / expected.norm())
    return apart


@pytest.mark.parametrize("mode", ["calls", "sampling"])
def test_statistics_on_the_gpu_are_those_of_the_cpu(mode: str, device: torch.device) -> None:
    apart = far(found(device, mode), found(torch.device("cpu"), mode))
    # cuDNN computes convolutions in TensorFloat-32 by default: ten bits of mantissa.
    assert max(apart.values()) < 2e-2, apart


@pytest.mark.parametrize("mode", ["calls", "sampling"])
def test_under_the_hosts_autocast_they_are_near_those_in_float32(mode: str, device: torch.device) -> None:
    """Gradients of the GPU pass through a thread of autograd's own, where the host's autocast does not hold."""

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    under = found(device, mode, autocast, dtype=torch.bfloat16)
    apart = far(under, found(torch.device("cpu"), mode))
    assert max(apart.values()) < 0.1, apart
    assert under["deep"].inputs.diagonal.dtype == torch.float32
