import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from sigmascope.probes import (
    NullAccelerator,
    memory_snapshot,
    process_peak_rss_bytes,
    process_rss,
    process_rss_bytes,
    system_memory,
)
from sigmascope.probes import host as memory_module
from sigmascope.probes.accelerators import CudaAccelerator

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


def kept_descriptor() -> int:
    process_rss_bytes()
    return memory_module._descriptor[0]


def known_rss() -> int:
    rss = process_rss_bytes()
    assert rss is not None
    return rss


def test_it_is_what_psutil_says() -> None:
    assert known_rss() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


def test_it_grows_with_touched_memory() -> None:
    before = known_rss()
    held = bytearray(os.urandom(1)) * (64 * MIB)
    assert known_rss() - before > 60 * MIB
    del held


@linux
def test_the_descriptor_is_kept() -> None:
    assert kept_descriptor() == kept_descriptor()


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_its_own() -> None:
    parent_rss = known_rss()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, grown_beyond(parent_rss + 64 * MIB).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        measured, expected = map(int, pipe.read().split())
    os.waitpid(child, 0)
    assert measured == pytest.approx(expected, rel=0.02)
    assert measured > parent_rss + 60 * MIB


def grown_beyond(nbytes: int) -> str:
    """Take memory until psutil sees more than `nbytes`; what ours and psutil say then."""
    held = []
    while psutil.Process().memory_info().rss < nbytes:
        held.append(b"x" * (16 * MIB))
    return f"{process_rss_bytes()} {psutil.Process().memory_info().rss}"


@linux
def test_a_descriptor_closed_by_others_is_opened_again() -> None:
    os.close(kept_descriptor())
    assert process_rss_bytes() == pytest.approx(known_rss(), rel=0.02)


@linux
def test_threads_that_open_it_at_once_keep_one() -> None:
    os.close(kept_descriptor())
    memory_module._descriptor.clear()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: (process_rss_bytes() or 0) > MIB, range(800)))
    assert len(memory_module._descriptor) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1


@linux
@linux
@pytest.mark.parametrize("content", [b"", b"no figures here"])
def test_readings_that_fail_leave_no_descriptor_open(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_descriptor()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda *_: content)
        for _ in range(5):
            assert process_rss_bytes()  # psutil's
    assert process_rss_bytes()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_descriptor_number_that_became_another_file_is_noticed_and_not_closed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("not numbers")
    number = kept_descriptor()
    with (tmp_path / "other").open() as other:
        os.dup2(other.fileno(), number)
    assert known_rss() > MIB
    assert os.read(number, 3) == b"not"
    os.close(number)


def test_elsewhere_psutil_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_HAS_STATM", False)
    assert process_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


def test_a_failure_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(memory_module, "_HAS_STATM", False)
    monkeypatch.setattr(psutil, "Process", fail)
    monkeypatch.setattr(psutil, "virtual_memory", fail)
    assert process_rss_bytes() is None
    assert "AccessDenied" in (process_rss().reason or "")
    snapshot = memory_snapshot(NullAccelerator())
    assert snapshot.ram_total_bytes is None
    assert set(snapshot.unavailable) == {
        "ram_total_bytes",
        "ram_used_bytes",
        "ram_available_bytes",
        "process_rss_bytes",
        "accelerators",
    }


def test_system_memory_is_psutils() -> None:
    memory = system_memory()
    assert memory.ram_total_bytes == psutil.virtual_memory().total
    assert memory.ram_available_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_snapshot_without_accelerator_says_why() -> None:
    snapshot = memory_snapshot(NullAccelerator("no accelerator: none here"))
    assert snapshot.accelerators == ()
    assert snapshot.unavailable == {"accelerators": "no accelerator: none here"}
    assert snapshot.process_rss_bytes
    assert snapshot.ram_used_bytes


def test_a_snapshot_holds_every_device_and_the_current_one(gpu: Any) -> None:
    snapshot = memory_snapshot(CudaAccelerator())
    assert [memory.device for memory in snapshot.accelerators] == ["cuda:0", "cuda:1"]
    assert snapshot.accelerator("cuda:0").allocated_bytes == 100 * MIB
    assert snapshot.current_device == "cuda:0"


def test_devices_that_cannot_be_counted_yet_are_explained(gpu: Any) -> None:
    gpu.initialized, gpu.nvml_count = False, -1
    reason = memory_snapshot(CudaAccelerator()).unavailable["accelerators"]
    assert "cannot be counted before this process uses one" in reason


def test_the_largest_so_far_is_never_below_what_is_resident_and_keeps_what_was_freed() -> None:
    before, largest = known_rss(), process_peak_rss_bytes()
    assert largest is not None
    assert largest >= before - MIB
    held = b"\1" * (largest - before + 64 * MIB)
    del held
    after = process_peak_rss_bytes()
    assert after is not None
    assert 60 * MIB < after - largest < 80 * MIB
    assert known_rss() < after - 60 * MIB
