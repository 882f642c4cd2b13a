import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.fresh_memory import fresh_memory

from sigmascope.probes import (
    NullAccelerator,
    memory_snapshot,
    process_peak_rss_bytes,
    process_rss,
    process_rss_bytes,
    system_memory,
)
from sigmascope.probes import host as memory_module
from sigmascope.probes.accelerators.cuda import CudaAccelerator

MIB = 2**20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


def known_rss() -> int:
    rss = process_rss_bytes()
    assert rss is not None
    return rss


def test_it_is_what_psutil_says() -> None:
    assert known_rss() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


def test_it_grows_with_touched_memory() -> None:
    before = known_rss()
    held = fresh_memory(64 * MIB)
    assert known_rss() - before > 60 * MIB
    del held


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_its_own() -> None:
    parent_rss = known_rss()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = b"x" * (96 * MIB)
            os.write(writer, f"{process_rss_bytes()} {psutil.Process().memory_info().rss}".encode())
            del held
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        measured, expected = map(int, pipe.read().split())
    os.waitpid(child, 0)
    assert measured == pytest.approx(expected, rel=0.02)
    assert measured != parent_rss


@linux
def test_once_others_have_closed_the_file_psutil_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_statm", statm := memory_module.OpenFile("/proc/self/statm"))
    known_rss()
    assert statm.number is not None
    os.close(statm.number)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert all(known_rss() > MIB for _ in range(5))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@linux
def test_a_number_that_became_another_file_is_noticed_and_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "_statm", statm := memory_module.OpenFile("/proc/self/statm"))
    known_rss()
    number = statm.number
    assert number is not None
    (tmp_path / "other").write_text("not numbers")
    with (tmp_path / "other").open() as other:
        os.dup2(other.fileno(), number)
    assert known_rss() > MIB
    assert os.read(number, 3) == b"not"
    os.close(number)


def test_elsewhere_psutil_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_HAS_PROC", False)
    assert process_rss_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.02)


def test_a_failure_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(memory_module, "_HAS_PROC", False)
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


@pytest.mark.parametrize("has_proc", [True, False])
def test_system_memory_is_psutils(has_proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_HAS_PROC", has_proc and memory_module._HAS_PROC)
    memory, expected = system_memory(), psutil.virtual_memory()
    assert memory.ram_total_bytes == expected.total
    assert memory.ram_available_bytes == pytest.approx(expected.available, rel=0.2)
    assert memory.ram_used_bytes == pytest.approx(expected.used, rel=0.2)


@linux
@pytest.mark.parametrize(
    "meminfo",
    [
        pytest.param(b"MemTotal: 64 kB\nMemFree: 32 kB\n", id="a kernel that does not say what is available"),
        pytest.param(b"MemTotal: 64 kB\nMemAvailable: 0 kB\n", id="0 is a fault of the kernel"),
        pytest.param(b"MemTotal: 64 kB\nMemAvailable: 96 kB\n", id="the host's in a container"),
    ],
)
def test_where_the_systems_figures_make_no_sense_psutil_is_asked(
    meminfo: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_bytes(meminfo)
    monkeypatch.setattr(memory_module, "_meminfo", memory_module.OpenFile(str(tmp_path / "meminfo")))
    assert system_memory().ram_total_bytes == psutil.virtual_memory().total
    assert memory_module._meminfo.number == -1


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
    held = fresh_memory(largest - before + 64 * MIB)
    del held
    after = process_peak_rss_bytes()
    assert after is not None
    assert 60 * MIB < after - largest < 80 * MIB
    assert known_rss() < after - 60 * MIB
