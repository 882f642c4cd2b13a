import random
from typing import TYPE_CHECKING

import pytest
from tests.fresh_memory import fresh_memory

from sigmascope.monitor import Recorder
from sigmascope.monitor.guard import Guard
from sigmascope.monitor.peaks import HostMemory, Peaks, PeakTracker, reader_for
from sigmascope.probes import AllocatorBytes, process_peak_rss_bytes, process_rss_bytes
from sigmascope.records.memory import AcceleratorPeak
from sigmascope.records.run import Stage

if TYPE_CHECKING:
    from tests.monitor.conftest import FakeAccelerator, FakeClock, FakeHost

MIB = 2**20


def allocated_peak(peaks: Peaks, device: str = "cuda:0") -> int:
    return peaks.devices[device].allocated.value


class Simulation:
    """Scopes over a fake allocator. The true peak of each is kept by looking at every single change."""

    def __init__(self, accelerator: "FakeAccelerator", seed: int, *, trackers: int, nested: bool) -> None:
        reader = reader_for(accelerator)
        self.trackers = [PeakTracker(reader, Guard()) for _ in range(trackers)]
        self.accelerator = accelerator
        self.random = random.Random(seed)
        self.nested = nested
        self.open: list[tuple[PeakTracker, Peaks, dict[str, int]]] = []
        self.closed: list[tuple[Peaks, dict[str, int]]] = []

    def change(self) -> None:
        device = self.random.choice(self.accelerator.devices())
        self.accelerator.allocate(self.random.randrange(1, 100), device)
        for _, _, truth in self.open:
            truth[device] = max(truth[device], self.accelerator.allocated[device])
        self.accelerator.free(self.random.randrange(0, self.accelerator.allocated[device] + 1), device)

    def act(self) -> None:
        action = self.random.choice(("open", "close", "step", "look", "change", "change", "change"))
        if action == "open" and len(self.open) < 6:
            tracker = self.random.choice(self.trackers)
            self.open.append((tracker, tracker.open(HostMemory(), 0), dict(self.accelerator.allocated)))
        elif action == "close" and self.open:
            which = -1 if self.nested else self.random.randrange(len(self.open))
            tracker, peaks, truth = self.open.pop(which)
            tracker.close(peaks, HostMemory(), 0)
            self.closed.append((peaks, truth))
        elif action == "step":
            self.random.choice(self.trackers).step(0, 0, self.random.choice(self.accelerator.devices()))
        elif action == "look":
            self.random.choice(self.trackers).look(HostMemory(), 0)
        else:
            self.change()


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "overlapping"])
@pytest.mark.parametrize("trackers", [1, 2])
def test_every_simulated_scope_reports_its_true_peak_on_every_device(
    make_accelerator: "type[FakeAccelerator]", trackers: int, nested: bool
) -> None:
    checked = 0
    for seed in range(30):
        simulation = Simulation(make_accelerator(devices=2), seed, trackers=trackers, nested=nested)
        for _ in range(120):
            simulation.act()
        for peaks, truth in simulation.closed:
            assert {device: allocated_peak(peaks, device) for device in truth} == truth
            checked += 1
    assert checked > 200


