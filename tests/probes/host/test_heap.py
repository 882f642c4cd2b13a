"""What malloc has given out, against tensors of known size."""

import ctypes
import sys

import pytest
import torch

from sigmascope.probes import heap_in_use
from sigmascope.probes import host as memory
from sigmascope.probes.host import process_rss, trim_heap

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


def test_what_malloc_holds_free_goes_back_to_the_system() -> None:
    def free() -> int:
        return int(memory._mallinfo2()().fordblks)

    trim_heap(0)
    before = process_rss().value
    assert before is not None
    blocks = [torch.ones(64 * 1024 // 4) for _ in range(4000)]  # too small for mappings of their own
    last = torch.ones(64 * 1024 // 4)  # keeps the heap from shrinking by itself
    del blocks
    held = process_rss().value
    assert held is not None
    assert held - before > 100 * MIB
    trim_heap(free() + 2**30)
    assert free() > 100 * MIB
    trim_heap(64 * MIB)
    after = process_rss().value
    assert after is not None
    assert after - before < 20 * MIB
    assert float(last.sum()) == 64 * 1024 / 4


def test_trimming_does_nothing_where_malloc_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing() -> None:
        asked.append("mallinfo2")
        raise AttributeError("undefined symbol: mallinfo2")

    monkeypatch.setattr(memory, "_mallinfo2", missing)
    monkeypatch.setattr(ctypes, "CDLL", asked.append)
    trim_heap(0)
    assert asked == ["mallinfo2"]
