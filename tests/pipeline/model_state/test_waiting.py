import pytest
import torch

from sigmascope.pipeline.model_state import wait_for


def test_the_cpu_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: pytest.fail("waited"))
    wait_for(torch.device("cpu"))


def test_an_accelerator_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    wait_for(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]
