import os
import time
from types import SimpleNamespace

import psutil
import pytest

from sigmascope.probes.host import CpuMoment, DiskMoment, cpu_moment, disk_moment, others_share


def test_what_others_used_is_all_but_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    # 10 s on 4 threads: 40 s of room, 18 s used by all, 8 s of it by this process
    assert others_share(CpuMoment(0.0, 100.0, 5.0), CpuMoment(10.0, 118.0, 13.0)) == 0.25


@pytest.mark.parametrize(("machine", "share"), [(0.0, 0.0), (1e6, 1.0)])
def test_rounding_never_leaves_the_range(machine: float, share: float) -> None:
    assert others_share(CpuMoment(0.0, 0.0, 0.0), CpuMoment(1.0, machine, 0.5)) == share


def test_no_time_is_no_share() -> None:
    moment = CpuMoment(1.0, 2.0, 3.0)
    assert others_share(moment, moment) is None


def test_idle_and_doubly_counted_time_is_not_used_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"user": 5.0, "system": 2.0, "steal": 1.0, "idle": 100.0, "iowait": 9.0, "guest": 4.0}
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(_asdict=lambda: times))
    found = cpu_moment().value
    assert found is not None
    assert found.machine == 8.0


def test_own_time_is_the_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 42.0)
    found = cpu_moment().value
    assert found is not None
    assert found.own == 42.0


def test_a_system_that_does_not_tell_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError("/proc/stat")

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    reading = cpu_moment()
    assert reading.value is None
    assert "/proc/stat" in (reading.reason or "")


def test_what_is_read_from_a_disk_is_counted() -> None:
    before = disk_moment()
    if before.read_bytes is None or before.page_faults is None:
        pytest.skip("this system does not say what a process read from disks")
    assert before.read_bytes >= 0
    assert disk_moment().read_bytes >= before.read_bytes  # type: ignore[operator]
    assert disk_moment().page_faults >= before.page_faults  # type: ignore[operator]


def test_a_system_that_does_not_tell_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmascope.probes.host._HAS_RESOURCE", False)
    monkeypatch.setattr("psutil.Process.io_counters", lambda self: 1 / 0)
    assert disk_moment() == DiskMoment(None, None)