def test_the_simulation_notices_a_reset_that_was_not_folded(
    make_accelerator: "type[FakeAccelerator]", monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = make_accelerator(devices=2)
    open_scope = PeakTracker.open

    def reset_on_entering(tracker: PeakTracker, memory: HostMemory, at_ns: int) -> Peaks:
        for device in accelerator.devices():
            accelerator.reset_peak(device)
        return open_scope(tracker, memory, at_ns)

    monkeypatch.setattr(PeakTracker, "open", reset_on_entering)
    simulation = Simulation(accelerator, seed=1, trackers=1, nested=True)
    for _ in range(2000):
        simulation.act()
    wrong = [
        truth
        for peaks, truth in simulation.closed
        if {device: allocated_peak(peaks, device) for device in truth} != truth
    ]
    assert 0.05 < len(wrong) / len(simulation.closed) < 0.5


def test_an_outer_stage_keeps_a_peak_from_before_inside_and_after_its_inner_stage(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    for before, inside, after in [(9, 5, 3), (3, 9, 5), (3, 5, 9)]:
        recorder = Recorder(sample_hz=None, accelerator=accelerator)
        with recorder.stage("outer"):
            pulse(accelerator, before)
            with recorder.stage("inner"):
                pulse(accelerator, inside)
            pulse(accelerator, after)
        outer = recorder.run().stages[0]
        assert outer.peak is not None
        assert outer.peak.accelerators[0].allocated_bytes == 9
        assert outer.children[0].peak is not None
        assert outer.children[0].peak.accelerators[0].allocated_bytes == inside


def pulse(accelerator: "FakeAccelerator", nbytes: int) -> None:
    accelerator.allocate(nbytes)
    accelerator.free(nbytes)


def test_a_peak_is_dated_by_the_boundary_that_saw_it_in_seconds_since_the_stage_began(
    accelerator: "FakeAccelerator", clock: "FakeClock", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator, clock=clock)
    clock.pass_seconds(10)
    with recorder.stage("denoising"):
        for nbytes in (4, 9, 6):
            with recorder.step():
                pulse(accelerator, nbytes)
                clock.pass_seconds(2)
    peak = recorder.run().stages[0].peak
    assert peak is not None
    assert (peak.accelerators[0].allocated_bytes, peak.accelerators[0].allocated_at_seconds) == (9, 4.0)
    assert (peak.accelerators[0].reserved_bytes, peak.accelerators[0].reserved_at_seconds) == (18, 4.0)


def test_a_scope_does_not_report_what_was_in_use_only_before_it(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    pulse(accelerator, 50)
    accelerator.allocate(7)
    with recorder.stage("later"):
        pass
    peak = recorder.run().stages[0].peak
    assert peak is not None
    assert (peak.accelerators[0].allocated_bytes, peak.accelerators[0].allocated_at_seconds) == (7, 0.0)


def test_two_recorders_on_one_accelerator_do_not_erase_each_other(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    first, second = (Recorder(sample_hz=None, accelerator=accelerator) for _ in range(2))
    with first.stage("long"):
        with second.stage("short"):
            pulse(accelerator, 5)
        pulse(accelerator, 3)
    for recorder in (first, second):
        peak = recorder.run().stages[0].peak
        assert peak is not None
        assert peak.accelerators[0].allocated_bytes == 5


def test_resident_and_system_memory_peaks_are_the_highest_of_boundaries_and_steps(
    clock: "FakeClock", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, clock=clock)
    with recorder.stage("outer"):
        with recorder.step():
            clock.pass_seconds(1)
            host.rss = 700 * MIB
        host.rss = 300 * MIB
        with recorder.stage("inner"):
            clock.pass_seconds(1)
            host.ram_used = 2000 * MIB
        host.ram_used = 1500 * MIB
    outer = recorder.run().stages[0]
    peak, inner = outer.peak, outer.children[0].peak
    assert peak is not None
    assert inner is not None
    assert (peak.rss_bytes, peak.rss_at_seconds) == (700 * MIB, 1.0)
    assert (peak.ram_used_bytes, peak.ram_used_at_seconds) == (2000 * MIB, 2.0)
    assert (inner.rss_bytes, inner.rss_at_seconds) == (300 * MIB, 0.0)
    assert (inner.ram_used_bytes, inner.ram_used_at_seconds) == (2000 * MIB, 1.0)


def test_the_peaks_of_an_open_stage_are_up_to_date_when_the_run_is_read(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("open"):
        pulse(accelerator, 11)
        peak = recorder.run().stages[0].peak
    assert peak is not None
    assert peak.accelerators[0].allocated_bytes == 11


def test_without_an_accelerator_the_peak_says_why(host: "FakeHost") -> None:
    recorder = Recorder(sample_hz=None)
    with recorder.stage("cpu"):
        pass
    peak = recorder.run().stages[0].peak
    assert peak is not None
    assert peak.accelerators == ()
    assert "no accelerator" in peak.unavailable["accelerators"]


def test_a_running_peak_that_cannot_be_reset_is_not_given_to_later_stages(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("outer"):
        pulse(accelerator, 90)
        accelerator.no_reset = "RuntimeError: no statistics"
        with recorder.stage("inner"):
            accelerator.allocate(7)
        accelerator.no_reset = None  # a later success does not tell since when the peak has counted
        with recorder.stage("next"), recorder.step():
            pulse(accelerator, 40)
    outer = device_peak(recorder.run().stages[0])
    inner, after = (device_peak(stage) for stage in recorder.run().stages[0].children)
    assert (outer.allocated_bytes, inner.allocated_bytes, after.allocated_bytes) == (90, 7, 7)
    assert (outer.reserved_bytes, inner.reserved_bytes, after.reserved_bytes) == (180, 14, 14)
    why = "seen at boundaries only: the running peak could not be reset: RuntimeError: no statistics"
    for peak in (outer, inner, after):
        assert peak.unavailable == {"allocated_running_peak": why, "reserved_running_peak": why}


def test_a_peak_that_cannot_be_reset_any_more_leaves_closed_stages_as_they_are(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("before"):
        pulse(accelerator, 5)
    accelerator.no_reset = "it is broken"
    with recorder.stage("after"):
        pass
    before, after = (device_peak(stage) for stage in recorder.run().stages)
    assert (before.allocated_bytes, before.unavailable) == (5, {})
    assert "it is broken" in after.unavailable["allocated_running_peak"]


def test_an_accelerator_without_running_peaks_gives_its_own_reason(
    accelerator: "FakeAccelerator", host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(device: str) -> AllocatorBytes:
        return AllocatorBytes(accelerator.allocated[device], None, None, None)

    monkeypatch.setattr(accelerator, "allocated_and_peak", in_use)
    monkeypatch.setattr(accelerator, "unavailable", lambda _: {"peak_allocated": "no peak is kept"})
    accelerator.no_reset = "no peak is kept"
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        accelerator.allocate(3)
    peak = device_peak(recorder.run().stages[0])
    assert peak.allocated_bytes == 3
    assert peak.unavailable["allocated_running_peak"] == "seen at boundaries only: no peak is kept"


def device_peak(stage: Stage) -> AcceleratorPeak:
    assert stage.peak is not None
    return stage.peak.accelerators[0]


def test_a_running_peak_of_the_system_that_rose_was_reached_since_the_last_boundary(
    clock: "FakeClock", host: "FakeHost"
) -> None:
    host.largest_rss = 400 * MIB  # long before
    recorder = Recorder(sample_hz=None, clock=clock)
    with recorder.stage("before"):
        clock.pass_seconds(1)
    with recorder.stage("outer"):
        clock.pass_seconds(1)
        with recorder.stage("inner"):
            clock.pass_seconds(1)
            host.largest_rss = 900 * MIB
        with recorder.stage("later"):
            clock.pass_seconds(1)
    before, outer = recorder.run().stages
    inner, later = outer.children
    seen = [
        (stage.peak.rss_bytes, stage.peak.rss_at_seconds)
        for stage in (before, outer, inner, later)
        if stage.peak
    ]
    assert seen == [(100 * MIB, 0.0), (900 * MIB, 2.0), (900 * MIB, 1.0), (100 * MIB, 0.0)]


def test_what_the_process_reached_between_two_stages_belongs_to_neither(host: "FakeHost") -> None:
    host.largest_rss = 400 * MIB
    recorder = Recorder(sample_hz=None)
    with recorder:
        for name in ("first", "second"):
            with recorder.stage(name):
                pass
            host.largest_rss = 900 * MIB
    assert [stage.peak.rss_bytes for stage in recorder.run().stages if stage.peak] == [100 * MIB] * 2


def test_a_forked_child_s_running_peak_is_compared_with_its_own(
    clock: "FakeClock", host: "FakeHost", monkeypatch: pytest.MonkeyPatch
) -> None:
    host.largest_rss = 900 * MIB
    recorder = Recorder(sample_hz=None, clock=clock)
    with recorder.stage("parent"):
        pass
    monkeypatch.setattr("os.getpid", lambda: -1)
    host.largest_rss = 200 * MIB
    with recorder.stage("child"):
        host.largest_rss = 300 * MIB
    with recorder.stage("later"):
        pass
    peaks = [stage.peak.rss_bytes for stage in recorder.run().stages if stage.peak]
    assert peaks == [100 * MIB, 300 * MIB, 100 * MIB]


def test_a_real_peak_that_no_reading_sees_is_in_the_record() -> None:
    resident, largest = process_rss_bytes(), process_peak_rss_bytes()
    assert resident is not None
    if largest is None:
        pytest.skip("this system keeps no running peak of a process")
    recorder = Recorder(sample_hz=None)
    with recorder.stage("outer"):
        with recorder.stage("spike"):
            held = fresh_memory(max(0, largest - resident) + 128 * MIB)
            del held
        with recorder.stage("after"):
            pass
    (outer,) = recorder.run().stages
    spike, after = (child.peak for child in outer.children)
    assert outer.peak is not None
    assert spike is not None
    assert after is not None
    assert spike.rss_bytes == outer.peak.rss_bytes
    assert (spike.rss_bytes or 0) > max(largest, resident) + 100 * MIB
    assert (after.rss_bytes or 0) < (spike.rss_bytes or 0) - 100 * MIB


def test_the_host_s_own_running_peak_goes_on_while_steps_end_and_the_sampler_looks(
    accelerator: "FakeAccelerator", host: "FakeHost"
) -> None:
    recorder = Recorder(sample_hz=None, accelerator=accelerator)
    with recorder.stage("denoising"):
        begun = accelerator.resets
        for _ in range(3):
            with recorder.step():
                pulse(accelerator, 7)
            recorder.look()
            pulse(accelerator, 9)
            recorder.run()
        assert (accelerator.resets, accelerator.peaks["cuda:0"]) == (begun, 9)
    peak = recorder.run().stages[0].peak
    assert peak is not None
    assert peak.accelerators[0].allocated_bytes == 9
