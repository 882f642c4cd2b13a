"""What the processor gave and withheld, by Linux's own words: planted files, and a busy machine."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sigmascope.probes.processor import (
    ProcessorMoment,
    Standstill,
    processor_moment,
    processor_use,
    statistics_of_group,
    throttled_ns,
)
from sigmascope.probes.reading import Reading

V1 = "nr_periods 12\nnr_throttled 3\nthrottled_time 2500000000\n"
V2 = "usage_usec 10\nnr_periods 12\nnr_throttled 3\nthrottled_usec 2500000\n"


@pytest.mark.parametrize(
    ("membership", "place", "text"),
    [
        ("0::/user.slice/app\n", "user.slice/app", V2),
        ("0::/seen/from/outside\n", "", V2),  # in a container its own group is the root
        ("3:cpuset:/x\n2:cpu,cpuacct:/docker/9\n0::/\n", "cpu,cpuacct/docker/9", V1),
    ],
)
def test_the_time_that_a_quota_took_is_read(tmp_path: Path, membership: str, place: str, text: str) -> None:
    (tmp_path / "groups" / place).mkdir(parents=True)
    (tmp_path / "groups" / place / "cpu.stat").write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    file = statistics_of_group(tmp_path / "groups", tmp_path / "cgroup")
    assert throttled_ns(file) == 2_500_000_000


@pytest.mark.parametrize(
    ("name", "none", "some", "text"),
    [("cpu.max", "max 100000", "50000 100000", V2), ("cpu.cfs_quota_us", "-1", "50000", V1)],
)
@pytest.mark.parametrize("has_quota", ["pod", "pod/container"])
def test_the_quota_of_a_group_around_it_holds_too(
    tmp_path: Path, name: str, none: str, some: str, text: str, has_quota: str
) -> None:
    """A container without a limit of its own in a pod that has one, as Kubernetes makes them."""
    line, controller = ("0::", "") if name == "cpu.max" else ("2:cpu:", "cpu")
    for place in ("pod", "pod/container"):
        group = tmp_path / controller / place
        group.mkdir(parents=True)
        is_meant = place == has_quota
        (group / name).write_text(f"{some if is_meant else none}\n")
        (group / "cpu.stat").write_text(text if is_meant else text.replace("25", "0"))
    (tmp_path / "membership").write_text(f"{line}/pod/container\n")
    assert throttled_ns(statistics_of_group(tmp_path, tmp_path / "membership")) == 2_500_000_000


def test_a_group_without_a_quota_has_no_such_time(tmp_path: Path) -> None:
    file = tmp_path / "cpu.stat"
    file.write_text("usage_usec 10\nuser_usec 7\n")
    with pytest.raises(OSError, match="no quota is set"):
        throttled_ns(file)


def test_what_is_not_known_has_its_reason() -> None:
    nothing: Reading[int] = Reading(None, "no schedstat")
    before = ProcessorMoment(1_000_000_000, 7, nothing, Reading(2_000_000_000), Reading(5), Reading(0))
    after = ProcessorMoment(3_500_000_000, 7, nothing, Reading(2_250_000_000), Reading(9), Reading(1))
    use, unavailable = processor_use(before, after)
    assert (use.own_seconds, use.throttled_seconds, use.minor_faults, use.major_faults) == (2.5, 0.25, 4, 1)
    assert (use.waited_seconds, unavailable) == (None, {"waited_seconds": "no schedstat"})


def moment(
    at: float,
    *,
    own: float = 0.0,
    waited: float = 0.0,
    throttled: float = 0.0,
    read: int = 0,
    thread: int = 7,
) -> ProcessorMoment:
    """Counts up to a second."""
    nanoseconds = [round(1e9 * seconds) for seconds in (own, waited, throttled, at)]
    counts = (Reading(nanoseconds[1]), Reading(nanoseconds[2]), Reading(0), Reading(read))
    return ProcessorMoment(nanoseconds[0], thread, *counts, at_ns=nanoseconds[3])


@pytest.mark.parametrize(
    ("after", "stopped"),
    [
        pytest.param(moment(30.0, own=0.1), 29.7, id="nothing ran: it was stopped"),
        pytest.param(moment(30.0, own=20.0), 0.0, id="another thread kept the interpreter and worked"),
        pytest.param(moment(30.0, waited=29.0), 0.0, id="it had no processor"),
        pytest.param(moment(30.0, throttled=29.0), 0.0, id="its quota was used up"),
        pytest.param(moment(30.0, read=5000), 0.0, id="pages came from a disk"),
        pytest.param(moment(0.9), 0.0, id="a short while is nothing"),
    ],
)
def test_a_process_that_was_stopped_is_told_from_one_that_worked_or_waited(
    after: ProcessorMoment, stopped: float
) -> None:
    looks = [moment(0.1), moment(0.2), after]
    seen = Standstill(lambda: looks.pop(0))
    for _ in range(3):
        seen.look()
    assert seen.nanoseconds / 1e9 == pytest.approx(stopped)


def test_a_thread_that_looks_seldom_is_not_late() -> None:
    looks = [moment(0.0), moment(5.0), moment(10.0), moment(35.0)]
    seen = Standstill(lambda: looks.pop(0))
    for _ in range(3):
        seen.look(5.0)
    assert seen.nanoseconds == 0
    seen.look(5.0)
    assert seen.nanoseconds / 1e9 == pytest.approx(20.0)


def test_a_stop_is_counted_once_whichever_thread_is_woken_first() -> None:
    looks = [moment(0.1), moment(30.3)]
    seen = Standstill(lambda: looks.pop(0))
    seen.look()
    seen.is_there(moment(30.2, thread=8))
    seen.look()
    assert seen.nanoseconds / 1e9 == pytest.approx(30.1)
    seen.look_no_more()
    seen.is_there(moment(99.0, thread=8))  # nobody has looked meanwhile
    assert seen.nanoseconds / 1e9 == pytest.approx(30.1)


def test_whether_it_was_stopped_is_unknown_where_nobody_looked() -> None:
    before, after = moment(1.0), moment(9.0)
    use, why_not = processor_use(before, after)
    assert (use.stopped_seconds, list(why_not)) == (None, ["stopped_seconds"])
    seen = replace(after, looks=80, stopped_ns=5 * 10**9)
    assert processor_use(before, seen)[0].stopped_seconds == 5.0
    assert processor_use(before, moment(1.5))[0].stopped_seconds == 0.0


def _burn(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system has no schedstat")
def test_a_thread_that_shares_its_processor_waits_for_what_the_others_take() -> None:
    """Two other programs on the one processor that this one may use: it gets a third of it, and waits for the rest."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    others = [multiprocessing.get_context("fork").Process(target=_burn, args=(0.6,)) for _ in range(2)]
    try:
        for other in others:
            other.start()
        before, began = processor_moment(), time.monotonic()
        _burn(0.3)
        use, _ = processor_use(before, processor_moment())
        seconds = time.monotonic() - began
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.join()
    assert use.waited_seconds is not None
    assert use.waited_seconds > 0.25 * seconds
    assert use.own_seconds + use.waited_seconds == pytest.approx(seconds, abs=0.15)
