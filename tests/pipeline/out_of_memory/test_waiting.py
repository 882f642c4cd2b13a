import pytest
import torch

from sigmascope.pipeline.bench_diffusers import waiter


def test_the_cpu_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("waited"))
    waiter(torch.device("cpu"))()


def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    waiter(torch.device("cuda:1"))()
    assert waited == [torch.device("cuda:1")]
