"""What malloc has given out, against tensors of known size."""

import ctypes
import sys

import pytest
import torch

from sigmascope.probes import heap_in_use
from sigmascope.probes import host as memory

MIB = 2**20
pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")), reason="glibc alone tells"
)


def in_use() -> int:
    found = heap_in_use().value
    assert found is not None
    return found


@pytest.mark.parametrize("size_mb", [1, 64])
def test_a_tensor_is_in_it_until_it_is_freed(size_mb: int) -> None:
    before = in_use()
    tensor = torch.ones(size_mb * MIB // 4)
    held = in_use()
    del tensor
    assert held - before == pytest.approx(size_mb * MIB, abs=MIB / 4)
    assert in_use() - before == pytest.approx(0, abs=MIB / 4)


def test_a_c_library_without_it_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AttributeError("undefined symbol: mallinfo2")

    monkeypatch.setattr(memory, "_mallinfo2", missing)
    assert heap_in_use().reason == "AttributeError: undefined symbol: mallinfo2"
